"""Instruments of adapters and of the worker: methods wrapped until they are restored, spans of models and tools."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import wrapt

from lightningrl import conventions
from lightningrl.types import ToolStatus

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer, TracerProvider

__all__ = [
    "Args",
    "AskedTool",
    "Kwargs",
    "Patches",
    "Wrapper",
    "close_tool_span",
    "fail_span",
    "make_tracer",
    "open_chat_span",
    "open_tool_span",
]

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Wrapper = Callable[[Callable[..., Any], Any, Args, Kwargs], Any]
"""Wrapper as `wrapt` calls it: (wrapped, instance, args, kwargs)."""


class Patches:
    """Methods of classes and functions of modules, wrapped until they are restored."""

    def __init__(self) -> None:
        self._restores: list[Callable[[], None]] = []
        self._is_active = True

    def wrap(self, owner: Any, name: str, wrapper: Wrapper) -> None:
        """Wrap an attribute of a class or module; one that is inherited is wrapped for `owner` alone."""
        is_own = name in vars(owner)
        original = vars(owner)[name] if is_own else getattr(owner, name)
        setattr(owner, name, wrapt.FunctionWrapper(original, wrapper))
        self._restores.append(lambda: setattr(owner, name, original) if is_own else delattr(owner, name))

    def when_imported(self, module: str, patch: Callable[[Any], None]) -> None:
        """Call `patch(module)` now if it is imported, else as soon as it is, unless all has been restored by then."""
        wrapt.register_post_import_hook(lambda imported: patch(imported) if self._is_active else None, module)

    def restore(self) -> None:
        """Unwrap everything, for good."""
        self._is_active = False
        while self._restores:
            self._restores.pop()()


@dataclass(kw_only=True, slots=True)
class AskedTool:
    """A tool call that a model asked for."""

    id: str
    name: str
    arguments: str
    chat_span: Span
    role: str | None
    is_offered: bool
    """False: no tool of that name was in the request."""
    has_run: bool = False


def make_tracer(provider: TracerProvider, name: str) -> Tracer:
    """The tracer of one of our packages, with its version and the schema of its names."""
    return provider.get_tracer(name, version("lightningrl"), schema_url=conventions.SCHEMA_URL)


def open_chat_span(tracer: Tracer, model: str, role: str | None, below: Context | None) -> Span:
    """Start the span of a model's call; `below` None = below the current one."""
    return _open_span(tracer, conventions.CHAT, model, role, below, {conventions.REQUEST_MODEL: model})


def open_tool_span(
    tracer: Tracer, name: str, arguments: str, *, call_id: str | None, role: str | None, below: Context | None
) -> Span:
    """Start the span of a tool's run; `below` None = below the current one."""
    attributes = {conventions.TOOL_NAME: name, conventions.TOOL_CALL_ARGUMENTS: arguments}
    attributes |= {conventions.TOOL_CALL_ID: call_id} if call_id else {}
    return _open_span(tracer, conventions.EXECUTE_TOOL, name, role, below, attributes)


def _open_span(
    tracer: Tracer, operation: str, name: str, role: str | None, below: Context | None, attributes: dict[str, str]
) -> Span:
    from opentelemetry.trace import SpanKind

    attributes = {conventions.OPERATION_NAME: operation, **attributes}
    attributes |= {conventions.AGENT_NAME: role} if role else {}
    kind = SpanKind.CLIENT if operation == conventions.CHAT else SpanKind.INTERNAL
    return tracer.start_span(f"{operation} {name}".strip(), below, kind, attributes)


def close_tool_span(span: Span, status: ToolStatus, result: str, error_type: str = "") -> None:
    """End the span of a tool's run with its outcome."""
    span.set_attribute(conventions.TOOL_CALL_RESULT, result)
    span.set_attribute(conventions.TOOL_STATUS, status.value)
    if status not in {ToolStatus.OK, ToolStatus.UNKNOWN}:
        fail_span(span, error_type or status.value)
    span.end()


def fail_span(span: Span, error_type: str) -> None:
    """Mark a span as failed."""
    from opentelemetry.trace import Status, StatusCode

    span.set_attribute(conventions.ERROR_TYPE, error_type)
    span.set_status(Status(StatusCode.ERROR, error_type))
