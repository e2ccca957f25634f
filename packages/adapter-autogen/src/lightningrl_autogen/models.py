"""Model calls: a span around each `create` and `create_stream`, known in this context before the request leaves."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from typing import Any

from autogen_core.models import CreateResult
from opentelemetry.trace import Span, Tracer

from lightningrl.call_origin import CallOrigin
from lightningrl.instrumentation import Args, Kwargs, fail_span, open_chat_span
from lightningrl_autogen.roles import Roles, set_within, step_through
from lightningrl_autogen.tools import Tools

__all__ = ["Models"]


class Models:
    """The current model call, and wrappers of the clients' methods."""

    def __init__(self, tracer: Tracer, roles: Roles, tools: Tools) -> None:
        self._tracer = tracer
        self._roles = roles
        self._tools = tools
        self._calling: ContextVar[Span | None] = ContextVar("lightningrl_autogen_call", default=None)

    def call_origin(self) -> CallOrigin | None:
        """The model call that runs in this context; else, for a bare client inside of an agent, the agent."""
        role = self._roles.current()
        span = self._calling.get()
        if span is None:
            return None if role is None else CallOrigin(agent=role)
        context = span.get_span_context()
        return CallOrigin(agent=role, trace_id=context.trace_id, span_id=context.span_id)

    async def create(self, wrapped: Callable[..., Any], instance: Any, args: Args, kwargs: Kwargs) -> Any:
        """Wraps `create`."""
        with self._span(instance) as span:
            with set_within(self._calling, span):
                result = await wrapped(*args, **kwargs)
            self._tools.note_asked(result, kwargs.get("tools", ()), span, self._roles.current())
        return result

    def create_stream(
        self, wrapped: Callable[..., Any], instance: Any, args: Args, kwargs: Kwargs
    ) -> AsyncGenerator[Any, None]:
        """Wraps `create_stream`."""

        async def traced() -> AsyncGenerator[Any, None]:
            with self._span(instance) as span:
                steps = step_through(wrapped(*args, **kwargs), lambda: set_within(self._calling, span))
                async with aclosing(steps) as chunks:
                    async for chunk in chunks:
                        if isinstance(chunk, CreateResult):
                            self._tools.note_asked(chunk, kwargs.get("tools", ()), span, self._roles.current())
                        yield chunk

        return traced()

    @contextmanager
    def _span(self, client: Any) -> Iterator[Span]:
        create_args: Mapping[str, Any] = getattr(client, "_create_args", {})
        span = open_chat_span(self._tracer, str(create_args.get("model", "")), self._roles.current(), below=None)
        try:
            yield span
        except GeneratorExit:  # the agent wants no more of the stream
            raise
        except BaseException as error:
            fail_span(span, type(error).__name__)
            raise
        finally:
            span.end()
