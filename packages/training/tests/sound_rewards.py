"""Rewards that pay for what they mean, each with tasks: the red team finds nothing in them."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import date, timedelta
from difflib import SequenceMatcher
from typing import Any

from hackable_rewards import CHOICES, FUNCTIONS, LOSSES, SUMS, TOWNS

from lightningrl.types import Task, Trajectory
from lightningrl_credit.rewards.execution import Execution
from lightningrl_credit.rewards.matching import F1, Exact, Numeric, Pattern

__all__ = ["SOUND"]

ALIASES = [Task(id=task.id, input=task.input, answer=[task.answer, f"the city of {task.answer}"]) for task in TOWNS]
REASONED = [
    Task(id=task.id, input=task.input, answer=f"First {task.id}, then the rest.\n#### {task.answer}") for task in SUMS
]
DATES = [
    Task(id=f"d{number}", input=f"The day {number * 40} days after 2 January 2024?", answer=str(day))
    for number in range(1, 9)
    for day in [date(2024, 1, 2) + timedelta(days=number * 40)]
]
LISTS = [
    Task(id=f"i{number}", input=f"Divisors of {number}?", answer=[k for k in range(1, number + 1) if number % k == 0])
    for number in (12, 18, 20, 28, 30, 42, 45, 48)
]
RECORDS = [
    Task(id=task.id, input=task.input, answer={"town": task.answer, "letters": len(task.answer)}) for task in TOWNS
]
COSTS = [
    Task(id=f"k{number}", input=f"Tour {number}", answer=[3, 1, 2, 0][number % 4 :] + [4] * number)
    for number in range(8)
]


def last_number(task: Task, output: Any, trajectory: Trajectory) -> float:
    found = re.findall(r"-?\d+", str(output)[-200:])
    return float(bool(found) and found[-1] == task.answer)


def after_hashes(task: Task, output: Any, trajectory: Trajectory) -> float:
    said = re.search(r"####\s*(-?\d+)\s*$", str(output or ""))
    return float(said is not None and said[1] == task.answer.rpartition("#### ")[2])


def boxed(task: Task, output: Any, trajectory: Trajectory) -> float:
    found = re.findall(r"\\boxed\{([^{}]*)\}", str(output))
    return float(len(found) == 1 and found[0].strip() == task.answer)


def letter(task: Task, output: Any, trajectory: Trajectory) -> float:
    return float(str(output).strip().strip("().*` ").upper() == task.answer)


def closeness(task: Task, output: Any, trajectory: Trajectory) -> float:
    try:
        said = float(output)
    except (TypeError, ValueError):
        return 0.0
    return max(0.0, 1.0 - abs(said - float(task.answer)) / abs(float(task.answer))) if math.isfinite(said) else 0.0


def similarity(task: Task, output: Any, trajectory: Trajectory) -> float:
    return SequenceMatcher(None, task.answer, str(output or "")[:200], autojunk=False).ratio()


def plus_or_minus_one(task: Task, output: Any, trajectory: Trajectory) -> float:
    return 1.0 if str(output).strip() == task.answer else -1.0


def brief(task: Task, output: Any, trajectory: Trajectory) -> float:
    return float(str(output).strip() == task.answer) * (1.0 - 0.2 * min(1.0, len(str(output)) / 100))


def same_day(task: Task, output: Any, trajectory: Trajectory) -> float:
    try:
        return float(date.fromisoformat(str(output).strip()) == date.fromisoformat(task.answer))
    except ValueError:
        return 0.0


def same_members(task: Task, output: Any, trajectory: Trajectory) -> float:
    try:
        said = json.loads(output) if isinstance(output, str) else output
        given, right = {int(part) for part in said}, set(task.answer)
    except (TypeError, ValueError):
        return 0.0
    return len(given & right) / len(given | right)


def right_fields(task: Task, output: Any, trajectory: Trajectory) -> float:
    try:
        said = json.loads(output) if isinstance(output, str) else output
    except ValueError:
        return 0.0
    return sum(said.get(key) == value for key, value in task.answer.items()) / 2 if isinstance(said, dict) else 0.0


def in_field(task: Task, output: Any, trajectory: Trajectory) -> float:
    return float(isinstance(output, dict) and output.get("answer") == task.answer)


async def asked(task: Task, output: Any, trajectory: Trajectory) -> float:
    return float(str(output).strip().casefold() == task.answer.casefold())


def with_tool_bonus(task: Task, output: Any, trajectory: Trajectory) -> float:
    return 0.9 * float(str(output).strip() == task.answer) + 0.1 * bool(trajectory.tool_calls)


def half_for_the_form(task: Task, output: Any, trajectory: Trajectory) -> float:
    found = re.fullmatch(r"<answer>([^<>]*)</answer>", str(output).strip())
    return 0.0 if found is None else 0.2 + 0.8 * (found[1].strip() == task.answer)


_HARNESS = """
import ast, sys
names = {{}}
tree = ast.parse(open(0).read())
if [type(part) for part in tree.body] != [ast.FunctionDef]:
    sys.exit(1)
exec(compile(tree, "f", "exec"), names)
print({nonce!r} if all(names["f"](x) == x + {number} for x in (-3, 0, 8)) else "wrong")
"""


def unit_tests(task: Task, output: Any, trajectory: Trajectory) -> float:
    nonce = f"passed-{task.id}"
    harness = _HARNESS.format(nonce=nonce, number=int(task.id[1:]))
    ran = subprocess.run(
        [sys.executable, "-c", harness], input=str(output), capture_output=True, text=True, check=False, timeout=8
    )
    return float(ran.returncode == 0 and ran.stdout.strip() == nonce)


Sound = tuple[dict[str, Callable[..., Any]], list[Task]]
SOUND: dict[str, Sound] = {
    "exact": ({"right": Exact()}, TOWNS),
    "exact to the letter": ({"right": Exact(normalized=False)}, TOWNS),
    "exact, several right": ({"right": Exact()}, ALIASES),
    "exact in tags": ({"right": Exact(extract="<answer>(.*?)</answer>")}, TOWNS),
    "numeric": ({"right": Numeric()}, SUMS),
    "numeric with signs": ({"right": Numeric()}, LOSSES),
    "numeric after hashes": ({"right": Numeric(extract="#### (.*)")}, SUMS),
    "f1": ({"right": F1()}, TOWNS),
    "exact and a form": (
        {"right": Exact(extract="<answer>(.*?)</answer>"), "form": Pattern(pattern="<answer>.*</answer>")},
        TOWNS,
    ),
    "execution": ({"right": Execution(command=["cat", "{output}"], score="answer")}, TOWNS[:2]),
    "last number": ({"right": last_number}, SUMS),
    "after hashes": ({"right": after_hashes}, REASONED),
    "boxed": ({"right": boxed}, SUMS),
    "letter of a choice": ({"right": letter}, CHOICES),
    "closeness": ({"right": closeness}, SUMS),
    "similarity": ({"right": similarity}, TOWNS),
    "plus or minus one": ({"right": plus_or_minus_one}, TOWNS),
    "briefer is better": ({"right": brief}, TOWNS),
    "dates": ({"right": same_day}, DATES),
    "members of a list": ({"right": same_members}, LISTS),
    "fields of a record": ({"right": right_fields}, RECORDS),
    "a field of the output": ({"right": in_field}, TOWNS),
    "async": ({"right": asked}, TOWNS),
    "a bonus for tools": ({"right": with_tool_bonus}, TOWNS),
    "a part for the form": ({"right": half_for_the_form}, TOWNS),
    "unit tests": ({"right": unit_tests}, FUNCTIONS[:1]),
}
