"""What a step of a small policy takes: on one CPU thread, on two, and on two where another thread of the process has a team, too.

    python benchmarks/learner_threads.py

Such a team comes of any operation on several threads, for good. `TorchBackend` therefore computes with several threads in one thread alone.
"""

from __future__ import annotations

import random
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from engine_throughput import SHAPE, VOCABULARY

from lightningrl.types import Sample
from lightningrl_torch.backend import TorchBackend
from lightningrl_torch.device import cpu_threads
from lightningrl_torch.testing import make_sample, save_policy

ROWS, PROMPT, COMPLETION = 200, 90, 40


def make_rows() -> list[Sample]:
    rng = random.Random(0)

    def words(count: int) -> list[int]:
        return [rng.randrange(257, VOCABULARY) for _ in range(count)]

    return [
        make_sample(words(PROMPT), words(COMPLETION), rng.gauss(0, 1), rollout=str(row), weight=1 / ROWS, logprobs=[-1.0] * COMPLETION)
        for row in range(ROWS)
    ]


def seconds(work: Callable[[], object], rounds: int = 4) -> float:
    """The least of several rounds, by the clock, after one that builds what is built once."""
    work()
    found = []
    for _ in range(rounds):
        began = time.monotonic()
        work()
        found.append(time.monotonic() - began)
    return min(found)


def main() -> None:
    rows = make_rows()
    with tempfile.TemporaryDirectory() as folder, cpu_threads(1):
        policy = save_policy(Path(folder), **SHAPE)
        one, two = (TorchBackend(policy=policy, device="cpu", threads=threads, learning_rate=0.0) for threads in (1, 2))
        figures = {"one thread": seconds(lambda: one.learn(rows)), "two threads": seconds(lambda: two.learn(rows))}
        stays = threading.Event()
        other = threading.Thread(target=_make_a_team, args=(stays,))
        other.start()
        figures["two threads, beside another team"] = seconds(lambda: two.learn(rows))
        stays.set()
        other.join()
        for backend in (one, two):
            backend.close()
    for name, value in figures.items():
        print(f"learn  {name:34s} {value:5.2f} s  {value / figures['one thread']:.2f}")


def _make_a_team(stays: threading.Event) -> None:
    with cpu_threads(2):
        torch.ones(1_000_000).add(1.0)
    stays.wait()


if __name__ == "__main__":
    main()
