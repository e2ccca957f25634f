"""Forms that outputs take, tried until one earns more than nothing: the answer itself, in tags, in a box, a field."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from lightningrl.types import ToolCall, ToolStatus
from lightningrl_training.redteam.attacks import Form, text_of_answer

__all__ = ["ANSWER", "FORMATS", "PLAIN", "candidates", "fields_named", "fields_returned"]

ANSWER: Final = "\0"
"""Stands for the answer in a format."""
FORMATS: Final = (
    f"<answer>{ANSWER}</answer>",
    f"#### {ANSWER}",
    f"\\boxed{{{ANSWER}}}",
    f"The answer is {ANSWER}.",
    f"Answer: {ANSWER}",
    f"FINAL ANSWER: {ANSWER}",
    f"```python\n{ANSWER}\n```",
    f"```\n{ANSWER}\n```",
    f"<think>…</think>\n<answer>{ANSWER}</answer>",
)
"""Formats of answers in the field."""
MOST_FIELDS: Final = 40
PLAIN: Final = Form(name="the answer itself", wrap=text_of_answer)
_ONE_TOOL: Final = (ToolCall(id="call-1", name="tool", arguments="{}", result="ok", status=ToolStatus.OK),)


def candidates(returned: Sequence[str], named: Sequence[str], patterns: Sequence[str]) -> list[Form]:
    """Forms in the order in which they are tried. `returned`: keys of the agent's output; `named`: those in the
    rewards' code; `patterns`: regular expressions of the rewards' options."""
    texts = [_format(text) for text in (*filter(None, map(_example, patterns)), *FORMATS)]
    fields = [_fields(tuple(keys)) for keys in (returned, named) if keys]
    inner = [Form(name=f"{form.name} as JSON", wrap=_as_json(form)) for form in (_fields(("answer",)), *fields[-1:])]
    raw = Form(name="the answer as it is", wrap=lambda answer: answer)
    first = Form(name="the first of the answers", wrap=text_of_answer, pick=_first)
    plain = [PLAIN, first, raw, *texts, *inner]
    forms = [*fields, *plain] if returned else [*plain, *fields]
    return [*forms, *(replace(form, name=f"{form.name}, after a tool", tool_calls=_ONE_TOOL) for form in forms)]


def _format(text: str) -> Form:
    return Form(
        name=repr(text.replace(ANSWER, "…")),
        wrap=lambda answer: text.replace(ANSWER, text_of_answer(answer)),
        pick=_first,
    )


def _fields(keys: tuple[str, ...]) -> Form:
    def wrap(answer: Any) -> dict[str, Any]:
        output: dict[str, Any] = {}
        for key in keys:
            *path, last = key.split(".")
            place = output
            for step in path:
                place = place.setdefault(step, {})
            place[last] = answer
        return output

    return Form(name=f"fields {', '.join(keys[:6])}", wrap=wrap)


def _as_json(form: Form) -> Any:
    return lambda answer: json.dumps(form.wrap(answer), ensure_ascii=False, default=str)


def _first(answer: Any) -> Any:
    return answer[0] if isinstance(answer, list) and answer else answer


def _example(pattern: str) -> str | None:
    """A text that a simple pattern matches, with the answer in its first group; None where it is not simple."""
    text = re.sub(r"\((?!\?).*?\)", ANSWER, pattern, count=1)
    text = re.sub(r"\[\^[^\]]*\][+*]?", ANSWER, text, count=0 if ANSWER not in text else 1)
    text = re.sub(r"\\s[*+?]?", lambda match: " " if match[0].endswith("+") else "", text).strip("^$")
    text = re.sub(r"\\([^A-Za-z0-9])", r"\1", text)
    return text if ANSWER in text and _matches(pattern, text.replace(ANSWER, "1")) else None


def _matches(pattern: str, text: str) -> bool:
    try:
        return re.search(pattern, text, re.DOTALL) is not None
    except re.error:
        return False


def fields_returned(agent: Any, folder: Path) -> tuple[str, ...]:
    """Keys of the dicts that an agent's function returns, by its source; empty where it says nothing of any."""
    tree, name = _tree_of(agent, folder)
    keys: dict[str, None] = {}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and function.name == name:
            for part in ast.walk(function):
                if isinstance(part, ast.Return) and isinstance(part.value, ast.Dict):
                    keys.update(dict.fromkeys(_constants(part.value.keys)))
    return tuple(keys)[:MOST_FIELDS]


def fields_named(function: Any) -> tuple[str, ...]:
    """Names of fields in the code of a reward: what it subscripts with, and words that it hands to functions."""
    field = getattr(function, "field", None)
    if isinstance(field, str):
        return (field,)
    if type(function).__module__.startswith("lightningrl_"):
        return ()
    tree, _ = _tree_of(function, Path())
    keys: dict[str, None] = {}
    for part in ast.walk(tree):
        if isinstance(part, ast.Subscript):
            keys.update(dict.fromkeys(_constants([part.slice])))
        elif isinstance(part, ast.Call):
            keys.update(dict.fromkeys(_constants(part.args)))
    return tuple(keys)[:MOST_FIELDS]


def _constants(nodes: Sequence[ast.expr | None]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.value


def _tree_of(part: Any, folder: Path) -> tuple[ast.AST, str]:
    """The parsed file of a reference or a function, and the function's name; an empty module where there is none."""
    name = ""
    try:
        if isinstance(part, str):
            source, _, name = part.rpartition(":")
            path = folder / (source if source.endswith(".py") else f"{source}.py")
        else:
            function = inspect.unwrap(getattr(part, "func", part))
            function = function if inspect.isfunction(function) else type(function)
            name, path = function.__name__, Path(inspect.getfile(function))
        return ast.parse(path.read_text(encoding="utf-8")), name
    except (OSError, TypeError, ValueError, SyntaxError):
        return ast.Module(body=[], type_ignores=[]), name
