"""Checks what a harness has done, by a command in its folder: `check = "pytest -q"`.

exit status 0, and how many tests passed and failed where the output says it (pytest, unittest, jest, cargo, go, TAP)
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from lightningrl_client.runtime.harnesses.folder import Room
from lightningrl_client.runtime.harnesses.program import run_program

__all__ = ["count_tests", "run_check"]

LONGEST_SAID: Final = 2_000
"""Characters of the check's output that are kept: its end."""
_COUNT: Final = re.compile(r"(\d+) (passed|failed|failures?|errors?)\b")
_SUMMARY: Final = re.compile(r"^.*\b\d+ (?:passed|failed)\b.*$", re.MULTILINE)
_UNITTEST: Final = re.compile(r"^Ran (\d+) tests? in .*\n+(?:OK|FAILED)(.*)$", re.MULTILINE)
_UNITTEST_BAD: Final = re.compile(r"\b(?:failures|errors|unexpected successes)=(\d+)")
_GO: Final = re.compile(r"^\s*--- (PASS|FAIL): ", re.MULTILINE)
_TAP: Final = re.compile(r"^(not )?ok\b", re.MULTILINE)


async def run_check(
    words: Sequence[str], room: Room, environment: Mapping[str, str], *, seconds: float, most_bytes: int
) -> dict[str, Any]:
    """Run it in the room's working folder: `status` (None = it ran longer than `seconds`), `passed` and
    `failed` (None = the output does not say), `said`, the end of its output."""
    try:
        async with asyncio.timeout(seconds):
            ended = await run_program(words, room, environment, most_bytes=most_bytes, one_output=True)
    except TimeoutError:
        return {"status": None, "passed": None, "failed": None, "said": f"the check ran longer than {seconds:g} s"}
    passed, failed = count_tests(ended.output) or (None, None)
    return {"status": ended.status, "passed": passed, "failed": failed, "said": ended.output[-LONGEST_SAID:]}


def count_tests(text: str) -> tuple[int, int] | None:
    """Tests that passed and failed, by the last summary in a runner's output; None where there is none."""
    if summaries := _SUMMARY.findall(text):
        counts = [(int(number), word) for number, word in _COUNT.findall(summaries[-1])]
        passed = sum(number for number, word in counts if word == "passed")
        return passed, sum(number for number, word in counts if word != "passed")
    if summaries := list(_UNITTEST.finditer(text)):
        failed = sum(map(int, _UNITTEST_BAD.findall(summaries[-1][2])))
        return max(0, int(summaries[-1][1]) - failed), failed
    if results := _GO.findall(text):
        return results.count("PASS"), results.count("FAIL")
    if marks := _TAP.findall(text):
        return marks.count(""), len(marks) - marks.count("")
    return None
