"""Exports of real instrumentations, imported again: the table of docs/how-to/import-traces.md is theirs.

scripts/try_instrumentations.py runs the instrumentations and records the exports; nothing is installed here.
"""

from __future__ import annotations

import json
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


@pytest.mark.parametrize(
    ("case", "how"),
    [(case, how) for case in SCRIPT["CASES"] if not case.harness for how in case.hows],
    ids=lambda value: getattr(value, "name", value),
)
def test_each_instrumentation_tells_the_same_conversation(case: Any, how: str) -> None:
    calls = SCRIPT["read_calls"](dict(case.recorded)[how])
    dialogue: list[dict[str, Any]] = [*calls[1].messages, calls[1].answer]
    system, user, asks, result, answer = dialogue
    (asked,) = asks["tool_calls"]
    assert (len(calls), system["content"], user["role"]) == (2, "Answer in a word.", "user")
    assert (asked["function"]["name"], json.loads(asked["function"]["arguments"])) == ("look_up", {"day": "today"})
    assert (result["tool_call_id"], result["content"]) == (asked["id"], "serendipity")
    assert (answer["content"], calls[1].finish_reason) == ("Serendipity.", "stop")
    assert calls[0].answer["tool_calls"] == asks["tool_calls"], "the answer is told as its history is"
