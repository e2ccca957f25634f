"""A chat template before anything is rendered with it: does it compile, which variables it reads, which tool-call
markup it writes.

folder ─► read_template ─► template_variables      {"messages", "tools", "enable_thinking", …}
                       ─► template_parsers        {"tool_parser": "qwen3", "reasoning_parser": "think"}
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from lightningrl.errors import ConfigError

if TYPE_CHECKING:
    from jinja2 import nodes
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

__all__ = [
    "GIVEN",
    "added_tokens",
    "check_template_kwargs",
    "no_tools",
    "read_template",
    "template_parsers",
    "template_variables",
]

GIVEN = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "tokenize", "return_dict"}
)
"""Variables of a template that are a call's own."""
_SPECIAL = frozenset({"bos_token", "eos_token", "pad_token", "unk_token"})
_OF_ALL = GIVEN | _SPECIAL | {"raise_exception", "strftime_now", "namespace"}
"""Variables that no recipe sets."""


class _AddedToken(msgspec.Struct):
    content: str


class _Tokenizer(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


def read_template(folder: Path) -> str | None:
    """The chat template of a saved tokenizer; None where it has none."""
    own = folder / "chat_template.jinja"
    if own.is_file():
        return own.read_text(encoding="utf-8")
    path = folder / "tokenizer_config.json"
    saved = json.loads(path.read_text(encoding="utf-8")).get("chat_template") if path.is_file() else None
    if isinstance(saved, list):  # several, by name
        saved = {entry.get("name"): entry.get("template") for entry in saved if isinstance(entry, dict)}.get("default")
    return saved if isinstance(saved, str) else None


def added_tokens(folder: Path) -> frozenset[str]:
    """Tokens of a saved tokenizer that its vocabulary was given beside its own."""
    saved = msgspec.json.decode((folder / "tokenizer.json").read_bytes(), type=_Tokenizer)
    return frozenset(token.content for token in saved.added_tokens)


def template_variables(template: str, what: str) -> frozenset[str]:
    """Names that a template reads and does not set itself. Raises ConfigError where the template, `what`'s, does not
    compile."""
    from jinja2 import TemplateError
    from jinja2.meta import find_undeclared_variables

    jinja = _environment()
    try:
        tree = jinja.parse(template)
        jinja.compile(tree)
    except TemplateError as error:
        line = getattr(error, "lineno", None)
        raise ConfigError(
            f"the chat template of {what} does not compile: {error}{f' (line {line})' if line else ''}; mend "
            "chat_template.jinja in its folder, or name the policy's renderer"
        ) from error
    return frozenset(find_undeclared_variables(tree))


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as chat templates are written in it; the worker's installation has none."""
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}`, by which templates mark what an assistant said."""

        tags = {"generation"}  # noqa: RUF012  (declared so by Jinja)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    extensions = [Generation, "jinja2.ext.loopcontrols"]
    return ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)


def check_template_kwargs(kwargs: Mapping[str, Any], read: Collection[str], what: str) -> None:
    """Raise ConfigError for those of the recipe's `chat_template_kwargs` that are not `read`, with those that are."""
    names = sorted(set(read) - _OF_ALL)
    there = f"it reads {', '.join(names)}" if names else "it reads none"
    problems = {
        name: f"each call gives {what} its own {name}" if name in _OF_ALL else f"{what} never reads {name!r}; {there}"
        for name in kwargs
        if name not in names
    }
    if problems:
        raise ConfigError(*(f"chat_template_kwargs.{name}: {problem}" for name, problem in problems.items()))


def template_parsers(template: str, added: Collection[str]) -> dict[str, str]:
    """Markup of an unknown template, told by its own text; only markup that is made of single tokens is parsed."""
    parsers: dict[str, str] = {}
    if "tools" in template:
        if "<tool_call>" in template and "<tool_call>" in added:
            marks = {"<function=": "qwen3.5", "<arg_key>": "glm"}
            parsers["tool_parser"] = next((name for mark, name in marks.items() if mark in template), "qwen3")
        elif "<｜tool▁calls▁begin｜>" in template:
            parsers["tool_parser"] = "deepseek-v3"
    if "<think>" in added and "</think>" in added:
        parsers["reasoning_parser"] = "think"
    return parsers


def no_tools(policy: str) -> str:
    """The sentence of a policy whose tool calls nobody can read."""
    return f"policy {policy!r} has no tool-call markup that we can read, so it cannot be offered tools"
