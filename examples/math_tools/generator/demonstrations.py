"""Demonstrations for the starter policy: the calls of an agent that solves a problem, right or in imperfect ways.

The conversations are AutoGen's, message for message: what the agent of agent.py sends, with the tool's real answers.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from agent import SYSTEM
from autogen_core.tools import FunctionTool
from calculator import calculator
from data import build_problems
from mistakes import GIVE_UP, NO_TOOL, STOP_EARLY, arguments_of, mistaken
from problems import Problem

from lightningrl_torch.cold_start import Demonstration

__all__ = ["TOOLS", "build_demonstrations"]

Message = dict[str, Any]

TOOLS: list[Any] = [
    {"type": "function", "function": dict(FunctionTool(calculator, description=str(calculator.__doc__)).schema)}
]
"""The agent's tool as AutoGen describes it to the model."""


def build_demonstrations(problems: int, seed: int, *, is_faulty: bool) -> Iterator[Demonstration]:
    """Every call of every problem's conversation. With `is_faulty=False` all of them are right."""
    rng = random.Random(f"{seed} demonstrations {is_faulty}")
    for problem in build_problems("starter", problems, f"{seed} {is_faulty}"):
        messages: list[Message] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": problem.text}]
        for message in _conversation(problem, rng if is_faulty else None):
            messages.append(message)
            if message["role"] == "assistant":
                yield Demonstration(messages=list(messages), tools=TOOLS)


def _conversation(problem: Problem, rng: random.Random | None) -> Iterator[Message]:
    """The assistant's and the tool's messages up to the answer; `rng` draws the mistakes, None makes none."""
    value = problem.start
    steps = list(problem.steps)
    if rng is not None and rng.random() < NO_TOOL:
        steps = []
    elif rng is not None and rng.random() < STOP_EARLY[len(steps)]:
        steps.pop()
    for number, right in enumerate(steps):
        step = right if rng is None else mistaken(right, rng)
        expression = step.expression(value)
        arguments = json.dumps({"expression": expression}) if rng is None else arguments_of(expression, rng)
        yield _call(arguments, number)
        if not _is_json(arguments):
            return  # the gateway hands broken markup to the agent as text, and the agent is done
        if "x" in arguments.removeprefix('{"expression"'):
            yield _tool_says(f"{expression.replace('*', 'x')} is no arithmetic expression", number)
            if rng is not None and rng.random() < GIVE_UP:
                break
            yield _call(json.dumps({"expression": expression}), number)
        value = calculator(expression)
        yield _tool_says(value, number)
    yield {"role": "assistant", "content": f"### ANSWER: {value} ###"}


def _call(arguments: str, number: int) -> Message:
    function = {"name": "calculator", "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": f"call_{number}", "type": "function", "function": function}],
    }


def _tool_says(text: str, number: int) -> Message:
    return {"role": "tool", "content": text, "tool_call_id": f"call_{number}"}


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
