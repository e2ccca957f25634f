"""Edits of the prompt by length that Anthropic's and OpenAI's servers do if asked (`context_management`).

clear_tool_uses_20250919   trigger (tokens or tool uses), and more results than it keeps
clear_thinking_20251015    more turns that think than it keeps
compact_20260112           trigger (tokens)
compaction (responses)     compact_threshold (tokens)
─► ContextEdit: the longest prompt that the edit leaves as it is
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightningrl_server.gateway.request import ContextEdit, Refusal

__all__ = ["read_compaction", "read_edits"]

_PARAM = "context_management"
_NEVER = 2**62


def read_edits(config: Any, messages: Sequence[Mapping[str, Any]]) -> tuple[ContextEdit, ...]:
    """Edits of a messages request, for these messages in our own terms. Raises Refusal for those that nobody knows."""
    edits = _entries(config.get("edits") if isinstance(config, Mapping) else config, "edits")
    return tuple(_read_edit(edit, f"{_PARAM}.edits[{index}]", messages) for index, edit in enumerate(edits))


def read_compaction(config: Any) -> tuple[ContextEdit, ...]:
    """Edits of a responses request. Raises Refusal for those that nobody knows."""
    edits: list[ContextEdit] = []
    for index, entry in enumerate(_entries(config, "entries")):
        where = f"{_PARAM}[{index}]"
        if entry.get("type") != "compaction":
            raise _unknown(entry.get("type"), where, "compaction")
        beyond = _whole(entry.get("compact_threshold"), f"{where}.compact_threshold", _NEVER)
        edits.append(ContextEdit(name="compaction", beyond=beyond))
    return tuple(edits)


def _read_edit(edit: Mapping[str, Any], where: str, messages: Sequence[Mapping[str, Any]]) -> ContextEdit:
    kind = edit.get("type")
    if kind == "clear_tool_uses_20250919":
        beyond = _beyond_of_tool_uses(edit, where, messages)
    elif kind == "clear_thinking_20251015":
        beyond = _NEVER if _thinking_turns(messages) <= _kept_turns(edit.get("keep"), where) else -1
    elif kind == "compact_20260112":
        _, beyond = _value(edit, "trigger", where, 150_000, ("input_tokens",))
    else:
        raise _unknown(kind, where, "clear_tool_uses_20250919, clear_thinking_20251015, compact_20260112")
    return ContextEdit(name=kind, beyond=beyond)


def _beyond_of_tool_uses(edit: Mapping[str, Any], where: str, messages: Sequence[Mapping[str, Any]]) -> int:
    unit, trigger = _value(edit, "trigger", where, 100_000, ("input_tokens", "tool_uses"))
    _, keep = _value(edit, "keep", where, 3, ("tool_uses",))
    _, at_least = _value(edit, "clear_at_least", where, 0, ("input_tokens",))
    names = edit.get("exclude_tools")
    if not isinstance(names, list | None):
        raise Refusal(f"{where}.exclude_tools is no list of names", param=_PARAM)
    excluded = set(map(str, names or ()))
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    tools = {call.get("id"): call["function"]["name"] for call in calls}
    results = [message.get("tool_call_id") for message in messages if message["role"] == "tool"]
    if sum(tools.get(call_id) not in excluded for call_id in results) <= keep:
        return _NEVER
    if unit == "tool_uses":
        return at_least if len(calls) > trigger else _NEVER
    return max(trigger, at_least)


def _thinking_turns(messages: Sequence[Mapping[str, Any]]) -> int:
    """Number of the assistant's turns that think; a turn lasts until the user says more than results of tools."""
    turns, is_counted = 0, False
    for message in messages:
        if message["role"] == "user":
            is_counted = False
        elif message.get("reasoning_content") and not is_counted:
            turns, is_counted = turns + 1, True
    return turns


def _kept_turns(keep: Any, where: str) -> int:
    if keep == "all" or (isinstance(keep, Mapping) and keep.get("type") == "all"):
        return _NEVER
    return _value({"keep": keep}, "keep", where, 1, ("thinking_turns",))[1]


def _value(edit: Mapping[str, Any], key: str, where: str, default: int, units: tuple[str, ...]) -> tuple[str, int]:
    """`{"type": "input_tokens", "value": 30000}` as its unit and its number."""
    given = edit.get(key)
    if given is None:
        return units[0], default
    unit = given.get("type") if isinstance(given, Mapping) else None
    if not isinstance(given, Mapping) or unit not in units:
        raise Refusal(
            f"{where}.{key} is {given!r:.200}; send an object with type {' or '.join(map(repr, units))} and a value",
            param=_PARAM,
        )
    return str(unit), _whole(given.get("value"), f"{where}.{key}.value", None)


def _whole(value: Any, where: str, default: int | None) -> int:
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _NEVER or value != int(value):
        raise Refusal(f"{where} is {value!r:.200}; it must be a whole number that is at least 0", param=_PARAM)
    return int(value)


def _entries(value: Any, what: str) -> list[Mapping[str, Any]]:
    entries = [] if value is None else value
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        raise Refusal.at(_PARAM, f"has {what} that are no list of objects")
    return entries


def _unknown(kind: Any, where: str, types: str) -> Refusal:
    return Refusal(
        f"{where} is of type {kind!r:.200}, which nobody here knows; known are {types}: leave it out", param=_PARAM
    )
