"""Memory of a run's processes: each is counted once, under its own name, also what a child has started."""

from __future__ import annotations

import subprocess
import sys

from lightningrl_training.serving import measure_memory

HOLD = "import sys; held = bytearray(60_000_000); print(flush=True); sys.stdin.read()"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {HOLD!r}])"


def test_each_process_is_counted_under_its_own_name() -> None:
    before = measure_memory(())
    assert before["memory/trainer"] > 10e6
    server, pool = (
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for code in (HOLD, PARENT)
    )
    with server, pool:
        for process in (server, pool):
            assert process.stdout is not None
            process.stdout.readline()
        measured = measure_memory({server.pid})
        assert 60e6 < measured["memory/server"] < 200e6
        assert 60e6 < measured["memory/workers"] - before.get("memory/workers", 0.0) < 300e6
