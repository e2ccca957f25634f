"""The tool-call markups that are read, one a row: a new model family is one more row of `MARKUPS`.

chat template, model_type ─► find_markup ─► Markup ─► read_text ─► content, calls, problems

Markup is read as text, whether a tokenizer has tokens for its marks or spells them. Where the `renderers` library has a
parser that knows more (XML with typed parameters), the row names that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lightningrl_server.rendering.call_readers import (
    Reader,
    WrittenCall,
    json_blocks,
    read_harmony,
    read_llama,
    read_mistral,
    sections,
)

__all__ = ["MARKUPS", "Markup", "TextReading", "find_markup", "read_text"]


def _json_writer(opening: str, closing: str) -> Callable[[Sequence[Any]], str]:
    def write(functions: Sequence[Any]) -> str:
        calls = [{"name": function["name"], "arguments": function["arguments"]} for function in functions]
        return f"{opening}{json.dumps(calls, ensure_ascii=False)}{closing}"

    return write


def _of_kimi(name: str, place: int, call_id: str) -> str:
    return f"functions.{name}:{place}"


def _of_mistral(name: str, place: int, call_id: str) -> str:
    return call_id if re.fullmatch("[a-zA-Z0-9]{9}", call_id) else f"{place:09d}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Markup:
    """The way in which a model family writes tool calls."""

    name: str
    families: str
    """Models that write so, for readers."""
    marks: tuple[str, ...]
    """Texts that a chat template of the family contains, all of them."""
    models: tuple[str, ...] = ()
    """`model_type` of configurations whose template has no marks, but takes tools."""
    read: Reader | None = None
    library: str | None = None
    """A tool parser of the `renderers` library in place of `read`; its marks have to be tokens."""
    tokens: tuple[str, ...] = ()
    """Texts that belong to the markup: special tokens among them are not taken out before it is read, and what might
    be the beginning of one is not streamed yet."""
    opens: str = ""
    """Pattern of a text that may be or become a call; empty = any of `tokens`."""
    stops: tuple[str, ...] = ()
    """Tokens that end an answer, beside the one by which the template closes it."""
    closes: tuple[str, ...] = ()
    """Tokens by which the template closes an earlier answer, in place of the one that was sampled."""
    has_channels: bool = False
    """Content stands within markup too, so it is read also where no tools are offered."""
    call_id: Callable[[str, int, str], str] | None = None
    """The id that templates want, from a call's tool, its place in the conversation and its own id; None = any."""
    write: Callable[[Sequence[Any]], str] | None = None
    """The text of calls, for templates that write content alone."""


_DSK: Final = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
_KIMI: Final = (
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)
_HARMONY: Final = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")

MARKUPS: Final[tuple[Markup, ...]] = (
    Markup(
        name="xml",
        families="Qwen3.5, Qwen3-Coder, Nemotron 3",
        marks=("<tool_call>", "<function="),
        library="qwen3.5",
    ),
    Markup(name="glm", families="GLM 4.5 to 5", marks=("<tool_call>", "<arg_key>"), library="glm"),
    Markup(
        name="gpt-oss",
        families="GPT-OSS",
        marks=("<|channel|>", "to=functions."),
        models=("gpt_oss",),
        read=read_harmony,
        tokens=_HARMONY,
        opens=r"<\||\A\s*to=",
        stops=("<|return|>", "<|call|>"),
        closes=("<|end|>",),
        has_channels=True,
    ),
    Markup(
        name="kimi",
        families="Kimi K2",
        marks=("<|tool_call_argument_begin|>",),
        models=("kimi_k2",),
        read=sections(*_KIMI),
        tokens=_KIMI,
        call_id=_of_kimi,
    ),
    Markup(
        name="deepseek",
        families="DeepSeek V3, V3.1, R1",
        marks=("<｜tool▁call▁begin｜>",),
        models=("deepseek_v3",),
        read=sections(*_DSK),
        tokens=_DSK,
    ),
    Markup(
        name="mistral",
        families="Mistral, Mixtral, Ministral, Codestral",
        marks=("[TOOL_CALLS]",),
        models=("mistral", "mixtral", "ministral", "mistral3"),
        read=read_mistral,
        tokens=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        opens=r"\[TOOL_CALLS\]",
        call_id=_of_mistral,
    ),
    Markup(
        name="functools",
        families="Phi-4-mini with functools",
        marks=("functools[",),
        read=json_blocks("functools", closing=None),
        tokens=("functools",),
        write=_json_writer("functools", ""),
    ),
    Markup(
        name="phi",
        families="Phi-4-mini",
        marks=("<|tool|>",),
        models=("phi4", "phi3"),
        read=json_blocks("<|tool_call|>", closing="<|/tool_call|>"),
        tokens=("<|tool_call|>", "<|/tool_call|>"),
        write=_json_writer("<|tool_call|>", "<|/tool_call|>"),
    ),
    Markup(
        name="granite",
        families="Granite 3",
        marks=("<|tool_call|>",),
        read=json_blocks("<|tool_call|>", "<tool_call>", closing=None),
        tokens=("<|tool_call|>", "<tool_call>"),
        write=_json_writer("<|tool_call|>", ""),
    ),
    Markup(
        name="hermes",
        families="Qwen2.5, Qwen3, Hermes 2 and 3, SmolLM2, SmolLM3, Granite 4, and our templates `chatml` and `gemma`",
        marks=("<tool_call>",),
        models=("qwen2", "qwen3", "smollm3", "granitemoehybrid"),
        read=json_blocks("<tool_call>", closing="</tool_call>"),
        tokens=("<tool_call>", "</tool_call>"),
        write=_json_writer("<tool_call>", "</tool_call>"),
    ),
    Markup(
        name="llama",
        families="Llama 3.1, 3.2, 3.3 and 4: JSON or Python",
        marks=("ipython",),
        models=("llama4", "llama4_text"),
        read=read_llama,
        tokens=("<|python_tag|>", "<|python_start|>", "<|python_end|>"),
        opens=r"<\|python_(?:tag|start)\|>|(?:\A|\n)\s*[\[{]",
        stops=("<|eom_id|>", "<|eom|>"),
    ),
)
"""Tried in this order: the first whose marks a template has is its markup."""


def find_markup(template: str, added: Collection[str], model_type: str = "") -> Markup | None:
    """The markup of a chat template, told by its own text, else by the model's type; None = none that is read. `added`:
    tokens that the vocabulary was given beside its own."""
    if "tools" not in template:
        return None
    for markup in MARKUPS:
        if all(mark in template for mark in markup.marks):
            is_readable = markup.library is None or "<tool_call>" in added
            return markup if is_readable else None
    return next((markup for markup in MARKUPS if model_type in markup.models), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class TextReading:
    """A completion's text, read."""

    content: str
    """All text but for calls: malformed ones stay where they are."""
    calls: tuple[tuple[WrittenCall, str], ...] = ()
    """Each with its block's text."""
    reasoning: str = ""
    problems: tuple[tuple[str, str], ...] = ()
    """Text of each block that is no call, and why."""


def read_text(markup: Markup, text: str, *, final: bool = True) -> TextReading:
    """Read a completion. With `final` False its rest may still come: a block that is not whole yet, or has a problem,
    is left out with all that follows it."""
    assert markup.read is not None
    # "Look.\n<call/>\n<call/>\nDone." ─► pieces ["Look.\n", "\n", "\nDone."] ─► content "Look.\nDone."
    pieces, calls, reasoning, problems, place = [""], [], [], [], 0
    for block in markup.read(text):
        if block.problem is not None:
            if not final:
                text = text[: block.start]
                break
            problems.append((text[block.start : block.end], block.problem))
            continue
        pieces[-1] += text[place : block.start]
        pieces += [block.content, ""] if block.content else [""]
        calls += [(call, text[block.start : block.end]) for call in block.calls]
        reasoning += [block.reasoning] if block.reasoning else []
        place = block.end
    pieces[-1] += text[place:]
    if len(pieces) > 1:
        pieces = [pieces[0].rstrip(), *(piece.strip() for piece in pieces[1:])]
    return TextReading(
        content="\n".join(piece for piece in pieces if piece),
        calls=tuple(calls),
        reasoning="\n".join(reasoning),
        problems=tuple(problems),
    )
