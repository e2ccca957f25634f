"""What a dialect is: one API's wire format on one side, our own request and answer on the other.

bytes ─► parse ─► .call (CallRequest) ─► the gateway ─► Answer            ─► write_answer ─► bytes
                                                    └─► TextDelta… Answer ─► EventStream  ─► bytes…
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from lightningrl.gateway.errors import Refusal
from lightningrl.gateway.request import Answer, Begun, CallRequest
from lightningrl.gateway.settings import GatewaySettings
from lightningrl.rendering.completion import TextDelta
from lightningrl.rendering.renderer import PolicyRenderer

__all__ = ["Dialect", "DialectRequest", "EventStream"]


class DialectRequest(Protocol):
    """A request as the dialect understood it, with what only its answer needs."""

    @property
    def call(self) -> CallRequest: ...


R = TypeVar("R", bound=DialectRequest)


class EventStream(Protocol):
    """Server-sent events of one streamed answer."""

    @property
    def sends_tool_calls(self) -> bool:
        """Whether `delta` shows tool calls; else they come with `finish`."""
        ...

    def delta(self, delta: TextDelta) -> bytes:
        """What a client can show now; empty where there is nothing."""
        ...

    def finish(self, answer: Answer) -> bytes:
        """What was not sent yet (of an answer that was recorded before: all of it), and the end."""
        ...

    def error(self, refusal: Refusal) -> bytes:
        """What went wrong after the answer had begun, so that SDKs raise it."""
        ...


class Dialect(Protocol[R]):
    """One API."""

    def parse(self, body: bytes, settings: GatewaySettings) -> R:
        """Raises Refusal with what is wrong, which, and what next."""
        ...

    def write_answer(self, request: R, answer: Answer, renderer: PolicyRenderer) -> bytes: ...
    def write_error(self, refusal: Refusal) -> bytes: ...
    def open_stream(self, request: R, renderer: PolicyRenderer, begun: Begun) -> EventStream: ...
