"""Grammars of answers, in llguidance's Lark: what the policy may say where a call asks for a format or a tool call.

response_format     start: thought? json                              JSON of the schema, written as json.dumps does
forced tool call    start: " " json "}\\n" </tool_call>                after the beginning that stands in the prompt
both may come       start: thought? (json | <tool_call> "\\n" call)    where tools are offered beside the format

The pieces around a call's name and arguments are those of its markup's `CallForm`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from lightningrl_server.rendering.call_forms import CallForm
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
        if renderer.open_call((), None) is None or renderer.call_form is None:
            return None
        rules += _calls(renderer, renderer.call_form, tools, several=several)
        choices.append(" ".join((*_text(renderer, renderer.call_form.begin), "calls")))
    thought, start = _thought(renderer, prompt_ids)
    return "\n".join([f"start: {start}({' | '.join(choices)})", *thought, *rules])


def call_grammar(
    renderer: PolicyRenderer, prompt_ids: Sequence[int], tools: Tools, name: str | None, *, several: bool = True
) -> str | None:
    """The grammar of what follows the beginning of a forced tool call: of the tool `name`, or (None) of any, and then
    `several`. None = the prompt ends in no such beginning."""
    _, opening = renderer.split_opening(prompt_ids)
    form = renderer.call_form
    if not opening or form is None:
        return None
    if name is None:
        return "\n".join(["start: calls", *_calls(renderer, form, tools, several=several, is_begun=not form.begin)])
    schema = next(_parameters(tool) for tool in tools if tool["function"]["name"] == name)
    gap = form.before_arguments[len(form.before_arguments.rstrip()) :]
    parts = (*_text(renderer, gap), "arguments", *_text(renderer, form.after + form.end))
    return f"start: {' '.join(parts)}\narguments: %json {_written(schema)}"


def _calls(
    renderer: PolicyRenderer, form: CallForm, tools: Tools, *, several: bool, is_begun: bool = False
) -> list[str]:
    """Rules of `calls`: what follows a call's `begin`, calls after the first included. `is_begun`: the first one's
    `before_name` stands in the prompt, but for the space after it."""
    names = [f"call_{number}" for number in range(len(tools))]
    one_of = f"({' | '.join(names)})"
    before, between = _text(renderer, form.before_name), _text(renderer, form.between or "")
    first = _text(renderer, form.before_name[len(form.before_name.rstrip()) :]) if is_begun else before
    more = [f"({' '.join((*between, *before, one_of))})*"] if several and form.between else []
    rules = [f"calls: {' '.join((*first, one_of, *more, *_text(renderer, form.end)))}"]
    for name, tool in zip(names, tools, strict=True):
        head = _text(renderer, f"{form.write_name(tool['function']['name'])}{form.before_arguments}")
        rules += [
            f"{name}: {' '.join((*head, f'{name}_arguments', *_text(renderer, form.after)))}",
            f"{name}_arguments: %json {_written(_parameters(tool))}",
        ]
    return rules


def _text(renderer: PolicyRenderer, text: str) -> list[str]:
    """A text as terms of a rule: the markup's marks by themselves, which may be tokens."""
    marks = renderer.marks or ("<tool_call>", "</tool_call>")
    parts = re.split(f"({'|'.join(map(re.escape, sorted(marks, key=len, reverse=True)))})", text)
    return [_mark(renderer, part) if part in marks else json.dumps(part) for part in parts if part]


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
