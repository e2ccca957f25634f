"""A chat template's text, as transformers writes it, without importing transformers.

Same sandbox, same filters and same care for messages as `transformers.utils.chat_template_utils` 5; tests compare the two.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

__all__ = ["compile_template"]

REASONING: Final = ("reasoning_content", "thinking", "reasoning")
"""Names that a message's reasoning is passed under, the one that templates read first."""


def compile_template(source: str) -> Callable[..., str]:
    """`render(messages, tools=None, add_generation_prompt=False, **more)`. Raises what the template raises."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = to_json
    environment.globals |= {
        "dict": _Dict(),
        "namespace": _Namespace,
        "raise_exception": _refuse,
        "strftime_now": lambda style: datetime.now().strftime(style),
    }
    template = environment.from_string(source)

    def render(
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **more: Any,
    ) -> str:
        if not messages:
            raise ValueError("Cannot apply chat template to an empty conversation. Provide at least one message.")
        shown = [_seen(message) for message in messages]
        return template.render(messages=shown, tools=tools, documents=None, add_generation_prompt=add_generation_prompt, **more)

    return render


def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    """Jinja's own filter of this name escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _seen(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates see it: without what is None, its reasoning under each name."""
    present = {name: value for name, value in message.items() if value is not None}
    reasoning = next((present[name] for name in REASONING if name in present), None)
    return present if reasoning is None else {"thinking": reasoning, **present, "reasoning_content": reasoning}


def _refuse(message: str) -> None:
    raise TemplateError(message)


class _Dict:
    """`dict` without its attributes, which lead out of the sandbox."""

    def __call__(self, *args: Any, **more: Any) -> dict[Any, Any]:
        return dict(*args, **more)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace` without underscored names, which lead out of the sandbox."""

    def __init__(*args: Any, **more: Any) -> None:
        attributes = dict(*args[1:], **more)
        for name in attributes:
            _check(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check(name)
        super().__setitem__(name, value)


def _check(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"Chat templates cannot store underscore-prefixed attributes on a namespace, but got {name!r}.")
