"""`scripts/check_words.py`: which words and sizes it lets pass."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "check_words.py"
breaches = runpy.run_path(str(SCRIPT))["breaches"]


@pytest.mark.parametrize(
    ("code", "line", "what"),
    [
        ('"""Of a whole run."""\n', 1, "'Of'"),
        ('class Bill:\n    tokens: int\n    """Whether: none."""\n', 3, "'Whether:'"),
        ("for one in choices:\n    pass\n", 1, "'one'"),
        ("def read(kept):\n    pass\n", 1, "'kept'"),
        ("bills = [\n    one.bill\n    for one in runs\n]\n", 3, "'one'"),
        ("class Served:\n    pass\n", 1, "Served"),
        (f"x = 1\nwords = '{'a' * 120}'\n", 2, "130 columns"),
        ("def act():\n" + "    x = 1\n" * 60, 1, "61 lines"),
    ],
)
def test_a_breach_is_named_with_its_line(code: str, line: int, what: str) -> None:
    (breach,) = breaches(code)
    assert breach.line == line
    assert what in breach.what


@pytest.mark.parametrize(
    "code",
    [
        '"""Predicted cost of the whole run."""\n',
        '"""Office hours."""\n',
        "bills = [one.bill for one in runs]\n",
        "class Need:\n    pass\n",
        "def act():\n" + "    x = 1\n" * 59,
        "text = 'Of what is found.'\n",
    ],
)
def test_what_keeps_to_the_rules_passes(code: str) -> None:
    assert breaches(code) == []


def test_a_breach_ends_the_script_with_1_and_its_place(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("x = 1\nkept = 2\n")
    ran = subprocess.run([sys.executable, str(SCRIPT), str(tmp_path)], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "module.py:2: 'kept' does not say what it is; name the type" in ran.stdout
    assert "1 breaches" in ran.stderr


def test_our_code_keeps_to_the_rules() -> None:
    """What `make check` asks of packages/*/src."""
    ran = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout
