"""Tools as a prompt's text has them: the store keeps names and arguments, descriptions stand in the prompt alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from lightningrl_traces.records import Message

__all__ = ["find_tools"]


def find_tools(offered: Mapping[str, Any], text: str) -> Iterator[tuple[Message, ...]]:
    """Yield readings of the tools that a call was offered (`Transition.offered`), the fullest first: as JSON in the
    prompt, in its order, then without descriptions. One empty reading where it was offered none."""
    if not offered:
        yield ()
        return
    written: dict[str, Message] = {}
    for value in _objects(text):
        inner = value.get("function")
        function: dict[str, Any] = inner if isinstance(inner, dict) else value
        name = function.get("name")
        if isinstance(name, str) and name in offered and name not in written and "arguments" not in function:
            written[name] = {"type": "function", "function": function}
            if len(written) == len(offered):
                yield tuple(written.values())
                break
    yield tuple(
        {"type": "function", "function": {"name": name, **({} if schema is None else {"parameters": schema})}}
        for name, schema in offered.items()
    )


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """Yield the outermost JSON objects in a text."""
    decode = json.JSONDecoder().raw_decode
    place = text.find("{")
    while place >= 0:
        end = place + 1
        try:
            value, end = decode(text, place)
        except (ValueError, RecursionError):
            pass
        else:
            yield value
        place = text.find("{", end)
