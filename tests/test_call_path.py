"""One chat call crosses few files of the server, from top to bottom: `benchmarks/call_path.py` counts them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "call_path.py"
MOST_FILES = 20
MOST_RETURNS = 52


def test_a_chat_call_crosses_few_files_of_the_server_and_goes_back_seldom() -> None:
    run = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=True, timeout=120)
    counts = re.fullmatch(r"files (\d+), returns (\d+)", run.stdout.splitlines()[-1])
    assert counts is not None, run.stdout
    files, returns = map(int, counts.groups())
    assert (files <= MOST_FILES, returns <= MOST_RETURNS) == (True, True), run.stdout
