"""Memory, processors and disk of the machine are read with its limits, whatever else runs on it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lightningrl.machine import cpu_seconds, memory_used

CUT_NAME = "import ctypes, sys; ctypes.CDLL(None).prctl(15, b'nom coup\\xc3', 0, 0, 0); print('named', flush=True); sys.stdin.read()"
"""Linux cuts a process's name after 15 bytes, and so in the middle of a character."""


@pytest.mark.skipif(sys.platform != "linux", reason="names of processes are read in /proc")
def test_a_process_whose_name_is_no_text_stops_nobody() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CUT_NAME], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "named\n"
        assert cpu_seconds() and memory_used()
        other.communicate("")
