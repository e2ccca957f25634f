"""Bodies, inflated piece by piece and counted before anything is made of them: a small one that inflates to gigabytes,
or that is a million empty objects, is cut short.

a request's body ─► inflate ─► check_values ─► its own parser        a foreign server's answer ─► decoded_pieces
"""

from __future__ import annotations

import re
import zlib
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Final

from lightningrl.errors import ServerError

if TYPE_CHECKING:
    import httpx

__all__ = [
    "GZIP",
    "MOST_VALUES",
    "TELEMETRY_BYTES",
    "UNCOMPRESSED",
    "BadBody",
    "check_values",
    "decoded_pieces",
    "inflate",
    "read_at_most",
]

UNCOMPRESSED: Final = {"accept-encoding": "identity"}
"""Request headers for a foreign server. One that compresses all the same is read in pieces of `PIECE`."""
PIECE: Final = 64 * 1024
GZIP: Final = b"\x1f\x8b"
"""First bytes of what is compressed, also where no header says so."""
TELEMETRY_BYTES: Final = 8 * 2**20
"""Bytes of an export, when unpacked."""
MOST_VALUES: Final = 500_000
"""Values in one body: of JSON's objects and lists, or fields of protobuf. Each takes 200 bytes at most once read."""
_MOST_PARTS: Final = 1000
_STRING: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)


class BadBody(ServerError):
    """A request's body that is compressed otherwise than it says, or holds more than it may."""

    def __init__(self, message: str, status: int = 400, code: str = "invalid_encoding") -> None:
        super().__init__(message)
        self.message, self.status, self.code = message, status, code


def inflate(body: bytes, coding: str, most: int) -> bytes:
    """Unpack a request's body, never much beyond `most` bytes; `coding` is its content-encoding. Raises BadBody."""
    coding = coding.strip().lower()
    if coding in ("", "identity") and not body.startswith(GZIP):
        return body
    if coding not in ("", "identity", "gzip", "x-gzip", "deflate"):
        raise BadBody(f"the body is compressed as {coding[:40]!r}; send it plain, or as gzip", 415)
    plain, inflating = bytearray(), _Inflater()
    try:
        for start in range(0, len(body), PIECE):
            for piece in inflating.feed(body[start : start + PIECE]):
                plain += piece
                if len(plain) > most:
                    sentence = f"the body is larger than {most} bytes when unpacked; send less at a time"
                    raise BadBody(sentence, 413, "body_too_large")
    except zlib.error as error:
        raise BadBody(f"the body is not compressed as it says: {error}; send it plain") from None
    if not inflating.is_whole:
        raise BadBody("the compressed body ends too early; send all of it, or send it plain")
    return bytes(plain)


def check_values(body: bytes, most: int = MOST_VALUES) -> None:
    """Raise BadBody for JSON of more than `most` values, before it is parsed."""
    # 2 * most: of so many strings, keys among them, half are values
    if _count(body) > most and _count(_STRING.sub(b"", body, 2 * most)) > most:
        raise BadBody(f"the body has more than {most} values; send less at a time", 413, "body_too_large")


def _count(text: bytes) -> int:
    return text.count(b"[") + text.count(b"{") + text.count(b",")


def decoded_pieces(answer: httpx.Response) -> AsyncIterator[bytes]:
    """The body of a streamed answer, in pieces of at most `PIECE` bytes where it is compressed. Raises
    httpx.DecodingError for what is compressed in a way that nobody asked for, or wrongly."""
    import httpx

    coding = answer.headers.get("content-encoding", "").strip().lower()
    if coding in ("", "identity"):
        return answer.aiter_raw()
    if coding not in ("gzip", "x-gzip", "deflate"):
        raise httpx.DecodingError(f"its answer is compressed as {coding[:40]!r}, and it was asked not to compress")
    return _inflated(answer)


async def _inflated(answer: httpx.Response) -> AsyncIterator[bytes]:
    import httpx

    inflating = _Inflater()
    try:
        async for chunk in answer.aiter_raw():
            for piece in inflating.feed(chunk):
                yield piece
    except zlib.error as error:
        raise httpx.DecodingError(f"its answer is not compressed as it says: {error}") from None
    if not inflating.is_whole:
        raise httpx.DecodingError("its answer ends in the midst of what is compressed")


class _Inflater:
    """Tells gzip from zlib by the first bytes; gzip may come in several parts."""

    def __init__(self) -> None:
        self._parts = 0
        self._part = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Inflate to pieces of at most `PIECE` bytes. Raises zlib.error."""
        while chunk:
            if self._part.eof:
                self._parts += 1
                if self._parts > _MOST_PARTS:
                    raise zlib.error(f"it is in more than {_MOST_PARTS} parts")
                self._part = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)
            piece = self._part.decompress(chunk, PIECE)
            if piece:
                yield piece
            chunk = self._part.unused_data if self._part.eof else self._part.unconsumed_tail

    @property
    def is_whole(self) -> bool:
        return self._part.eof


async def read_at_most(answer: httpx.Response, most: int) -> tuple[bytes, bool]:
    """The first `most` bytes of a streamed answer, and whether there are more, which are left unread."""
    body = bytearray()
    async for piece in decoded_pieces(answer):
        body += piece
        if len(body) > most:
            return bytes(body[:most]), True
    return bytes(body), False
