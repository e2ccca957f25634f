"""The trainer's end of the engine link: serves a local engine to the gateway over a WebSocket that we open, and reopen.

async with EngineLink(backend.engine, server_url, run_key) as link:
    await link.hold()                 # nothing is being sampled when this returns; new calls wait
    report = await asyncio.to_thread(backend.learn, samples)
    await link.release()              # the waiting calls are sampled by the new weights
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit, urlunsplit

import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from lightningrl.backends import Engine, GenerateRequest
from lightningrl.errors import ContextOverflow, GrammarError, ServerError
from lightningrl_server.engines import messages
from lightningrl_server.engines.registry import closing

__all__ = ["EngineLink", "EngineLinks"]

logger = logging.getLogger(__name__)

_TOGETHER_S: Final = 0.02
"""Streamed tokens that come within this travel together."""


class EngineLink:
    """Connects out, so a trainer behind a firewall or on another machine can serve."""

    def __init__(self, engine: Engine, url: str, key: str, *, backoff_s: tuple[float, float] = (0.1, 5.0)) -> None:
        """`url` is the server's `http(s)://` or `ws(s)://` address."""
        parts = urlsplit(url)
        scheme = {"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme)
        self.url = urlunsplit((scheme, parts.netloc, parts.path.rstrip("/") + messages.ENGINES_PATH, "", ""))
        self._engine = engine
        self._key = key
        self._backoff_s = backoff_s
        self._wait_s = backoff_s[0]
        self._decode = msgspec.msgpack.Decoder(list[messages.FromServer]).decode
        self._connected = asyncio.Event()
        self._released = asyncio.Event()
        self._released.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.tokens = 0
        """Sampled so far, those of calls that were left included."""
        self._call_seconds = 0.0
        """Seconds of all calls that are over, together."""
        self._began: dict[str, float] = {}
        """When the calls that are being sampled began, by id."""
        self._calls: dict[str, asyncio.Task[None]] = {}
        self._outbox: messages.Outbox | None = None
        self._socket: ClientConnection | None = None
        self._runner: asyncio.Task[None] | None = None
        self._refused: str | None = None

    async def __aenter__(self) -> EngineLink:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def call_seconds(self) -> float:
        """Seconds that calls were sampled so far, all of them together, calls cut off included."""
        now = time.monotonic()
        return self._call_seconds + sum(now - began for began in self._began.values())

    @property
    def call_speed(self) -> float | None:
        """Tokens per second that one call was sampled with so far; None before the first."""
        return EngineLinks([self]).call_speed

    async def start(self, *, wait_s: float = 60.0) -> None:
        """Connect; returns once the server knows the engine. Raises ServerError when it refuses or is out of reach."""
        if self._runner is None:
            self._runner = asyncio.create_task(self._run(), name="engine-link")
        connected = asyncio.create_task(self._connected.wait())
        try:
            await asyncio.wait({connected, self._runner}, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            connected.cancel()
        if not self._connected.is_set():
            refused = self._refused
            await self.close()
            raise ServerError(refused or f"no server answers at {self.url!r} after {wait_s:g} s; is it running?")

    async def hold(self) -> None:
        """Stop taking calls and wait until none is being sampled. Calls that arrive meanwhile wait, none is refused."""
        self._released.clear()
        self._send(messages.Hold())
        await self._idle.wait()

    async def release(self, version: int | None = None) -> None:
        """Serve again, with the engine's current version unless another is said."""
        self._send(messages.Release(self._engine.info.version if version is None else version))
        self._released.set()

    async def close(self) -> None:
        """Disconnect; the server gives calls in flight to another engine, or lets them wait for one."""
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.gather(self._runner, return_exceptions=True)
            self._runner = None

    def _send(self, message: object) -> None:
        if self._outbox is not None:  # else the Hello of the next connection says the same
            self._outbox.put(message)

    async def _run(self) -> None:
        while True:
            try:
                headers = {"Authorization": f"Bearer {self._key}"}
                async with connect(
                    self.url, additional_headers=headers, max_size=None, compression=None, ping_timeout=300, proxy=None
                ) as socket:
                    await self._serve(socket)
            except InvalidStatus as error:
                if error.response.status_code in (401, 403):
                    self._refused = f"the server at {self.url!r} refused the engine: wrong run key"
                    logger.error("%s", self._refused)
                    return
                logger.warning("engine link: %s; trying again in %.1f s", error, self._wait_s)
            except (OSError, ConnectionClosed, InvalidHandshake, TimeoutError) as error:
                logger.warning("engine link to %s: %s; trying again in %.1f s", self.url, error, self._wait_s)
            except (msgspec.DecodeError, ValueError) as error:
                what = "engine link to %s: a frame cannot be read: %s; connecting anew in %.1f s"
                logger.warning(what, self.url, error, self._wait_s)
            except Exception:  # whatever broke at this boundary, the engine serves again once it is connected anew
                logger.exception("engine link to %s broke; connecting anew in %.1f s", self.url, self._wait_s)
            await asyncio.sleep(self._wait_s)
            self._wait_s = min(self._wait_s * 2, self._backoff_s[1])

    async def _serve(self, socket: ClientConnection) -> None:
        info = self._engine.info
        outbox = messages.Outbox()
        held = not self._released.is_set()
        outbox.put(messages.Hello(info.policy, info.version, info.context_length, held, info.grammars))
        self._outbox = outbox
        self._socket = socket
        try:
            await messages.first_to_end(self._read(socket, outbox), outbox.deliver(socket.send))
        finally:
            self._connected.clear()
            self._outbox = self._socket = None
            calls = list(self._calls.values())
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    async def _read(self, socket: ClientConnection, outbox: messages.Outbox) -> None:
        async for frame in socket:
            if isinstance(frame, str):
                continue
            for message in self._decode(frame):
                self._take(message, outbox)

    def _take(self, message: messages.FromServer, outbox: messages.Outbox) -> None:
        if isinstance(message, messages.Welcome):
            self._connected.set()
            self._wait_s = self._backoff_s[0]
        elif isinstance(message, messages.Generate):
            call = asyncio.create_task(self._answer(message, outbox))
            self._calls[message.id] = call
            call.add_done_callback(lambda _: self._calls.pop(message.id, None))
        elif isinstance(message, messages.Cancel):
            running = self._calls.get(message.id)
            if running is not None:
                running.cancel()

    async def _answer(self, message: messages.Generate, outbox: messages.Outbox) -> None:
        while not self._released.is_set():  # a call that crossed our Hold on its way
            await self._released.wait()
        self._began[message.id] = time.monotonic()
        self._idle.clear()
        try:
            prompt_ids = messages.unpack("i", message.prompt_ids)
            request = GenerateRequest(
                id=message.id, prompt_ids=prompt_ids, sampling=message.sampling, session=message.session
            )
            await self._sample(request, outbox, whole=message.whole)
        except ContextOverflow as error:
            outbox.put(messages.Failure(message.id, "context_overflow", str(error)))
        except GrammarError as error:
            outbox.put(messages.Failure(message.id, "grammar", str(error)))
        except Exception as error:  # the boundary to the engine: the caller hears of it, the link lives on
            logger.exception("engine link: call %s failed", message.id)
            outbox.put(messages.Failure(message.id, "engine", f"the engine failed: {type(error).__name__}: {error}"))
        finally:
            self._call_seconds += time.monotonic() - self._began.pop(message.id)
            if not self._began:
                self._idle.set()

    async def _sample(self, request: GenerateRequest, outbox: messages.Outbox, *, whole: bool) -> None:
        loop = asyncio.get_running_loop()
        tokens: list[int] = []
        logprobs: list[float] = []
        sent_at = 0.0
        version: int | None = None
        async with closing(self._engine.generate(request)) as chunks:
            async for chunk in chunks:
                if version is not None and chunk.policy_version != version:
                    why = f"weights changed from version {version} to {chunk.policy_version} in mid-call"
                    outbox.put(messages.Failure(request.id, "engine", why))
                    return
                version = chunk.policy_version
                self.tokens += len(chunk.token_ids)
                tokens.extend(chunk.token_ids)
                logprobs.extend(chunk.logprobs)
                is_due = not whole and tokens and loop.time() - sent_at >= _TOGETHER_S
                if is_due or chunk.finish_reason is not None:
                    packed = messages.pack("i", tokens), messages.pack("f", logprobs)
                    outbox.put(messages.Chunk(request.id, *packed, chunk.policy_version, chunk.finish_reason))
                    tokens, logprobs, sent_at = [], [], loop.time()
                if chunk.finish_reason is not None:
                    return
        outbox.put(messages.Failure(request.id, "engine", "the engine ended a completion without a finish reason"))


class EngineLinks:
    """One engine's links to every server of a run, held and released together."""

    def __init__(self, links: Sequence[EngineLink]) -> None:
        self._links = links

    @property
    def tokens(self) -> int:
        """Sampled so far, those of calls that were left included."""
        return sum(link.tokens for link in self._links)

    @property
    def call_speed(self) -> float | None:
        """Tokens per second that one call was sampled with so far; None before the first."""
        seconds = sum(link.call_seconds for link in self._links)
        return self.tokens / seconds if seconds else None

    async def start(self) -> None:
        """Returns once every server knows the engine. Raises ServerError."""
        await asyncio.gather(*(link.start() for link in self._links))

    async def hold(self) -> None:
        """Returns once nothing is being sampled for any of them."""
        await asyncio.gather(*(link.hold() for link in self._links))

    async def release(self, version: int | None = None) -> None:
        await asyncio.gather(*(link.release(version) for link in self._links))

    async def close(self) -> None:
        await asyncio.gather(*(link.close() for link in self._links))
