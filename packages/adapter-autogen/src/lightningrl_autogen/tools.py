"""Tool calls: from the model's answer, which asks, to the tool's end, or to the event that says that no tool was
run."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Final

from autogen_agentchat.messages import ToolCallExecutionEvent
from autogen_core import FunctionCall
from autogen_core.models import CreateResult
from opentelemetry import trace
from opentelemetry.trace import Span, Tracer
from pydantic import ValidationError

from lightningrl.instrumentation import Args, AskedTool, Kwargs, close_tool_span, open_tool_span
from lightningrl.sanitize import as_text
from lightningrl.types import ToolStatus
from lightningrl_autogen.roles import step_through

__all__ = ["Tools"]

MOST_ASKED: Final = 256
"""Tool calls remembered per context; an agent runs those of the latest answers."""


class Tools:
    """The tool calls that were asked for in this context, and wrappers of the tools' methods."""

    def __init__(self, tracer: Tracer, role: Callable[[], str | None]) -> None:
        self._tracer = tracer
        self._role = role
        self._asked: ContextVar[tuple[AskedTool, ...]] = ContextVar("lightningrl_autogen_asked", default=())

    def note_asked(self, result: CreateResult, offered: Sequence[Any], chat_span: Span, role: str | None) -> None:
        """A model answered."""
        if isinstance(result.content, str):
            return
        names = {tool["name"] if isinstance(tool, Mapping) else tool.name for tool in offered}
        asked = (
            AskedTool(
                id=call.id,
                name=call.name,
                arguments=call.arguments,
                chat_span=chat_span,
                role=role,
                is_offered=call.name in names,
            )
            for call in result.content
            if isinstance(call, FunctionCall)
        )
        self._asked.set((*self._asked.get(), *asked)[-MOST_ASKED:])

    def watch(self, event: Any) -> None:
        """An agent said what became of its tool calls: report those that never reached a tool of ours."""
        if not isinstance(event, ToolCallExecutionEvent):
            return
        for result in event.content:
            asked = next((one for one in self._asked.get() if one.id == result.call_id and not one.has_run), None)
            if asked is not None:
                asked.has_run = True
                span = self._open(asked, asked.name, asked.arguments, asked.id)
                status = status_of_unrun(asked, is_error=bool(getattr(result, "is_error", False)))
                close_tool_span(span, status, result=result.content)

    async def run_json(self, wrapped: Callable[..., Any], instance: Any, args: Args, kwargs: Kwargs) -> Any:
        """Wraps `run_json`."""
        with self._running(instance, args, kwargs) as span, within(span):
            value = await wrapped(*args, **kwargs)
            close_tool_span(span, ToolStatus.OK, result=instance.return_value_as_string(value))
            return value

    def run_json_stream(
        self, wrapped: Callable[..., Any], instance: Any, args: Args, kwargs: Kwargs
    ) -> AsyncGenerator[Any, None]:
        """Wraps `run_json_stream`: the last item is the tool's result."""

        async def traced() -> AsyncGenerator[Any, None]:
            value: Any = None
            with self._running(instance, args, kwargs) as span:
                async with aclosing(step_through(wrapped(*args, **kwargs), lambda: within(span))) as items:
                    async for value in items:
                        yield value
                close_tool_span(span, ToolStatus.OK, result=instance.return_value_as_string(value))

        return traced()

    def skip_native_span(
        self, wrapped: Callable[..., Any], instance: Any, args: Args, kwargs: Kwargs
    ) -> AbstractContextManager[Span]:
        """Wraps AutoGen's own `trace_tool_span`: ours says more, and two spans would be two tool calls."""
        return nullcontext(trace.INVALID_SPAN)

    @contextmanager
    def _running(self, tool: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Span]:
        arguments = args[0] if args else kwargs["args"]
        call_id = args[2] if len(args) > 2 else kwargs.get("call_id")
        asked = self._find(call_id, tool.name, arguments)
        if asked is None:
            span = self._open(None, tool.name, as_text(arguments), call_id)
        else:
            asked.has_run = True
            span = self._open(asked, asked.name, asked.arguments, asked.id)
        try:
            yield span
        except BaseException as error:
            name, status = type(error).__name__, status_of_error(error, tool, arguments)
            close_tool_span(span, status, result=f"{name}: {error}", error_type=name)
            raise

    def _find(self, call_id: str | None, name: str, arguments: Any) -> AskedTool | None:
        """Look for a call by its id, or, before AutoGen 0.6.2, which tells a tool no id, by its arguments."""
        waiting = [asked for asked in self._asked.get() if not asked.has_run]
        if call_id is not None:
            return next((asked for asked in waiting if asked.id == call_id), None)
        same = (asked for asked in waiting if asked.name == name and parse(asked.arguments) == arguments)
        return next(same, None)

    def _open(self, asked: AskedTool | None, name: str, arguments: str, call_id: str | None) -> Span:
        role = self._role() if asked is None else asked.role
        below = None if asked is None else trace.set_span_in_context(asked.chat_span)
        return open_tool_span(self._tracer, name, arguments, call_id=call_id, role=role, below=below)


def within(span: Span) -> AbstractContextManager[Any]:
    """Make the span the current one; its end and its failure are told by `Tools`."""
    return trace.use_span(span, record_exception=False, set_status_on_exception=False)


def status_of_unrun(asked: AskedTool, *, is_error: bool) -> ToolStatus:
    """Outcome of a call that no `run_json` answered: unknown tool, broken JSON, or a tool of a workbench (MCP)."""
    if not asked.is_offered:
        return ToolStatus.UNKNOWN_TOOL
    if parse(asked.arguments) is None:
        return ToolStatus.INVALID_ARGUMENTS
    return ToolStatus.ERROR if is_error else ToolStatus.OK


def status_of_error(error: BaseException, tool: Any, arguments: Any) -> ToolStatus:
    """Outcome of a tool that raised."""
    if not isinstance(error, Exception):  # cancelled, or the agent wants no more of the stream
        return ToolStatus.UNKNOWN
    if isinstance(error, ValidationError) and not accepts(tool, arguments):
        return ToolStatus.INVALID_ARGUMENTS
    return ToolStatus.TIMEOUT if isinstance(error, TimeoutError) else ToolStatus.ERROR


def accepts(tool: Any, arguments: Any) -> bool:
    """True if the arguments fit; a tool's own code may well raise a ValidationError, too."""
    try:
        tool.args_type().model_validate(arguments)
    except ValidationError:
        return False
    return True


def parse(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except json.JSONDecodeError:
        return None
