"""Rows in TRL's conversational forms, as the tokens that RL would train.

sft.jsonl {"messages", "tools"}                      dpo.jsonl {"prompt", "chosen", "rejected", "tools"}
kto.jsonl {"prompt", "completion", "label", "tools"}
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lightningrl.backends import Continuation
from lightningrl.conventions import parse_attribute
from lightningrl.errors import ConfigError
from lightningrl.sanitize import DoubledKeyError, unique_keys
from lightningrl.tool_schemas import without_fill
from lightningrl_runs.foreign.bodies import binding_of
from lightningrl_server.gateway.dialects.checks import is_nothing
from lightningrl_server.gateway.dialects.synonyms import PROMPT_COLUMNS, is_untrained, marks_of
from lightningrl_server.gateway.known_answers import KnownAnswer, render_answer
from lightningrl_server.gateway.request import Refusal
from lightningrl_server.rendering.renderer import PolicyRenderer
from lightningrl_training.task_files import read_text
from lightningrl_training.tuning.settings import Method

__all__ = ["Row", "Rows", "find_file", "read_rows"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Row:
    """A row: one answer, or of dpo two, the chosen one first."""

    answers: tuple[Continuation, ...]
    label: bool = True
    """True for a good answer, which kto tells from bad ones."""

    @property
    def longest(self) -> int:
        """Tokens of its longest answer with the prompt."""
        return max(len(answer.context) + len(answer.tokens) for answer in self.answers)

    @property
    def tokens(self) -> int:
        """Tokens of all its answers with their prompts."""
        return sum(len(answer.context) + len(answer.tokens) for answer in self.answers)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Rows of a file, and what was left out."""

    rows: list[Row] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    """Rows by reason."""


def find_file(place: Path, method: Method) -> Path:
    """The file of a method's rows in a folder of `lightningrl curate`, or the file itself. Raises ConfigError."""
    if place.is_file():
        return place
    for folder in (place / "train", place):
        if (folder / f"{method}.jsonl").is_file():
            return folder / f"{method}.jsonl"
    raise ConfigError(
        f"folder {str(place)!r} has no {method}.jsonl; make one with `lightningrl curate`, or name a file"
    )


def read_rows(path: Path, method: Method, renderer: PolicyRenderer, most: int | None = None) -> Rows:
    """Read and render a file's rows; those that the template cannot write, or of more than `most` tokens, are left out
    and counted. Raises ConfigError for a line that is no row."""
    rows = Rows()
    for line, row in _read_lines(path):
        where = f"{str(path)!r}, line {line}"
        conversations, label = _conversations(row, method, where)
        tools = _tools(row, where)
        if (problem := _problem(row, method, conversations, renderer)) is not None:
            rows.left_out[problem] += 1
            continue
        try:
            read_as = [without_fill(messages, tools or ()) for messages in conversations]
            answers = [render_answer(renderer, messages, offered) for messages, offered in read_as]
        except (Refusal, ValueError) as error:
            rows.left_out[" ".join(str(error).split())[:160]] += 1
            continue
        read = Row(answers=tuple(map(_as_continuation, answers)), label=label)
        if most is not None and read.longest > most:
            rows.left_out[f"more than {most} tokens"] += 1
            continue
        if method == "dpo" and np.array_equal(read.answers[0].tokens, read.answers[1].tokens):
            rows.left_out["chosen and rejected are the same answer, which says nothing of which is better"] += 1
            continue
        rows.rows.append(read)
    return rows


def _read_lines(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, object_pairs_hook=unique_keys)
        except DoubledKeyError as error:
            raise ConfigError(
                f"{str(path)!r}, line {number} names {error.args[0]!r} twice in one object; rename one"
            ) from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{str(path)!r}, line {number} is no JSON ({error}); mend or remove it") from None
        if not isinstance(row, dict):
            raise ConfigError(f"{str(path)!r}, line {number} is no object; write a row for each line")
        yield number, row


def _problem(
    row: Mapping[str, Any], method: Method, conversations: Sequence[Sequence[Any]], renderer: PolicyRenderer
) -> str | None:
    """Reason why a row is left out that its messages do not tell: what its author says of it, what stands beside."""
    lasts = [messages[-1] for messages in conversations if messages and isinstance(messages[-1], dict)]
    if any(map(is_untrained, (row, *lasts))):
        return "its author took the answer out (weight 0)"
    if method == "sft" and row.get("label") is False:
        return "its label is false, a bad answer; tune on it with method 'kto'"
    for key in (*marks_of(row), *(key for last in lasts for key in marks_of(last, (list, int, float, str)))):
        return f"its {key!r} is no mark of a whole message (weight 0 or 1)"
    thinks, kwargs = row.get("enable_thinking"), row.get("chat_template_kwargs") or {}
    kwargs = kwargs if thinks is None or not isinstance(kwargs, dict) else {"enable_thinking": thinks, **kwargs}
    if kwargs and (not isinstance(kwargs, dict) or renderer.unlike(kwargs)):
        return "its chat_template_kwargs are not the recipe's policy.chat_template_kwargs"
    asked = binding_of(row).keys() - {"enable_thinking", "chat_template_kwargs"}
    for key in (*sorted(asked), "system", "functions", *sorted(PROMPT_COLUMNS - {"enable_thinking"})):
        if key in asked or not is_nothing(row.get(key)):
            return f"it has {key!r} beside its messages, and its prompt is made of messages and tools alone"
    learned = lasts if method == "sft" or row.get("label") is True else lasts[:1] if method == "dpo" else []
    if any(all(is_nothing(value) for key, value in last.items() if key != "role") for last in learned):
        return "the answer is empty"
    return None


def _tools(row: Mapping[str, Any], where: str) -> list[Any] | None:
    """The row's tools; TRL recommends them as JSON text, which Arrow does not change."""
    tools = row.get("tools") or None
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) or None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where}: 'tools' is a text that is no JSON ({error}); mend or remove it") from None
    if not isinstance(tools, list | None):
        raise ConfigError(f"{where}: 'tools' is a list of tools, or JSON of one; this one has {tools!r:.60}")
    read = [parse_attribute(tool) or tool for tool in tools or ()]  # a column of texts
    is_bare = [isinstance(tool, dict) and "name" in tool for tool in read]
    return [{"type": "function", "function": tool} if bare else tool for tool, bare in zip(read, is_bare, strict=True)]


def _conversations(row: Mapping[str, Any], method: Method, where: str) -> tuple[list[list[Any]], bool]:
    """Each answer with the messages before it."""
    needed = {"sft": ("messages",), "dpo": ("prompt", "chosen", "rejected"), "kto": ("prompt", "completion", "label")}
    for name in needed[method]:
        is_right = isinstance(row.get(name), bool if name == "label" else list)
        if not is_right:
            kind = "true or false" if name == "label" else "a list of messages"
            others = "; rows of other forms become such by `lightningrl import-traces` and `lightningrl curate`"
            given = f"this one has {row.get(name)!r:.60}{others if name not in row else ''}"
            raise ConfigError(f"{where}: a row of {method} has {name!r}, {kind}; {given}")
    for name in {"sft": (), "dpo": ("chosen", "rejected"), "kto": ("completion",)}[method]:
        if len(row[name]) != 1:
            raise ConfigError(
                f"{where}: {name!r} has {len(row[name])} messages, and one answer of the assistant is compared; put "
                "the turns that come before it into 'prompt'"
            )
    if method == "sft":
        return [row["messages"]], True
    if method == "dpo":
        return [row["prompt"] + row["chosen"], row["prompt"] + row["rejected"]], True
    return [row["prompt"] + row["completion"]], bool(row["label"])


def _as_continuation(answered: KnownAnswer) -> Continuation:
    ids: Sequence[int] = answered.prompt_ids
    return Continuation(context=np.asarray(ids, np.int32), tokens=np.asarray(answered.answer_ids, np.int32))
