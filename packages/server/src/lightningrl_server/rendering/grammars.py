"""Grammars of answers, in llguidance's Lark: what the policy may say where a call asks for a format or a tool call.

response_format     start: thought? json                              JSON of the schema, written as json.dumps does
forced tool call    start: " " json "}\\n" </tool_call>                after the beginning that stands in the prompt
both may come       start: thought? (json | <tool_call> "\\n" call)    where tools are offered beside the format
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from lightningrl_server.rendering.renderer import PolicyRenderer

__all__ = ["call_grammar", "format_grammar"]

_WRITTEN: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as templates and json.dumps write it, and no space to ramble in."""
_BARE: Final = ("default", "qwen", "prime-qwen", "llama-3")
"""Beginnings of the names of renderers whose answers are their text, and no markup around it."""
_ANYTHING: Final = {"type": "object"}

Tools = Sequence[Mapping[str, Any]]


def format_grammar(
    renderer: PolicyRenderer, prompt_ids: Sequence[int], schema: Any, tools: Tools = (), *, several: bool = True
) -> str | None:
    """The grammar of an answer that is JSON of a `schema`, or calls one of the `tools` (`several` of them) instead; a
    thinking policy may think before it. None = the markup of this policy is not known well enough."""
    if renderer.has_channels or not renderer.family.startswith(_BARE):
        return None
    rules = [f"answer: %json {_written(schema)}"]
    choices = ["answer"]
    if tools:
        if renderer.open_call((), None) is None:
            return None
        opening = _mark(renderer, "<tool_call>")
        rules += _calls(renderer, tools, several=several)
        choices.append(f'{opening} "\\n" calls')
    thought, start = _thought(renderer, prompt_ids)
    return "\n".join([f"start: {start}({' | '.join(choices)})", *thought, *rules])


def call_grammar(
    renderer: PolicyRenderer, prompt_ids: Sequence[int], tools: Tools, name: str | None, *, several: bool = True
) -> str | None:
    """The grammar of what follows the beginning of a forced tool call: of the tool `name`, or (None) of any, and then
    `several`. None = the prompt ends in no such beginning."""
    _, opening = renderer.split_opening(prompt_ids)
    if not opening:
        return None
    if name is None:
        return "\n".join(["start: calls", *_calls(renderer, tools, several=several)])
    schema = next(_parameters(tool) for tool in tools if tool["function"]["name"] == name)
    close = _mark(renderer, "</tool_call>")
    return f'start: " " arguments "}}\\n" {close}\narguments: %json {_written(schema)}'


def _calls(renderer: PolicyRenderer, tools: Tools, *, several: bool) -> list[str]:
    """Rules of `calls`: what follows `<tool_call>` and a line's end, calls after the first included."""
    opening, close = _mark(renderer, "<tool_call>"), _mark(renderer, "</tool_call>")
    names = [f"call_{number}" for number in range(len(tools))]
    rules = [f'calls: call ("\\n" {opening} "\\n" call)*' if several else "calls: call"]
    rules.append(f'call: ({" | ".join(names)}) "}}\\n" {close}')
    for name, tool in zip(names, tools, strict=True):
        head = f'{{"name": {json.dumps(tool["function"]["name"])}, "arguments": '
        rules += [
            f"{name}: {json.dumps(head)} {name}_arguments",
            f"{name}_arguments: %json {_written(_parameters(tool))}",
        ]
    return rules


def _parameters(tool: Mapping[str, Any]) -> Any:
    return tool["function"].get("parameters") or _ANYTHING


def _written(schema: Mapping[str, Any]) -> str:
    return json.dumps({**schema, "x-guidance": _WRITTEN})


def _thought(renderer: PolicyRenderer, prompt_ids: Sequence[int]) -> tuple[list[str], str]:
    """The rule of a reasoning block before the answer, and its place in `start`; nothing where there can be none."""
    tail = renderer.decode(prompt_ids[-8:]).rstrip()
    is_open = tail.endswith("<think>")
    if tail.endswith("</think>") or not (is_open or renderer.may_think):
        return [], ""
    gap = "gap: /\\n{0,3}/"
    if not renderer.has_atomic_thinking:  # the end of the block is text like any other
        return ['thought[suffix="</think>"]: /(?s:.*)/', gap], "thought gap "
    text = f"/(?s:.*)/ {_mark(renderer, '</think>')} gap"
    if is_open:
        return [f"thought: {text}", gap], "thought "
    return [f"thought: {_mark(renderer, '<think>')} {text}", gap], "thought? "


def _mark(renderer: PolicyRenderer, text: str) -> str:
    """Markup as a token, where it is one, else as text."""
    ids = renderer.tokenizer.encode(text)
    return f"<[{ids[0]}]>" if len(ids) == 1 else json.dumps(text)
