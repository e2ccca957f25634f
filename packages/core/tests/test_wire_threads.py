"""Threads that read the same type for the first time at once: msgspec crashed the process then."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys, threading
from dataclasses import dataclass
from lightningrl import wire

sys.setswitchinterval(1e-7)

def try_once(read):
    @dataclass
    class Inner:
        a: int
        b: str
        c: list[float]

    @dataclass
    class Outer:
        first: Inner
        others: dict[str, Inner]
        d: float | None = None

    globals().update(Inner=Inner, Outer=Outer)
    inner = {"a": 1, "b": "x", "c": [0.5]}
    value = [{"first": inner, "others": {"y": inner}}]
    start = threading.Barrier(12)

    def work():
        start.wait()
        for _ in range(3):
            read(value, list[Outer])

    threads = [threading.Thread(target=work) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

for number in range(60):
    try_once(wire.convert if number % 2 else lambda value, kind: wire.decode(wire.encode(value), kind))
print("whole")
"""


def test_a_type_that_many_threads_read_for_the_first_time_crashes_nothing() -> None:
    ran = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120, check=False)
    assert (ran.returncode, ran.stdout) == (0, "whole\n"), ran.stderr[-2000:]
