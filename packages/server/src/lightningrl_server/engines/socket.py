"""The server's end of the engine link: a WebSocket endpoint whose every connection is an `Engine` in the registry."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import msgspec
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from lightningrl.backends import EngineInfo, GenerateRequest, TokenChunk
from lightningrl.errors import BackendError, ContextOverflow, GrammarError, LightningError
from lightningrl_server.engines import messages
from lightningrl_server.engines.registry import EngineGone, EngineRegistry

__all__ = ["RemoteEngine", "engine_route"]

logger = logging.getLogger(__name__)


class _Call:
    """One completion on its way."""

    def __init__(self, policy: str) -> None:
        self.messages: asyncio.Queue[messages.Chunk | messages.Failure | None] = asyncio.Queue()
        """None = the engine is gone."""
        self.is_over = False
        self._policy = policy

    async def next(self) -> TokenChunk:
        message = await self.messages.get()
        self.is_over = not isinstance(message, messages.Chunk) or message.finish_reason is not None
        if isinstance(message, messages.Chunk):
            try:
                return TokenChunk(
                    token_ids=messages.unpack("i", message.token_ids),
                    logprobs=messages.unpack("f", message.logprobs),
                    policy_version=message.policy_version,
                    finish_reason=message.finish_reason,
                )
            except ValueError as error:
                raise BackendError(
                    f"the engine of policy {self._policy!r} sent tokens that cannot be read: {error}"
                ) from error
        if message is None:
            raise EngineGone(f"the engine of policy {self._policy!r} disconnected in mid-call")
        kinds: dict[str, type[LightningError]] = {"context_overflow": ContextOverflow, "grammar": GrammarError}
        raise kinds.get(message.kind, BackendError)(message.message)


class RemoteEngine:
    """The server's end: an `Engine` on the other side of a WebSocket."""

    def __init__(self, info: EngineInfo) -> None:
        self._info = info
        self._waiting: dict[str, _Call] = {}
        self._packed: tuple[tuple[int, ...], bytes] = (), b""
        """The last prompt: the choices of a call have the same."""
        self.outbox = messages.Outbox()

    @property
    def info(self) -> EngineInfo:
        return self._info

    def set_version(self, version: int) -> None:
        self._info = replace(self._info, version=version)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """Chunks as they are sampled."""
        with self._ask(request, whole=False) as call:
            while not call.is_over:
                yield await call.next()

    async def generate_whole(self, request: GenerateRequest) -> TokenChunk:
        """The completion as one chunk."""
        with self._ask(request, whole=True) as call:
            return await call.next()

    @contextmanager
    def _ask(self, request: GenerateRequest, *, whole: bool) -> Iterator[_Call]:
        call = _Call(self._info.policy)
        try:
            if request.prompt_ids is not self._packed[0]:
                self._packed = request.prompt_ids, messages.pack("i", request.prompt_ids)
            self.outbox.put(messages.Generate(request.id, self._packed[1], request.sampling, whole, request.session))
        except (OverflowError, ValueError) as error:
            raise BackendError(f"the engine of policy {self._info.policy!r} cannot be asked: {error}") from error
        self._waiting[request.id] = call
        try:
            yield call
        finally:
            del self._waiting[request.id]
            if not call.is_over:
                self.outbox.put(messages.Cancel(request.id))

    def deliver(self, message: messages.Chunk | messages.Failure) -> None:
        """A message from the engine; one for a call that was given up is dropped."""
        call = self._waiting.get(message.id)
        if call is not None:
            call.messages.put_nowait(message)

    def disconnect(self) -> None:
        """Fail what is in flight."""
        for call in self._waiting.values():
            call.messages.put_nowait(None)


def engine_route(registry: EngineRegistry, key: str) -> WebSocketRoute:
    """The server's endpoint. `key` is the run key that an engine shows as `Authorization: Bearer …`."""
    decode = msgspec.msgpack.Decoder(list[messages.FromEngine]).decode
    expected = f"Bearer {key}".encode()

    async def serve(socket: WebSocket) -> None:
        shown = socket.headers.get("authorization", "").encode()
        if not hmac.compare_digest(shown, expected):
            await socket.close(1008)  # before accepting: the client sees HTTP 403
            return
        await socket.accept()
        try:
            first, *rest = decode(await socket.receive_bytes())
            if not isinstance(first, messages.Hello):
                raise msgspec.ValidationError(f"an engine must say hello first, not {type(first).__name__!r}")
            engine = RemoteEngine(
                EngineInfo(
                    policy=first.policy,
                    version=first.version,
                    context_length=first.context_length,
                    grammars=first.grammars,
                )
            )
            registry.attach(engine, held=first.held)
            engine.outbox.put(messages.Welcome())

            async def read() -> None:
                batch = rest
                while True:
                    for message in batch:
                        _take(registry, engine, message)
                    batch = decode(await socket.receive_bytes())

            try:
                await messages.first_to_end(read(), _write(socket, engine.outbox))
            finally:
                registry.detach(engine)
                engine.disconnect()
        except WebSocketDisconnect:
            logger.info("an engine disconnected")
        except (msgspec.DecodeError, KeyError, ValueError) as error:
            logger.warning("an engine sent a frame that cannot be read, so it has to connect again: %s", error)
            await _close(socket, 1003, "unreadable frame")
        except Exception:  # the boundary to an engine: it connects again, and the server lives on
            logger.exception("the link to an engine broke")
            await _close(socket, 1011, "the server's end broke")

    return WebSocketRoute(messages.ENGINES_PATH, serve)


def _take(registry: EngineRegistry, engine: RemoteEngine, message: messages.FromEngine) -> None:
    if isinstance(message, messages.Chunk | messages.Failure):
        engine.deliver(message)
    elif isinstance(message, messages.Hold):
        registry.hold(engine)
    elif isinstance(message, messages.Release):
        engine.set_version(message.version)
        registry.hold(engine, held=False)


async def _write(socket: WebSocket, outbox: messages.Outbox) -> None:
    try:
        await outbox.deliver(socket.send_bytes)
    except (WebSocketDisconnect, RuntimeError, OSError) as error:
        logger.info("an engine's socket closed while sending: %s", error)


async def _close(socket: WebSocket, code: int, reason: str) -> None:
    with suppress(RuntimeError, OSError):  # closed already
        await socket.close(code, reason)
