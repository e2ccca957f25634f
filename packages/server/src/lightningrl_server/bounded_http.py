"""uvicorn's HTTP with bounds on what a client may send or leave unsaid before its request is a request.

connected ─► head: HEAD_BYTES, HEADERS, HEAD_S ─► body: BODY_S of silence, PACE over all ─► answered
"""

from __future__ import annotations

import asyncio
from typing import ClassVar, Final

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

__all__ = ["BoundedHttp"]

HEAD_BYTES: Final = 64 * 1024
HEADERS: Final = 128


class _TooLarge(Exception):
    """The head has too many bytes or headers."""


class BoundedHttp(HttpToolsProtocol):
    """`uvicorn.Config(http=BoundedHttp)`. Idle connections are closed by uvicorn's own timeout."""

    HEAD_S: ClassVar[float] = 30.0
    """Seconds for a request's head, from its first byte, or from the connection where none comes."""
    BODY_S: ClassVar[float] = 60.0
    """Seconds without a byte of a body that is not whole yet and that we wait for."""
    PACE: ClassVar[float] = 4096.0
    """Bytes of a body per second, from its first `BODY_S` on: a body that drips is not held for as long as it likes."""

    _in_head = True
    _in_message = False
    _unused = 0
    """Bytes since the last that were some of a body: of a head, of trailers, of chunks' framing."""
    _is_too_large = False
    _is_upgraded = False
    _timer: asyncio.TimerHandle | None = None
    _body_bytes = 0
    """Bytes so far of the body that is coming in."""
    _waited_s = 0.0
    """Seconds that we waited for pieces of it."""
    _waits_since: float | None = None
    """None = we do not wait: what came is more than the app has read."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait(self.HEAD_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        was_in_head = self._in_head
        self._unused += len(data)
        if self._in_message and not was_in_head and self._waits_since is not None:
            self._waited_s += self.loop.time() - self._waits_since
        super().data_received(data)
        self._waits_since = None if self.flow.read_paused else self.loop.time()
        if self._is_upgraded or self.transport.is_closing():
            self._wait(None)
        elif self._in_message and self._unused > HEAD_BYTES:
            self._refuse_head()
        elif self._in_message and not self._in_head:
            self._wait(min(self.BODY_S, self._body_s_left()))
        # a head's beginning, or blank lines before one
        elif self._in_message or self.cycle is None or self.cycle.response_complete:
            if self._timer is None or not was_in_head:
                self._wait(self.HEAD_S)
        else:
            self._wait(None)  # it is our turn

    def handle_websocket_upgrade(self) -> None:
        self._is_upgraded = True
        super().handle_websocket_upgrade()

    def on_message_begin(self) -> None:
        self._in_head = self._in_message = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > HEAD_BYTES or len(self.headers) > HEADERS:
            self._is_too_large = True
            raise _TooLarge
        self._in_head = False
        self._unused = self._body_bytes = 0
        self._waited_s = 0.0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unused = 0
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_message = False
        self._unused = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        if self._is_too_large:
            self._refuse_head()
        else:
            self._refuse(400, "the request is no HTTP that can be read; use an HTTP client", "invalid_http")

    def _refuse_head(self) -> None:
        problem = f"the head of the request is larger than {HEAD_BYTES} bytes or {HEADERS} headers"
        self._refuse(431, f"{problem}; send fewer and shorter headers", "head_too_large")

    def _refuse(self, status: int, sentence: str, code: str) -> None:
        """Answer, unless an answer is on its way already, and close."""
        self._wait(None)
        if self.cycle is None or not self.cycle.response_started or self.cycle.response_complete:
            body = msgspec.json.encode({"error": {"message": sentence, "code": code}})
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()

    def _body_s_left(self) -> float:
        """Seconds that the body's next piece may take. 40 KiB in 65 s, at 4 KiB a second, are 5 s ahead of 60 + 10."""
        return max(0.0, self.BODY_S + self._body_bytes / self.PACE - self._waited_s)

    def _wait(self, seconds: float | None) -> None:
        """Close the connection unless the client goes on within `seconds`; None = it owes us nothing."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if seconds is not None:
            self._timer = self.loop.call_later(seconds, self._on_silence)

    def _on_silence(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        if self.flow.read_paused:  # it is we who do not read on
            self._wait(self.BODY_S)
        elif self._in_message:
            problem = f"the {'head' if self._in_head else 'body'} of the request did not come to its end in time"
            self._refuse(408, f"{problem}; send it again", "request_timeout")
        else:
            self.transport.close()
