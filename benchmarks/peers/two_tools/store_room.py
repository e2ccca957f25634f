"""A store room: things lie on shelves of a colour, and a shelf holds so many. Two tools tell, one question needs both.

How many things lie where the lamp lies?   ─► find("lamp") ─► "red" ─► how_many("red") ─► "7" ─► 7
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

__all__ = ["TOOLS", "StoreRoom", "held_out_tasks", "prompt", "right_number", "train_tasks"]

THINGS = ("lamp", "rope", "chair", "drum", "kite", "ladder", "mirror", "piano", "saddle", "trunk", "violin", "wheel")
SHELVES = ("red", "blue", "green", "white", "black", "brown", "grey", "pink")
MOST = 40
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {"name": {"type": "string", "description": meaning}},
                "required": ["name"],
            },
        },
    }
    for name, description, meaning in (
        ("find", "The shelf that a thing lies on.", "The thing."),
        ("how_many", "How many things lie on a shelf.", "The shelf."),
    )
]
"""As the agent describes them, and as TRL reads them off `StoreRoom`: by the alphabet, so that both sides' prompts
begin alike."""


def prompt(question: str) -> list[dict[str, Any]]:
    """Examples of another room, and the question."""
    messages: list[dict[str, Any]] = []
    for thing, shelf, count in (("clock", "yellow", "53"), ("pillow", "purple", "61"), ("candle", "orange", "47")):
        messages.append({"role": "user", "content": question_of(thing)})
        for tool, name, found in (("find", thing, shelf), ("how_many", shelf, count)):
            function = {"name": tool, "arguments": json.dumps({"name": name})}
            call = {"id": f"call_{len(messages)}", "type": "function", "function": function}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "content": found, "tool_call_id": call["id"]})
        messages.append({"role": "assistant", "content": count})
    return [*messages, {"role": "user", "content": question}]


class StoreRoom:
    """The tools, on one room. TRL makes one for each rollout and calls `reset` with the task's row; the agent here does
    the same itself. What the tools return is not annotated: TRL would describe that to the model, too."""

    def reset(self, room: str, **_: Any) -> None:
        self._room = json.loads(room)

    def find(self, name: str):  # type: ignore[no-untyped-def]
        """
        The shelf that a thing lies on.

        Args:
            name: The thing.
        """  # noqa: D212  as TRL reads it
        return str(self._room["shelf"].get(name, "nowhere"))

    def how_many(self, name: str):  # type: ignore[no-untyped-def]
        """
        How many things lie on a shelf.

        Args:
            name: The shelf.
        """  # noqa: D212
        return str(self._room["things"].get(name, "no such shelf"))


def make_room(rng: random.Random) -> dict[str, Any]:
    things = dict(zip(SHELVES, map(str, rng.sample(range(2, MOST), len(SHELVES))), strict=True))
    return {"shelf": {thing: rng.choice(SHELVES) for thing in THINGS}, "things": things}


def question_of(thing: str) -> str:
    return f"How many things lie where the {thing} lies?"


def train_tasks() -> Iterator[dict[str, Any]]:
    yield from _tasks("train", 2000)


def held_out_tasks() -> Iterator[dict[str, Any]]:
    yield from _tasks("held out", 40)


def _tasks(split: str, count: int) -> Iterator[dict[str, Any]]:
    rng = random.Random(split)
    for number in range(count):
        room, thing = make_room(rng), rng.choice(THINGS)
        answer = room["things"][room["shelf"][thing]]
        yield {
            "id": f"{split}/{number}",
            "input": {"question": question_of(thing), "room": json.dumps(room)},
            "answer": answer,
        }


def right_number(task: Any, output: Any, trajectory: object = None) -> float:
    """1.0 where the agent says the number."""
    return float(str(output).strip() == task.answer)
