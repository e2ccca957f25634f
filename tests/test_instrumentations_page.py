"""Exports of real instrumentations, imported again: the table of docs/how-to/import-traces.md is theirs.

scripts/try_instrumentations.py runs the instrumentations and records the exports; nothing is installed here.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "try_instrumentations.py"))


@pytest.mark.parametrize("case", SCRIPT["CASES"], ids=lambda case: case.name)
def test_each_way_of_an_instrumentation_is_recorded(case: Any) -> None:
    assert [how for how, _ in case.recorded] == list(case.hows)


def test_the_table_says_what_comes_of_the_recorded_exports() -> None:
    rows = [row for case in SCRIPT["CASES"] for row in SCRIPT["rows_of"](case)]
    page = (ROOT / "docs" / "how-to" / "import-traces.md").read_text("utf-8")
    assert SCRIPT["table"](rows) in page, "run scripts/try_instrumentations.py --table"
