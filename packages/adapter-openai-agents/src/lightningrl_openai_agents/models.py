"""Every model class of the SDK, and the user's own: each call of one is a chat span, current while it waits for the
answer. Results of MCP servers: what a server calls an error is the tool's failure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import wrapt

from lightningrl_openai_agents.recorder import Recorder

if TYPE_CHECKING:
    Proxy: TypeAlias = wrapt.ObjectProxy[Any]
else:
    Proxy = wrapt.ObjectProxy  # older versions know no type arguments
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from agents.exceptions import UserError
from agents.models.interface import Model

from lightningrl.instrumentation import Args, Kwargs
from lightningrl_openai_agents.tools import field_of

__all__ = ["McpToolError", "RecordedModels", "WatchedServer"]


class McpToolError(Exception):
    """An MCP server's result says `isError`. Never raised: it stands for what the server said."""


class WatchedServer(Proxy):
    """An MCP server, for one call of one of its tools."""

    def __init__(self, server: Any, recorder: Recorder) -> None:
        super().__init__(server)
        self._self_recorder = recorder

    async def call_tool(self, *args: Any, **kwargs: Any) -> Any:
        """The server's own answer."""
        result = await self.__wrapped__.call_tool(*args, **kwargs)
        if getattr(result, "isError", None) or getattr(result, "is_error", None):  # by the version of the `mcp` package
            self._self_recorder.note_error(McpToolError())
        return result


class RecordedModels:
    """The wrappers of `get_response` and `stream_response`."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    async def get_response(self, wrapped: Callable[..., Any], instance: Any, args: Args, kwargs: Kwargs) -> Any:
        refuse_websocket(instance)
        if self._recorder.calling.get() is not None:  # a model that asks another one, or its own base class
            return await wrapped(*args, **kwargs)
        chat = self._recorder.open_chat(model_name(instance), input_of(args, kwargs), handoffs_of(args, kwargs))
        token = self._recorder.calling.set(chat)
        try:
            response = await wrapped(*args, **kwargs)
        except BaseException as error:
            self._recorder.close_chat(chat, None, error)
            raise
        finally:
            self._recorder.calling.reset(token)
        self._recorder.close_chat(chat, getattr(response, "output", ()))
        return response

    def stream_response(self, wrapped: Callable[..., Any], instance: Any, args: Args, kwargs: Kwargs) -> Any:
        refuse_websocket(instance)
        if self._recorder.calling.get() is not None:
            return wrapped(*args, **kwargs)
        return self._stream(wrapped, instance, args, kwargs)

    async def _stream(
        self, wrapped: Callable[..., Any], instance: Any, args: Args, kwargs: Kwargs
    ) -> AsyncIterator[Any]:
        """The consumer runs between two events, in the same context: so the call is current only while an event is
        awaited."""
        chat = self._recorder.open_chat(model_name(instance), input_of(args, kwargs), handoffs_of(args, kwargs))
        items: list[Any] = []
        final: list[Any] = []
        failure: BaseException | None = None
        events: Any = None
        try:
            while True:
                token = self._recorder.calling.set(chat)
                try:
                    events = aiter(wrapped(*args, **kwargs)) if events is None else events
                    event = await anext(events)
                except StopAsyncIteration:
                    break
                finally:
                    self._recorder.calling.reset(token)
                if field_of(event, "type") == "response.output_item.done":
                    items.append(field_of(event, "item"))
                elif field_of(event, "type") == "response.completed":
                    final = list(event.response.output)
                    self._recorder.close_chat(chat, final or items)  # the runner may look no further
                yield event
        except BaseException as error:
            failure = None if isinstance(error, GeneratorExit) else error
            raise
        finally:
            if events is not None and hasattr(events, "aclose"):
                await events.aclose()
            if chat.span.is_recording():
                self._recorder.close_chat(chat, final or items, failure)


def model_classes() -> Iterator[type[Model]]:
    """All classes that are a model by now; a later one is found by the next run."""
    waiting: list[type[Model]] = list(Model.__subclasses__())
    seen: set[type[Model]] = set()
    while waiting:
        model = waiting.pop()
        if model not in seen:
            seen.add(model)
            waiting += model.__subclasses__()
            yield model


def model_name(model: Any) -> str:
    return str(getattr(model, "model", "") or "")


def input_of(args: Args, kwargs: Kwargs) -> tuple[Any, ...]:
    """The second parameter of both methods: a text, which is no item, or items."""
    items = kwargs.get("input", args[1] if len(args) > 1 else None) or ()
    return () if isinstance(items, str) else tuple(items)


def handoffs_of(args: Args, kwargs: Kwargs) -> tuple[Any, ...]:
    """The sixth parameter of both methods."""
    return tuple(kwargs.get("handoffs", args[5] if len(args) > 5 else None) or ())


def refuse_websocket(model: Any) -> None:
    """Fails closed: such calls would reach the provider past every HTTP client."""
    if any(kind.__name__ == "OpenAIResponsesWSModel" for kind in type(model).__mro__):
        raise UserError(
            f"model {model_name(model)!r} uses the websocket transport, whose calls cannot be recorded; "
            "call set_default_openai_responses_transport('http')"
        )
