"""Tasks of traces as the agent's own function takes and answers them.

input    {"messages": [["user", "7 + 8?"]]}          ─►  "7 + 8?"   or what `--input messages.0.1` names
output   {"messages": [ …, {"content": "15", …}]}    ─►  "15"       or what `--output messages.-1.content` names
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from lightningrl.errors import ConfigError
from lightningrl.types import Task, Trajectory
from lightningrl_viewer.reading.dialogue import final_text, question_of

__all__ = ["TaskMapping"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskMapping:
    """Places of a task's input and answer, as dotted paths. None = the text that a state of messages asks, and the last
    message's text; the value itself where it is not such a state."""

    input: str | None = None
    output: str | None = None

    def map_task(self, task: Task) -> Task:
        """Return a task with the agent's own input. Raises ConfigError naming the task that the path does not fit."""
        if self.input is not None:
            return replace(task, input=_follow(task.input, self.input, f"--input {self.input!r}", task.id))
        question = question_of(task.input)
        return task if question is None else replace(task, input=question)

    def answer_of(self, trajectory: Trajectory) -> Any:
        """Return what a rollout answered; None where its trace does not say. Raises ConfigError as above."""
        output = trajectory.output
        if self.output is not None:
            return _follow(output, self.output, f"--output {self.output!r}", trajectory.task.id)
        return final_text(output) if isinstance(output, dict) and "messages" in output else output


def _follow(value: Any, path: str, option: str, task: str) -> Any:
    for part in path.split("."):
        try:
            if isinstance(value, list) and part.removeprefix("-").isdigit():
                value = value[int(part)]
            elif isinstance(value, dict):
                value = value[part]
            else:
                raise LookupError(part)
        except LookupError:
            there = f"{len(value)} items" if isinstance(value, list) else type(value).__name__
            there = ", ".join(value) or "nothing" if isinstance(value, dict) else there
            problem = f"there is no {part!r}; there is: {there}"
            raise ConfigError(f"{option} does not fit task {task!r}: {problem}") from None
    return value
