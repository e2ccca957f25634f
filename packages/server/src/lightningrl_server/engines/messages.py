"""Messages between an engine and the server.

    engine ──► Hello · Chunk · Failed · Hold · Release ──► server
    engine ◄────── Welcome · Generate · Cancel ─────────── server

A binary frame is a msgpack array of messages, so whatever is ready at one moment travels together. Token ids and
logprobs are packed little-endian int32 / float32: what the engine sampled arrives bit for bit.
"""

from __future__ import annotations

import array
import asyncio
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final, Literal

import msgspec

from lightningrl.types import FinishReason, SamplingSettings

__all__ = [
    "ENGINES_PATH",
    "Cancel",
    "Chunk",
    "Failure",
    "FromEngine",
    "FromServer",
    "Generate",
    "Hello",
    "Hold",
    "Outbox",
    "Release",
    "Welcome",
    "first_to_end",
    "pack",
    "unpack",
]


ENGINES_PATH: Final = "/api/v1/engines"


class Hello(msgspec.Struct, tag="hello", array_like=True):
    """First message of an engine."""

    policy: str
    version: int
    context_length: int
    held: bool
    grammars: bool = False


class Chunk(msgspec.Struct, tag="chunk", array_like=True):
    """Next tokens of a completion; the last chunk has a finish reason."""

    id: str
    token_ids: bytes
    logprobs: bytes
    policy_version: int
    finish_reason: FinishReason | None


class Failure(msgspec.Struct, tag="failed", array_like=True):
    """A completion that will not come. Kinds: `context_overflow`, `grammar`, `engine`."""

    id: str
    kind: str
    message: str

    def __post_init__(self) -> None:
        self.message = self.message.encode("utf-8", "replace").decode()  # it may quote anything, and has to arrive


class Hold(msgspec.Struct, tag="hold", array_like=True):
    """Weights are about to change: send no new work."""


class Release(msgspec.Struct, tag="release", array_like=True):
    """Weights are in place."""

    version: int


class Welcome(msgspec.Struct, tag="welcome", array_like=True):
    """The engine is in the registry."""


class Generate(msgspec.Struct, tag="generate", array_like=True):
    """Sample a completion; `whole` = answer in one chunk."""

    id: str
    prompt_ids: bytes
    sampling: SamplingSettings
    whole: bool
    session: str


class Cancel(msgspec.Struct, tag="cancel", array_like=True):
    """Nobody waits for it any more."""

    id: str


FromEngine = Hello | Chunk | Failure | Hold | Release
FromServer = Welcome | Generate | Cancel


def pack(code: Literal["i", "f"], values: Sequence[float]) -> bytes:
    """Little-endian int32 or float32."""
    return _little_endian(array.array(code, values)).tobytes()


def unpack(code: Literal["i", "f"], data: bytes) -> tuple[Any, ...]:
    return tuple(_little_endian(array.array(code, data)))


def _little_endian(values: array.array[Any]) -> array.array[Any]:
    if sys.byteorder == "big":
        values.byteswap()
    return values


async def first_to_end(*halves: Coroutine[Any, Any, None]) -> None:
    """A link's reader and its writer, until one ends or fails: the other is then stopped. Raises what ended it."""
    tasks = [asyncio.create_task(half) for half in halves]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Outbox:
    """Messages on their way into the socket; everything that waits goes as one frame."""

    def __init__(self) -> None:
        self._messages: list[msgspec.Raw] = []
        self._ready = asyncio.Event()
        self._encode = msgspec.msgpack.Encoder().encode

    def put(self, message: object) -> None:
        """Raises ValueError for a message that no frame can carry (a number beyond 64 bits, half a character): it alone
        is not sent."""
        try:
            self._messages.append(msgspec.Raw(self._encode(message)))
        except (OverflowError, TypeError, ValueError) as error:
            raise ValueError(
                f"a {type(message).__name__!r} message cannot be sent over the engine link: {error}"
            ) from error
        self._ready.set()

    async def deliver(self, send: Callable[[bytes], Awaitable[None]]) -> None:
        """Send frames until that fails."""
        while True:
            await self._ready.wait()
            self._ready.clear()
            messages, self._messages = self._messages, []
            await send(self._encode(messages))
