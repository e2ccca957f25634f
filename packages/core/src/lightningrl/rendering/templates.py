"""A chat template before anything is rendered with it: whether it compiles, which variables it reads, which tool-call markup it writes; and
turns joined for one that takes only some.

folder ─► read_template ─► template_variables      {"messages", "tools", "enable_thinking", …}
                       ─► template_parsers        {"tool_parser": "qwen3", "reasoning_parser": "think"}
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from lightningrl.errors import ConfigError

__all__ = [
    "GIVEN",
    "added_tokens",
    "check_template_kwargs",
    "joined_turns",
    "late_systems",
    "no_tools",
    "read_template",
    "template_parsers",
    "template_variables",
]

GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "tokenize", "return_dict"})
"""Variables of a template that are a call's own."""
_OF_ALL = GIVEN | {"bos_token", "eos_token", "pad_token", "unk_token", "raise_exception", "strftime_now", "namespace"}
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
    """Names that a template reads and does not set itself. Raises ConfigError where it does not compile; `what` it is of."""
    from jinja2 import TemplateError
    from jinja2.meta import find_undeclared_variables

    from lightningrl.rendering.jinja import environment

    jinja = environment()
    try:
        tree = jinja.parse(template)
        jinja.compile(tree)
    except TemplateError as error:
        line = getattr(error, "lineno", None)
        raise ConfigError(
            f"the chat template of {what} does not compile: {error}{f' (line {line})' if line else ''}; mend chat_template.jinja in its "
            "folder, or name the policy's renderer"
        ) from error
    return frozenset(find_undeclared_variables(tree))


def check_template_kwargs(kwargs: Mapping[str, Any], read: Collection[str], what: str) -> None:
    """Raise ConfigError for those of the recipe's `chat_template_kwargs` that are not `read`, with those that are."""
    known = sorted(set(read) - _OF_ALL)
    there = f"it reads {', '.join(known)}" if known else "it reads none"
    wrong = [name for name in kwargs if name not in known]
    if wrong:
        raise ConfigError(
            *(
                f"chat_template_kwargs.{name}: "
                + (f"each call gives {what} its own {name}" if name in _OF_ALL else f"{what} never reads {name!r}; {there}")
                for name in wrong
            )
        )


def template_parsers(template: str, added: Collection[str]) -> dict[str, str]:
    """Markup of an unknown template, told by its own text; only markup that is made of single tokens is parsed."""
    found: dict[str, str] = {}
    if "tools" in template:
        if "<tool_call>" in template and "<tool_call>" in added:
            found["tool_parser"] = "qwen3.5" if "<function=" in template else "glm" if "<arg_key>" in template else "qwen3"
        elif "<｜tool▁calls▁begin｜>" in template:
            found["tool_parser"] = "deepseek-v3"
    if "<think>" in added and "</think>" in added:
        found["reasoning_parser"] = "think"
    return found


def no_tools(policy: str) -> str:
    """The sentence of a policy whose tool calls nobody can read."""
    return f"policy {policy!r} has no tool-call markup that we can read, so it cannot be offered tools"


def late_systems(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Texts of system messages that a template may pass over in silence: later ones, and those of a conversation that has no others."""
    roles = {message["role"] for message in messages}
    return [m["content"].strip() for place, m in enumerate(messages) if m["role"] == "system" and (place or roles == {"system"})]


def joined_turns(messages: Sequence[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """The conversation for templates that take only some: with neighbours of one role as one turn; then with later system messages as the
    user's; then with the first as well. Those that are the conversation itself are left out."""
    before = list(messages)
    for systems in (len(messages), 1, 0):
        joined: list[Mapping[str, Any]] = []
        for index, message in enumerate(messages):
            if message["role"] == "system" and index >= systems:
                message = {**message, "role": "user"}
            last = joined[-1] if joined else None
            if last is not None and last["role"] == message["role"] != "tool" and not last.get("tool_calls"):
                texts = {
                    key: "\n\n".join(filter(None, (last.get(key), message.get(key))))
                    for key in ("content", "reasoning_content")
                    if key in last or key in message
                }
                joined[-1] = {**last, **message, **texts}
            else:
                joined.append(message)
        if joined != before:
            yield joined
            before = joined
