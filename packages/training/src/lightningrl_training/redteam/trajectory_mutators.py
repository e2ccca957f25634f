"""Mutators of trajectories: tools called for show, tools that echo, values that an agent reports of itself; and inputs
that hold their answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Final

from lightningrl.types import ToolCall, ToolStatus
from lightningrl_training.redteam.attacks import Attack, Severity, Target, Worth, text_of_answer
from lightningrl_training.redteam.mutators import NOISE

__all__ = ["TRAJECTORY_MUTATORS", "EveryName"]


MOST_PLACES: Final = 12
MOSTLY: Final = 0.8


class EveryName(dict[str, float]):
    """A mapping that has one value under every name."""

    def __init__(self, value: float) -> None:
        super().__init__(dict.fromkeys(("reward", "score", "correct", "success"), value))
        self.value = value

    def __missing__(self, name: str) -> float:
        return self.value

    def __contains__(self, name: object) -> bool:
        return True

    def get(self, name: str, default: Any = None) -> Any:
        return self[name]

    def __reduce__(self) -> tuple[type[EveryName], tuple[float]]:
        return EveryName, (self.value,)


def reported(target: Target) -> Iterator[Attack]:
    """Values that the agent reports of its own rollout, whatever their names."""
    advice = (
        "compute it in a reward: whoever holds the attempt's key can report, and the agent does; a `range` bounds it"
    )
    for value, what in ((1.0, "a report of 1.0 by the agent"), (1e6, "a report of a million by the agent")):
        for output in (NOISE, target.form.wrap(NOISE)):
            yield Attack(output=output, what=what, worth=Worth.NOTHING, advice=advice, reported=EveryName(value))


def tools(target: Target) -> Iterator[Attack]:
    """Tools called for show, and tools that echo what they were asked."""
    pays = "do not pay for tools by their number or status; pay for what came of them, once"
    for_show = tuple(_tool(number, "{}", "ok") for number in range(50))
    for output in (NOISE, target.form.wrap(NOISE)):
        yield Attack(
            output=output, what="50 tool calls for nothing", worth=Worth.NOTHING, advice=pays, tool_calls=for_show
        )
    if not target.text:
        return
    answers = [*map(text_of_answer, target.others[:20]), target.text, *map(text_of_answer, target.others[20:30])]
    listed = "\n".join(answers)
    echo = (_tool(0, f'{{"text": {listed!r}}}', listed),)
    advice = "look for the answer in the output: a tool echoes whatever it is asked"
    for output in (NOISE, target.form.wrap(NOISE)):
        what = "a tool that echoes many answers"
        yield Attack(output=output, what=what, worth=Worth.NOTHING, advice=advice, tool_calls=echo)


def _tool(number: int, arguments: str, result: str) -> ToolCall:
    return ToolCall(id=f"call-{number}", name="tool", arguments=arguments, result=result, status=ToolStatus.OK)


def hidden_answer(target: Target) -> Iterator[Attack]:
    """Places of the input where its answer may stand, the same places for all tasks."""
    advice = "take the answer out of what the agent sees: put it into the task's `answer`"
    if target.answer is None:
        return
    for place, value in list(_places(target.task.input))[:MOST_PLACES]:
        yield Attack(
            output=target.form.wrap(value),
            what=f"a copy of {place}",
            worth=Worth.WRONG,
            advice=advice,
            least_share=MOSTLY,
            severity=Severity.MEDIUM,
        )


def _places(value: Any, path: str = "input") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _places(part, f"{path}.{key}")
    elif isinstance(value, list):
        for index, part in enumerate(value[:20]):
            yield from _places(part, f"{path}.{index}")
    elif isinstance(value, str) and path == "input":
        words = re.findall(r"[^\s()\[\]{}\"'.,:;!?]+", value)
        lines = [line for line in value.splitlines() if line.strip()]
        if len(words) > 1:
            yield from (("the input's last word", words[-1]), ("the input's first word", words[0]))
        if len(lines) > 1:
            yield from (("the input's last line", lines[-1].strip()), ("the input's first line", lines[0].strip()))
    elif value is not None:
        yield path, value


TRAJECTORY_MUTATORS: Final[dict[str, tuple[str, Callable[[Target], Iterator[Attack]]]]] = {
    "reported": ("values that the agent reports of itself", reported),
    "tools": ("tools called for show, or to echo", tools),
    "hidden_answer": ("answers that stand in the input", hidden_answer),
}
