"""What a client may send before its request is one: heads are bounded, and connections that keep us waiting are
closed."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any, ClassVar

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket
from websockets.asyncio.client import connect

from lightningrl_server.bounded_http import HEAD_BYTES, HEADERS, BoundedHttp


class Patient(BoundedHttp):
    """Never closes for silence within a test."""

    HEAD_S: ClassVar[float] = 3600.0
    BODY_S: ClassVar[float] = 3600.0


class Impatient(BoundedHttp):
    HEAD_S: ClassVar[float] = 0.5
    BODY_S: ClassVar[float] = 0.5


class MovedLoop:
    """The event loop, with a clock that the test moves on."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._now = 0.0
        self._timers: list[asyncio.TimerHandle] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def time(self) -> float:
        return self._now

    def call_later(self, seconds: float, callback: Callable[..., object], *arguments: Any) -> asyncio.TimerHandle:
        self._timers.append(asyncio.TimerHandle(self._now + seconds, callback, arguments, self._loop))
        return self._timers[-1]

    def move_on(self, seconds: float) -> None:
        self._now += seconds
        due = [timer for timer in self._timers if timer.when() <= self._now and not timer.cancelled()]
        self._timers = [timer for timer in self._timers if timer.when() > self._now]
        for timer in due:
            timer._run()


class Timed(BoundedHttp):
    """Time passes for it as the test says."""

    HEAD_S: ClassVar[float] = 10.0
    BODY_S: ClassVar[float] = 10.0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.loop: Any = MovedLoop(self.loop)
        self.received = 0

    def data_received(self, data: bytes) -> None:
        self.received += len(data)
        super().data_received(data)


async def echo(request: Request) -> JSONResponse:
    return JSONResponse({"bytes": len(await request.body()), "headers": len(request.headers)})


async def refuse(request: Request) -> JSONResponse:
    return JSONResponse({"refused": True}, 401)


async def talk(websocket: WebSocket) -> None:
    await websocket.accept()
    while True:
        await websocket.send_text(await websocket.receive_text())


class Scene:
    def __init__(self, port: int, connections: set[Any]) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.connections = connections

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def drip(self, head: bytes, piece: bytes, *, pieces: int, every_s: float, ends: bool = False) -> int | None:
        """The answer's status; None = the server went on waiting through all the pieces. `ends`: the last one is the
        request's."""
        reader, writer = await self.open()
        while not self.connections:
            await asyncio.sleep(0)
        (protocol,) = self.connections
        sent = 0
        for data in (head, *(piece for _ in range(pieces))):
            writer.write(data)
            sent += len(data)
            while protocol.received < sent and not protocol.transport.is_closing():
                await asyncio.sleep(0)
            protocol.loop.move_on(every_s)
            if protocol.transport.is_closing():
                break
        answer = await reader.read() if ends or protocol.transport.is_closing() else b""
        writer.close()
        return read_answer(answer)[0] if answer else None


async def serving(protocol: type[BoundedHttp]) -> AsyncIterator[Scene]:
    routes = [
        Route("/echo", echo, methods=["POST"]),
        Route("/refuse", refuse, methods=["POST"]),
        WebSocketRoute("/talk", talk),
    ]
    config: Any = uvicorn.Config(
        Starlette(routes=routes),
        http=protocol,
        ws="websockets-sansio",
        lifespan="off",
        log_config=None,
        timeout_keep_alive=3600,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    task = asyncio.create_task(server._serve([listener]))
    while not server.started:
        await asyncio.sleep(0)
    yield Scene(listener.getsockname()[1], server.server_state.connections)
    server.should_exit = True
    await task
    listener.close()


@pytest.fixture
async def patient() -> AsyncIterator[Scene]:
    async for scene in serving(Patient):
        yield scene


@pytest.fixture
async def impatient() -> AsyncIterator[Scene]:
    async for scene in serving(Impatient):
        yield scene


@pytest.fixture
async def timed() -> AsyncIterator[Scene]:
    async for scene in serving(Timed):
        yield scene


def read_answer(answer: bytes) -> tuple[int, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body) if body else None


async def send_endlessly(writer: asyncio.StreamWriter, piece: bytes, most: int) -> int:
    """Until the server closes; how many bytes it took."""
    sent = 0
    try:
        while sent < most:
            writer.write(piece)
            await writer.drain()
            sent += len(piece)
    except ConnectionError:
        pass
    return sent


@pytest.mark.parametrize("piece", [b"x-more: " + b"y" * 1000 + b"\r\n", b"z" * 1000], ids=["headers", "one header"])
async def test_a_head_without_end_is_cut_off(patient: Scene, piece: bytes) -> None:
    _, writer = await patient.open()
    writer.write(b"POST /echo HTTP/1.1\r\nhost: h\r\nx-one: ")
    sent = await send_endlessly(writer, piece, most=200 * HEAD_BYTES)
    assert sent < 200 * HEAD_BYTES
    writer.close()


@pytest.mark.parametrize(
    "head",
    [
        b"POST /echo HTTP/1.1\r\nhost: h\r\nx-one: " + b"y" * HEAD_BYTES,
        b"POST /echo HTTP/1.1\r\nhost: h\r\nx-one: " + b"y" * HEAD_BYTES + b"\r\n\r\n",
        b"POST /" + b"y" * HEAD_BYTES + b" HTTP/1.1\r\nhost: h\r\n\r\n",
        b"POST /echo HTTP/1.1\r\n" + b"a: b\r\n" * (HEADERS + 1) + b"\r\n",
    ],
    ids=["unfinished", "one header", "path", "many headers"],
)
async def test_a_head_that_is_too_large_is_refused_with_a_sentence(patient: Scene, head: bytes) -> None:
    reader, writer = await patient.open()
    writer.write(head)
    status, body = read_answer(await reader.read())
    assert status == 431
    assert body["error"] == {
        "message": "the head of the request is larger than 65536 bytes or 128 headers; send fewer and shorter headers",
        "code": "head_too_large",
    }
    writer.close()


async def test_trailers_without_end_are_cut_off(patient: Scene) -> None:
    _, writer = await patient.open()
    writer.write(b"POST /echo HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n")
    sent = await send_endlessly(writer, b"x-more: " + b"y" * 1000 + b"\r\n", most=200 * HEAD_BYTES)
    assert sent < 200 * HEAD_BYTES
    writer.close()


async def test_what_is_no_http_is_refused_with_a_sentence(patient: Scene) -> None:
    reader, writer = await patient.open()
    writer.write(b"\x16\x03\x01 hello\r\n\r\n")
    status, body = read_answer(await reader.read())
    assert (status, body["error"]["code"]) == (400, "invalid_http")
    writer.close()


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"", None),
        (b"\r\n", None),
        (b"POST /ec", 408),
        (b"POST /echo HTTP/1.1\r\nhost: h\r\n", 408),
        (b"POST /echo HTTP/1.1\r\nhost: h\r\ncontent-length: 5\r\n\r\nab", 408),
    ],
    ids=["nothing", "blank lines", "half a line", "half a head", "half a body"],
)
async def test_a_client_that_keeps_us_waiting_is_sent_away(impatient: Scene, sent: bytes, status: int | None) -> None:
    reader, writer = await impatient.open()
    writer.write(sent)
    answer = await reader.read()  # ends when the server closes
    assert (read_answer(answer)[0] if answer else None) == status
    writer.close()


async def test_a_head_that_drips_is_not_held_for_ever(timed: Scene) -> None:
    assert await timed.drip(b"POST /echo HTTP/1.1\r\nx-slow: ", b"y", pieces=100, every_s=1.0) == 408


async def test_a_body_that_drips_is_not_held_for_ever(timed: Scene) -> None:
    """Each piece comes long before the silence is too long."""
    head = b"POST /echo HTTP/1.1\r\nhost: h\r\ncontent-length: 1000000\r\n\r\n"
    assert await timed.drip(head, b"x", pieces=100, every_s=1.0) == 408


async def test_a_body_that_keeps_pace_may_take_longer_than_a_silence(timed: Scene) -> None:
    head = b"POST /echo HTTP/1.1\r\nhost: h\r\nconnection: close\r\ncontent-length: 400000\r\n\r\n"
    assert await timed.drip(head, b"x" * 10_000, pieces=40, every_s=2.0, ends=True) == 200


async def test_a_body_that_nobody_waits_for_is_not_waited_for_without_end(impatient: Scene) -> None:
    reader, writer = await impatient.open()
    writer.write(b"POST /refuse HTTP/1.1\r\nhost: h\r\ncontent-length: 5\r\n\r\nab")
    assert (await reader.read()).startswith(b"HTTP/1.1 401")
    writer.close()


async def test_whole_requests_pass_as_ever(patient: Scene) -> None:
    async with httpx.AsyncClient(base_url=patient.url, trust_env=False) as http:
        for size in (0, 10, 300_000):
            answer = await http.post(
                "/echo", content=b"x" * size, headers={f"x-{number}": "y" * 400 for number in range(100)}
            )
            assert answer.json()["bytes"] == size and answer.json()["headers"] > 100

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(50):
                yield b"x" * 1000

        assert (await http.post("/echo", content=pieces())).json()["bytes"] == 50_000


async def test_requests_may_follow_each_other_without_waiting_for_answers(patient: Scene) -> None:
    reader, writer = await patient.open()
    request = b"POST /echo HTTP/1.1\r\nhost: h\r\ncontent-length: 2\r\n\r\nab"
    writer.write(request * 3 + request.replace(b"host: h\r\n", b"host: h\r\nconnection: close\r\n"))
    assert (await reader.read()).count(b'{"bytes":2,') == 4
    writer.close()


async def test_a_websocket_may_be_silent(impatient: Scene) -> None:
    async with connect(f"ws://127.0.0.1:{impatient.port}/talk", proxy=None) as websocket:
        reader, writer = await impatient.open()
        await reader.read()  # another connection was closed for its silence meanwhile
        writer.close()
        await websocket.send("still there")
        assert await websocket.recv() == "still there"
