"""A dialect's format: one API's bodies on one side, our own request and answer on the other.

bytes ─► parse ─► .call (CallRequest) ─► the gateway ─► Answer            ─► write_answer ─► bytes
                                                    └─► TextDelta… Answer ─► EventStream  ─► bytes…
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pkgutil import resolve_name
from typing import Any, ClassVar, Generic, Protocol, TypeVar, cast

from lightningrl.dialects import Dialect
from lightningrl.errors import ConfigError
from lightningrl.types import FinishReason
from lightningrl_server.gateway.request import Answer, AnswerStart, CallRequest, Refusal
from lightningrl_server.gateway.settings import GatewaySettings
from lightningrl_server.rendering.completion import TextDelta, ToolRequest
from lightningrl_server.rendering.renderer import PolicyRenderer

__all__ = ["CountingFormat", "DialectFormat", "DialectRequest", "EventStream", "PartStream", "load_format"]


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

    def delta(self, delta: TextDelta) -> bytes:
        """Events that a client can show now; empty where there are none."""

    def finish(self, answer: Answer) -> bytes:
        """The rest of the answer (all of it, where it was recorded before), and the end."""

    def error(self, refusal: Refusal) -> bytes:
        """The event of an error after the answer had begun, so that SDKs raise it."""


class PartStream(ABC, Generic[R]):
    """An `EventStream` of parts, one after the other as in a whole answer: reasoning, text, tool calls. Reasoning that
    comes after text waits for its end."""

    sends_tool_calls = False
    REASONING: ClassVar[str]
    TEXT: ClassVar[str]
    """Kinds of parts, as the dialect calls them."""

    def __init__(self, request: R, renderer: PolicyRenderer, start: AnswerStart) -> None:
        self._request = request
        self._renderer = renderer
        self._answer_start = start
        self._has_started = False
        self._open: str | None = None
        """Kind of the part that goes on."""
        self._has_text = False
        self._late_reasoning = ""

    def delta(self, delta: TextDelta) -> bytes:
        out: list[bytes] = []
        if delta.reasoning and self._has_text:
            self._late_reasoning += delta.reasoning
        elif delta.reasoning:
            out += self._part(self.REASONING, delta.reasoning)
        if delta.content:
            out += self._part(self.TEXT, delta.content)
        return b"".join(out)

    def finish(self, answer: Answer) -> bytes:
        choice = answer.choices[0]
        out = [] if self._has_started else [self.delta(choice.as_delta())]
        if not self._has_text and not choice.tool_calls:
            out += self._part(self.TEXT, "")
        out += self._close(is_cut=choice.finish_reason is FinishReason.LENGTH)
        if self._late_reasoning:
            out += self._part(self.REASONING, self._late_reasoning)
            out += self._close()
        for index, call in enumerate(choice.tool_calls):
            out += self._tool_call(index, call)
        return b"".join((*out, *self._end(answer)))

    def _part(self, kind: str, text: str) -> list[bytes]:
        out: list[bytes] = []
        if self._open != kind:
            out += self._close()
            self._open = kind
            self._has_text = self._has_text or kind == self.TEXT
            out += self._start(kind)
        return [*out, self._text(kind, text)] if text else out

    @abstractmethod
    def _start(self, kind: str) -> list[bytes]: ...
    @abstractmethod
    def _text(self, kind: str, text: str) -> bytes: ...
    @abstractmethod
    def _close(self, *, is_cut: bool = False) -> list[bytes]:
        """End the open part, where there is one. `is_cut`: by the length of the answer."""

    @abstractmethod
    def _tool_call(self, index: int, call: ToolRequest) -> list[bytes]: ...
    @abstractmethod
    def _end(self, answer: Answer) -> list[bytes]: ...


class DialectFormat(Protocol[R]):
    """Reads and writes one API. Made without arguments, once for a gateway."""

    def parse(self, body: bytes, path: str, settings: GatewaySettings) -> R:
        """`path` is the called endpoint, below its base. Raises Refusal with what is wrong, which, and what next."""

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
