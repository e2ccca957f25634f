"""`scripts/check_pages.py`: which sentences and table cells of tutorials and how-tos it lets pass."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "check_pages.py"
breaches = runpy.run_path(str(SCRIPT))["breaches"]
COUNT = runpy.run_path(str(ROOT / "scripts" / "count_docs.py"))
LONG = " ".join(["word"] * 31)
CELL = "letters " * 16


@pytest.mark.parametrize(
    ("page", "line", "what"),
    [
        (f"# Title\n\n{LONG}.\n", 3, "31 words"),
        (f"A short one. {LONG}.\n", 1, "31 words"),
        (f"A line that is broken,\n{LONG}.\n", 1, "36 words"),
        (f"- short\n- {LONG}\n", 2, "31 words"),
        (f"See [{LONG}](a.md).\n", 1, "32 words"),
        (f"e.g. {LONG}.\n", 1, "32 words"),
        (f"| a | b |\n|---|---|\n| c | {CELL} |\n", 3, "127 characters"),
    ],
)
def test_a_breach_is_named_with_its_line(page: str, line: int, what: str) -> None:
    (breach,) = breaches(page)
    assert breach.line == line
    assert what in breach.what


@pytest.mark.parametrize(
    "page",
    [
        f"{' '.join(['word'] * 30)}.\n",
        f"```text\n{LONG}\n```\n",
        f"<!-- {LONG} -->\n",
        f"Type `{LONG}`.\n",
        f"- {' '.join(['word'] * 20)}\n- {' '.join(['word'] * 20)}\n",
        "Take `loop.steps` (e.g. 10). It goes on.\n",
        f"| [words]({'a' * 130}) | b |\n",
        f"| a command to copy | `{CELL}` |\n",
    ],
)
def test_what_is_short_or_no_prose_passes(page: str) -> None:
    assert breaches(page) == []


def test_tutorials_and_how_tos_have_no_breach_and_a_page_that_has_one_is_told(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(SCRIPT)], cwd=ROOT, check=True)
    (tmp_path / "page.md").write_text(f"{LONG}.\n", encoding="utf-8")
    ran = subprocess.run([sys.executable, str(SCRIPT), str(tmp_path)], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "page.md:1: a sentence of 31 words" in ran.stdout


def test_the_documentation_stays_within_its_words_and_few_of_its_lines_are_tables() -> None:
    pages = COUNT["count_pages"]()
    written = sum(page.words for page in pages if page.kind != "generated")
    assert written <= COUNT["MOST_WORDS"], "python scripts/count_docs.py --pages says where"
    assert COUNT["table_share"](pages) <= COUNT["MOST_TABLE_SHARE"], "a table whose cells are sentences is a list"


def test_a_page_is_counted_by_its_words_and_the_lines_of_its_tables() -> None:
    page = COUNT["count_page"](ROOT / "docs" / "troubleshooting.md")
    assert (page.name, page.kind, page.table_lines) == ("docs/troubleshooting.md", "generated", 0)
    readme = COUNT["count_page"](ROOT / "README.md")
    assert readme.kind == "start" and 0 < readme.table_lines < readme.lines < readme.words
