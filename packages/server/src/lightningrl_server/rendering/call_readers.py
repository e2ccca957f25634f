"""Readers of tool-call markup: each takes a completion's text and yields the blocks of it that are no plain text.

"See:\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>" ─► [Block(start=5, end=…, calls=(add {"a": 1},))]

A block that cannot be read, or whose end has not come yet, has a problem; it stays text. What is read once is read the
same however the text goes on.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from lightningrl_server.rendering.arguments import is_utf8, write_arguments

__all__ = [
    "Block",
    "Reader",
    "WrittenCall",
    "json_blocks",
    "read_harmony",
    "read_llama",
    "read_mistral",
    "sections",
]


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A tool call that a model wrote."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None
    """The call's name for itself, where the markup has room for one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A part of a text, `text[start:end]`, that is no plain text."""

    start: int
    end: int
    calls: tuple[WrittenCall, ...] = ()
    content: str = ""
    """Text that an agent is shown in its place."""
    reasoning: str = ""
    problem: str | None = None
    """Sentence on why it is no tool call (yet); None = it is read."""


Reader = Callable[[str], Iterator[Block]]

_DECODER: Final = json.JSONDecoder()
_SPACE: Final = re.compile(r"\s*")
_UNENDED: Final = "the call has no end"


def json_blocks(*openings: str, closing: str | None) -> Reader:
    """A reader of JSON calls, an object or a list of them, between two marks (None = the JSON ends the block):
    `<tool_call>{"name": "f", "arguments": {}}</tool_call>`, `<|tool_call|>[{"name": "f", "arguments": {}}]`."""
    opening = re.compile("|".join(map(re.escape, openings)))

    def read(text: str) -> Iterator[Block]:
        place = 0
        while match := opening.search(text, place):
            value, end = _json_at(text, match.end())
            after = _skip(text, end)
            is_closed = closing is None or text.startswith(closing, after)
            if value is not None and is_closed:
                place = end if closing is None else after + len(closing)
                yield _block(match.start(), place, *_calls_of(value))
                continue
            stop = text.find(closing, match.end()) if closing is not None else -1
            next_match = opening.search(text, match.end())
            place = stop + len(closing or "") if stop >= 0 else next_match.start() if next_match else len(text)
            problem = _UNENDED if stop < 0 else "what stands between the marks is no JSON"
            yield Block(start=match.start(), end=place, problem=problem)

    return read


_MISTRAL: Final = re.compile(r"\[TOOL_CALLS\]")
_MISTRAL_NAME: Final = re.compile(r"\s*([^\s\[{]+)(?:\[CALL_ID\](\w+))?(?:\[ARGS\])?(?=\s*\{)")


def read_mistral(text: str) -> Iterator[Block]:
    """Read `[TOOL_CALLS] [{"name": "f", "arguments": {}}]`, and of newer models `[TOOL_CALLS]f[ARGS]{}` for each
    call."""
    place = 0
    while match := _MISTRAL.search(text, place):
        named = _MISTRAL_NAME.match(text, match.end())
        value, end = _json_at(text, named.end() if named else match.end())
        if value is None:
            other = _MISTRAL.search(text, match.end())
            place = other.start() if other else len(text)
            yield Block(start=match.start(), end=place, problem=_UNENDED)
            continue
        if named is not None:
            value = {"name": named[1], "arguments": value, "id": named[2]}
        place = end
        yield _block(match.start(), end, *_calls_of(value))


_LLAMA: Final = re.compile(
    r"(?:<\|python_tag\|>|<\|python_start\|>|\A|(?<=\n)|(?<=[;}\]]))\s*"
    r"(?:(?P<json>\{)|(?P<list>\[(?=\s*(?:\{|\Z|[A-Za-z_][\w.]*\s*(?:\(|\Z)))))"
)
_AFTER_LLAMA: Final = re.compile(r"\s*;|<\|python_end\|>")
_PYTHON_TAG: Final = re.compile(r"<\|python_(?:tag|start)\|>")


def read_llama(text: str) -> Iterator[Block]:
    """Read `{"name": "f", "parameters": {}}` and `[f(a=1), g()]`, where a line begins with it or behind
    `<|python_tag|>`; several are split by `;`."""
    place = 0
    while match := _LLAMA.search(text, place):
        start = match.start("json") if match["json"] else match.start("list")
        value, end = _json_at(text, start)
        if value is None and match["list"]:
            value, end = _python_at(text, start)
        is_tagged = _PYTHON_TAG.match(text, match.start()) is not None
        if value is None:
            line = text.find("\n", start)
            place = line if line >= 0 else len(text)
            yield Block(start=match.start(), end=place, problem=_UNENDED)
        elif is_tagged or _looks_called(value):
            after = _AFTER_LLAMA.match(text, end)
            place = after.end() if after else end
            yield _block(match.start(), place, *_calls_of(value))
        else:
            place = end  # a list or an object of the answer's own


def sections(section: str, call: str, separator: str, end: str, section_end: str) -> Reader:
    """A reader of calls between marks of their own, in a section: DeepSeek's (`function<sep>f` and fenced JSON, or
    `f<sep>{}`) and Kimi's (`functions.f:0<sep>{}`)."""
    opening = re.compile(f"{re.escape(section)}\\s*(?:{re.escape(call)})?|{re.escape(call)}")

    def read(text: str) -> Iterator[Block]:
        place = 0
        while match := opening.search(text, place):
            stop = text.find(end, match.end())
            if not match[0].endswith(call) or stop < 0:
                other = opening.search(text, match.end())
                place = other.start() if other else len(text)
                yield Block(start=match.start(), end=place, problem=_UNENDED)
                continue
            head, middle, tail = text[match.end() : stop].partition(separator)
            place = stop + len(end)
            closed = _skip(text, place)
            if text.startswith(section_end, closed):
                place = closed + len(section_end)
            if not middle:
                yield Block(start=match.start(), end=place, problem=f"the call has no {separator}")
            else:
                yield _block(match.start(), place, *_named_call(head, tail))

    return read


_HARMONY_HEAD: Final = re.compile(r"<\|start\|>(?:assistant)?|\A\s*(?=to=)|(?=<\|channel\|>)")
_HARMONY_END: Final = re.compile(r"<\|(end|call|return|start)\|>")
_MESSAGE: Final = "<|message|>"


def read_harmony(text: str) -> Iterator[Block]:
    """Read the channels of GPT-OSS: `<|channel|>analysis<|message|>…<|end|>` is reasoning, `commentary
    to=functions.f` a call that `<|call|>` ends, all else content."""
    place = 0
    while match := _HARMONY_HEAD.search(text, place):
        body = text.find(_MESSAGE, match.end())
        if body < 0:
            yield Block(start=match.start(), end=len(text), problem="the message has no beginning")
            return
        header, body = text[match.end() : body], body + len(_MESSAGE)
        end = _HARMONY_END.search(text, body)
        written = text[body : end.start() if end else len(text)]
        place = len(text) if end is None else end.start() if end[1] == "start" else end.end()
        channel, target = re.search(r"<\|channel\|>\s*(\w+)", header), re.search(r"to=([^\s<]+)", header)
        if target is None:
            is_thought = channel is not None and channel[1] == "analysis"
            yield Block(
                start=match.start(),
                end=place,
                content="" if is_thought else written,
                reasoning=written if is_thought else "",
            )
        elif end is None or end[1] == "start":
            yield Block(start=match.start(), end=place, problem=_UNENDED)
        else:
            yield _block(match.start(), place, *_named_call(target[1], written))


def _block(start: int, end: int, calls: tuple[WrittenCall, ...], problem: str | None) -> Block:
    return Block(start=start, end=end, calls=() if problem else calls, problem=problem)


def _named_call(head: str, tail: str) -> tuple[tuple[WrittenCall, ...], str | None]:
    """The call `functions.f:0` or `f` with its JSON; or `function` with name and fenced JSON."""
    if not tail.lstrip().startswith("{"):  # DeepSeek V3 and R1
        head, _, tail = tail.strip().partition("\n")
        tail = tail.strip().removeprefix("```json").removeprefix("```").removesuffix("```")
    written = head.strip()
    name = written.removeprefix("functions.").partition(":")[0]
    value, end = _json_at(tail, 0)
    if value is None or tail[end:].strip():
        return (), f"the arguments of {name!r} are no JSON"
    return _calls_of({"name": name, "arguments": value, "id": written if written != name else None})


def _calls_of(value: Any) -> tuple[tuple[WrittenCall, ...], str | None]:
    """The calls that JSON asks for, and why it asks for none."""
    calls: list[WrittenCall] = []
    for item in value if isinstance(value, list) else [value]:
        if not isinstance(item, dict) or not isinstance(name := item.get("name"), str) or not name or not is_utf8(name):
            return (), "a call names no tool"
        arguments = item.get("arguments", item.get("parameters", {}))
        if not isinstance(arguments, dict) or write_arguments(arguments) is None:
            return (), f"the arguments of {name!r} are no object that an agent could take"
        own = item.get("id")
        calls.append(WrittenCall(name, arguments, own if isinstance(own, str) else None))
    return tuple(calls), None if calls else "the list of calls is empty"


def _looks_called(value: Any) -> bool:
    """True for JSON that can be nothing but calls: an answer may be JSON, too."""
    items = value if isinstance(value, list) else [value]
    return bool(items) and all(
        isinstance(item, dict) and "name" in item and ("parameters" in item or "arguments" in item) for item in items
    )


def _skip(text: str, place: int) -> int:
    match = _SPACE.match(text, place)
    return match.end() if match else place


def _json_at(text: str, place: int) -> tuple[Any, int]:
    """The JSON object or list at a place of a text, and where it ends; None = there is none that ends."""
    place = _skip(text, place)
    if not text.startswith(("{", "["), place):
        return None, place
    try:
        return _DECODER.raw_decode(text, place)
    except (ValueError, RecursionError):
        return None, place


def _python_at(text: str, place: int) -> tuple[Any, int]:
    """Calls written as Python, `[f(a=1), g(b="x")]`, as JSON would have them; None = there is none that ends."""
    end = _bracket_end(text, place)
    if end is None:
        return None, place
    try:
        tree = ast.parse(text[place:end], mode="eval").body
        return [_python_call(node) for node in tree.elts] if isinstance(tree, ast.List) else [], end
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return [], end


_JSON_WORDS: Final = {"true": True, "false": False, "null": None}


def _python_call(node: ast.expr) -> dict[str, Any]:
    """A call as JSON has it. Raises ValueError for what is none."""
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call with named arguments")
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("an argument without a name")
        value = keyword.value
        word = value.id if isinstance(value, ast.Name) else ""
        arguments[keyword.arg] = _JSON_WORDS[word] if word in _JSON_WORDS else ast.literal_eval(value)
    return {"name": ast.unparse(node.func), "arguments": arguments}


def _bracket_end(text: str, place: int) -> int | None:
    """Place behind the bracket that closes the one at `place`; those in quotes do not count. None = there is none."""
    depth, quote, position = 0, "", place
    while position < len(text):
        mark = text[position]
        if quote:
            if mark == "\\":
                position += 1
            elif mark == quote:
                quote = ""
        elif mark in "\"'":
            quote = mark
        elif mark in "[({":
            depth += 1
        elif mark in "])}":
            depth -= 1
            if depth == 0:
                return position + 1
        position += 1
    return None
