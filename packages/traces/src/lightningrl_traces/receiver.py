"""Live OTLP over HTTP, kept in a file until Ctrl-C, then imported as any other.

SDK ─► POST /v1/traces, /v1/logs (protobuf or JSON, gzip) ─► .NAME.received/exports.otlp ─► Ctrl-C ─► NAME, a run

An export is answered once it is in the file, behind its length of four bytes; a kill loses none, and the same command
goes on.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import re
import shutil
import signal
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Final

import uvicorn
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from lightningrl.errors import ConfigError, RunFolderError, ServerError
from lightningrl.files import lock
from lightningrl.keys import KEY_VARIABLE
from lightningrl.plugins import PluginManager
from lightningrl_server.bounded_http import BoundedHttp
from lightningrl_server.failures import nobody_listens
from lightningrl_server.inflate import TELEMETRY_BYTES
from lightningrl_server.process import Server, bind
from lightningrl_server.spans.otlp import decode_export, encode_answer, read_media_type
from lightningrl_traces.importing import ImportReport, import_traces

__all__ = ["OtlpReceiver", "receive_traces"]

MOST: Final = 16 * 2**30
"""Bytes that are kept of one agent's traces."""
AT_ONCE: Final = 32
"""Requests that are read at once; others wait."""
CONNECTIONS: Final = 1024
LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")
"""Hosts that this machine alone reaches."""
_HOST: Final = re.compile(r"(\[[0-9a-fA-F:.]+\]|[\w.-]+)(?::\d{1,5})?")
_FILE: Final = "exports.otlp"


class _ShortHttp(BoundedHttp):
    """Sends a silent client away soon: exporters are on this machine, or near."""

    HEAD_S = 2.0
    BODY_S = 5.0
    PACE = 2.0**16


class OtlpReceiver:
    """Takes exports over HTTP and appends them to a file. Made and used on one event loop; `close` it."""

    def __init__(self, folder: Path, *, most: int = MOST, key: str = "") -> None:
        """Keep exports in `folder`, beside those that a killed process left whole. Takes `most` bytes, and where a
        `key` is given, only what shows it as `Authorization: Bearer KEY`."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = folder / _FILE
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            lock(self._file)
        except BlockingIOError:
            os.close(self._file)
            raise RunFolderError(
                f"another command listens into {str(folder)!r}; stop it, or name another --into"
            ) from None
        self._most = most
        self._decoding = asyncio.Lock()
        self._expected = f"Bearer {key}".encode("latin-1", "replace") if key else b""
        self._turn = asyncio.Semaphore(AT_ONCE)
        self.kept = _cut_to_whole(self._file)
        """Bytes in the file."""
        self.app = Starlette(
            routes=[
                Route("/v1/traces", partial(self._take, ExportTraceServiceRequest), methods=["POST"]),
                Route("/v1/logs", partial(self._take, ExportLogsServiceRequest), methods=["POST"]),
            ],
            exception_handlers={ClientDisconnect: nobody_listens},
        )

    def close(self) -> None:
        os.close(self._file)

    async def _take(self, kind: Callable[[], Any], request: Request) -> Response:
        if (refused := self._refuse(request)) is not None:
            return refused
        async with self._turn:
            return await self._keep(kind, request)

    def _refuse(self, request: Request) -> Response | None:
        """Refuse a web page, whose browser sends an Origin or a name that leads here, and who lacks the key."""
        headers = request.headers
        if "origin" in headers or headers.get("sec-fetch-site", "none") != "none":
            return PlainTextResponse("exports are taken from programs, not from web pages", 403)
        shown = headers.get("authorization", "")
        if self._expected and not hmac.compare_digest(shown.encode("latin-1"), self._expected):
            return PlainTextResponse(f"{request.url.path!r} needs the key: 'Authorization: Bearer …'", 401)
        host = _HOST.fullmatch(headers.get("host", ""))
        if not self._expected and (host is None or host[1].strip("[]").lower() not in LOOPBACK):
            problem = f"the host {headers.get('host', '')[:80]!r} is not this machine"
            return PlainTextResponse(f"{problem}; export to 127.0.0.1, or set {KEY_VARIABLE}", 403)
        if "content-type" not in headers:
            return PlainTextResponse("the export has no content type; export with OTLP over HTTP", 415)
        return None

    async def _keep(self, kind: Callable[[], Any], request: Request) -> Response:
        media_type = read_media_type(request.headers.get("content-type", ""))
        encoding = request.headers.get("content-encoding", "")
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > TELEMETRY_BYTES:
                return PlainTextResponse(
                    f"the export is larger than {TELEMETRY_BYTES} bytes; export fewer at a time", 413
                )
        try:
            async with self._decoding:
                export = await asyncio.to_thread(
                    decode_export, bytes(body), media_type, encoding, TELEMETRY_BYTES, kind()
                )
            self._append(export.SerializeToString())
        except ServerError as error:
            return PlainTextResponse(str(error), 400)
        except OSError as error:
            return PlainTextResponse(f"the export cannot be kept: {error.strerror or error}", 507)
        return Response(encode_answer(media_type, 0), media_type=media_type)

    def _append(self, export: bytes) -> None:
        if not export:
            return
        if len(export) > TELEMETRY_BYTES:
            raise ServerError(f"the export is larger than {TELEMETRY_BYTES} bytes; export fewer at a time")
        if self.kept + len(export) > self._most:
            raise OSError(f"{self._most} bytes are there already; stop with Ctrl-C, and listen into another folder")
        frame = len(export).to_bytes(4, "big") + export
        try:
            written = os.pwrite(self._file, frame, self.kept)
            if written < len(frame):
                raise OSError("no room is left")
        except OSError:
            os.ftruncate(self._file, self.kept)
            raise
        self.kept += len(frame)


def _cut_to_whole(file: int) -> int:
    """Cut off an export that a kill left half written; returns the bytes that stay."""
    size, at = os.fstat(file).st_size, 0
    while at + 4 <= size and (after := at + 4 + int.from_bytes(os.pread(file, 4, at), "big")) <= size:
        at = after
    os.ftruncate(file, at)
    return at


def receive_traces(
    address: str, into: Path, plugins: PluginManager, announce: Callable[[str], object], reward: str | None = None
) -> ImportReport:
    """Listen at `PORT` or `HOST:PORT` until SIGINT or SIGTERM, then import what came into a new folder. Calls
    `announce(url)` once exports are taken. The variable LIGHTNINGRL_KEY has the key that exports show; a host that
    other machines reach needs one. Raises ConfigError, ServerError or RunFolderError."""
    (host, port), key = _split(address), os.environ.get(KEY_VARIABLE, "")
    if not key and host not in LOOPBACK:
        raise ConfigError(
            f"--listen {address!r} is heard by other machines; set {KEY_VARIABLE} to a key that exports must show"
        )
    if into.exists() and (not into.is_dir() or any(into.iterdir())):
        raise RunFolderError(f"folder {str(into)!r} holds something already; name a new folder with --into")
    folder = into.parent / f".{into.name}.received"
    with closing(OtlpReceiver(folder, key=key)) as receiver:
        asyncio.run(_serve(receiver, host, port, announce))
        if not receiver.kept:
            shutil.rmtree(folder)
            raise RunFolderError(
                f"no export came to {address!r}: nothing is imported; set OTEL_EXPORTER_OTLP_ENDPOINT for the agent"
            )
        report = import_traces(receiver.path, into, "otlp", plugins, reward)
        shutil.rmtree(folder)
    return report


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or int(port) > 65_535:
        raise ConfigError(f"--listen {address!r} is no port; give PORT or HOST:PORT, such as 4318")
    return host.strip("[]") or "127.0.0.1", int(port)


async def _serve(receiver: OtlpReceiver, host: str, port: int, announce: Callable[[str], object]) -> None:
    with closing(bind(host, port)) as listener:
        at = listener.getsockname()[1]
        url = f"http://[{host}]:{at}" if ":" in host else f"http://{host}:{at}"
        config = uvicorn.Config(
            receiver.app,
            loop="none",
            http=_ShortHttp,
            lifespan="off",
            access_log=False,
            log_config=None,
            limit_concurrency=CONNECTIONS,
            timeout_graceful_shutdown=5,
        )

        def start() -> None:
            announce(url)

        def stop() -> None:
            server.should_exit = True

        server = Server(config, start)

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop)
        await server.serve([listener])
