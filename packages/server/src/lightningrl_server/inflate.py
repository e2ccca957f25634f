"""Bodies of foreign servers' answers, inflated piece by piece: a small one that inflates to gigabytes is cut short."""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import httpx

__all__ = ["UNCOMPRESSED", "decoded_pieces", "read_at_most"]

UNCOMPRESSED: Final = {"accept-encoding": "identity"}
"""Request headers for a foreign server. One that compresses all the same is read in pieces of `PIECE`."""
PIECE: Final = 64 * 1024


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

    inflating = _inflater()
    async for chunk in answer.aiter_raw():
        while chunk:
            if inflating.eof:  # gzip may come in several parts
                inflating = _inflater()
            try:
                piece = inflating.decompress(chunk, PIECE)
            except zlib.error as error:
                raise httpx.DecodingError(f"its answer is not compressed as it says: {error}") from None
            if piece:
                yield piece
            chunk = inflating.unused_data if inflating.eof else inflating.unconsumed_tail
    if not inflating.eof:
        raise httpx.DecodingError("its answer ends in the midst of what is compressed")


def _inflater() -> zlib._Decompress:
    """Tells gzip from zlib by the first bytes."""
    return zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)


async def read_at_most(answer: httpx.Response, most: int) -> tuple[bytes, bool]:
    """The first `most` bytes of a streamed answer, and whether there are more, which are left unread."""
    body = bytearray()
    async for piece in decoded_pieces(answer):
        body += piece
        if len(body) > most:
            return bytes(body[:most]), True
    return bytes(body), False
