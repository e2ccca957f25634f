"""A dialect's format: one API's bodies on one side, our own request and answer on the other.

bytes ─► parse ─► .call (CallRequest) ─► the gateway ─► Answer            ─► write_answer ─► bytes
                                                    └─► TextDelta… Answer ─► EventStream  ─► bytes…
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any, Protocol, TypeVar, cast

from lightningrl.dialects import Dialect
from lightningrl.errors import ConfigError
from lightningrl_server.gateway.request import Answer, AnswerStart, CallRequest, Refusal
from lightningrl_server.gateway.settings import GatewaySettings
from lightningrl_server.rendering.completion import TextDelta
from lightningrl_server.rendering.renderer import PolicyRenderer

__all__ = ["CountingFormat", "DialectFormat", "DialectRequest", "EventStream", "load_format"]


class DialectRequest(Protocol):
    """A request as the dialect understood it, with what only its answer needs."""

    @property
    def call(self) -> CallRequest: ...


R = TypeVar("R", bound=DialectRequest)


class EventStream(Protocol):
    """The pieces of one streamed answer, of the dialect's `stream_type`."""

    @property
    def sends_tool_calls(self) -> bool:
        """True where `delta` shows tool calls; else they come with `finish`."""
        ...

    def delta(self, delta: TextDelta) -> bytes:
        """Events that a client can show now; empty where there are none."""
        ...

    def finish(self, answer: Answer) -> bytes:
        """The rest of the answer (all of it, where it was recorded before), and the end."""
        ...

    def error(self, refusal: Refusal) -> bytes:
        """The event of an error after the answer had begun, so that SDKs raise it."""
        ...


class DialectFormat(Protocol[R]):
    """Reads and writes one API. Made without arguments, once for a gateway."""

    def parse(self, body: bytes, path: str, settings: GatewaySettings) -> R:
        """`path` is the endpoint that was called, below its base. Raises Refusal with what is wrong, which, and what
        next."""
        ...

    def write_answer(self, request: R, answer: Answer, renderer: PolicyRenderer) -> bytes: ...
    def write_error(self, refusal: Refusal) -> bytes: ...
    def open_stream(self, request: R, renderer: PolicyRenderer, start: AnswerStart) -> EventStream: ...


class CountingFormat(DialectFormat[R], Protocol[R]):
    """Format of an API that can be asked how long a call would be."""

    def write_count(self, tokens: int) -> bytes: ...


def load_format(dialect: Dialect) -> DialectFormat[Any]:
    """A dialect's format. Raises ConfigError where it cannot be imported or made."""
    try:
        return cast("DialectFormat[Any]", resolve_name(dialect.format)())
    except Exception as error:
        raise ConfigError(
            f"dialect {dialect.name!r}: its format {dialect.format!r} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
