"""The server's own process: binds the port, opens the store, serves, and goes when its parent goes.

stdin   one line of JSON: ServerSettings; its end means that the parent is gone
stdout  one line of JSON: {"url": …, "pid": …} when ready, or {"error": sentence}; prints of tokenizers go to stderr
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, BinaryIO

import uvicorn
from pydantic import ValidationError

from lightningrl.errors import LightningError, ServerError
from lightningrl.processes import die_with_parent, take_stdout
from lightningrl_server.settings import ServerSettings

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from lightningrl_server.forwarding import Forwarders
    from lightningrl_server.gateway.app import Gateway
    from lightningrl_server.gateway.settings import GatewaySettings
    from lightningrl_server.metrics import ServerMetrics
    from lightningrl_server.store import SqlStore

__all__ = ["Server", "bind", "main", "run_server"]

logger = logging.getLogger(__name__)

_BACKLOG = 2048
_GRACE_S = 2


def main() -> int:
    """Run `python -m lightningrl_server`. Returns the exit status."""
    parent = os.getppid()
    line = sys.stdin.buffer.readline()
    if not line:
        return 0  # the parent went before it said anything
    with take_stdout() as stdout:
        try:
            settings = ServerSettings.model_validate_json(line)
            form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
            logging.basicConfig(level=settings.log_level.upper(), format=form, stream=sys.stderr)
            die_with_parent(settings.parent_pid or parent)  # what was acknowledged is on disk
            run_server(settings, on_ready=lambda url: _say(stdout, {"url": url, "pid": os.getpid()}), lifeline=True)
        except ValidationError as error:
            first = error.errors()[0]
            problem = f"server settings: {'.'.join(map(str, first['loc']))}: {first['msg']}; fix them and start again"
            return _fail(stdout, ServerError(problem))
        except LightningError as error:
            return _fail(stdout, error)
    return 0


def run_server(
    settings: ServerSettings, *, on_ready: Callable[[str], None] | None = None, lifeline: bool = False
) -> None:
    """Serve until SIGTERM or SIGINT (with `lifeline`, stdin's end). Calls `on_ready(url)` once requests are answered.
    Raises ServerError (port in use), StoreError, ConfigError (a policy's tokenizer)."""
    listener = bind(settings.host, settings.port)
    try:
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(settings, listener, on_ready, lifeline=lifeline))
    finally:
        listener.close()


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ServerError with a sentence where the port is taken."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, number)
    except OSError as error:
        problem = error.strerror or str(error)
        raise ServerError(f"cannot listen on {host!r}: {problem}; give an address of this machine") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        problem = f"cannot listen on {host}:{port}: {error.strerror or error}"
        raise ServerError(f"{problem}; stop what uses the port or choose another") from None
    return listener


class Server(uvicorn.Server):
    """A server that leaves signals to us and says when it is ready."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None] = lambda: None) -> None:
        super().__init__(config)
        self._on_started = on_started

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_started()


async def _serve(
    settings: ServerSettings, listener: socket.socket, on_ready: Callable[[str], None] | None, *, lifeline: bool
) -> None:
    from lightningrl_server.forwarding import create_forwarders
    from lightningrl_server.metrics import ServerMetrics
    from lightningrl_server.store import SqlStore

    gateway_settings = settings.read_gateway(os.environ)
    forwarders = create_forwarders(settings.telemetry, os.environ)
    async with contextlib.AsyncExitStack() as stack:
        store = await SqlStore.open(settings.store_url)
        stack.push_async_callback(store.close)
        stack.push_async_callback(forwarders.close)
        metrics = ServerMetrics()
        watching = asyncio.create_task(metrics.watch())
        stack.callback(watching.cancel)
        app, gateway = _build(settings, gateway_settings, store, forwarders, metrics)
        stack.push_async_callback(gateway.close)
        host, port = listener.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        server = Server(_configure(app), lambda: on_ready(url) if on_ready else None)
        loop = asyncio.get_running_loop()

        def stop() -> None:
            server.should_exit = True

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        if lifeline:
            threading.Thread(target=_watch_parent, args=(loop, stop), name="lightningrl-lifeline", daemon=True).start()
        gc.enable()
        # What was imported stays: a collection that looks through all of it holds every call for a tenth of a second.
        gc.freeze()
        # With the usual 700, a body of many small parts is looked through while it is read, again and again.
        gc.set_threshold(10_000)
        await server.serve([listener])


def _build(
    settings: ServerSettings,
    gateway_settings: GatewaySettings,
    store: SqlStore,
    forwarders: Forwarders,
    metrics: ServerMetrics,
) -> tuple[Starlette, Gateway]:
    from lightningrl.plugins import load_plugins
    from lightningrl_server.app import create_app
    from lightningrl_server.asked_calls import read_kept_answers
    from lightningrl_server.engines.registry import EngineRegistry
    from lightningrl_server.engines.socket import engine_route
    from lightningrl_server.gateway.app import create_gateway
    from lightningrl_server.rendering.renderer import PolicyRenderer

    engines = EngineRegistry(wait_s=settings.engine_wait_s)
    renderers = {
        name: PolicyRenderer(
            policy.model,
            policy.renderer,
            name=name,
            template_kwargs=policy.chat_template_kwargs,
            chat_template=policy.chat_template,
        )
        for name, policy in settings.policies.items()
    }
    gateway = create_gateway(store, engines, renderers, gateway_settings, settings.dialects, metrics)
    app = create_app(
        store,
        engines,
        run_key=settings.run_key,
        routes=[engine_route(engines, settings.run_key), *gateway.routes],
        memory=gateway,
        forwarders=forwarders,
        read_asked=read_kept_answers(store, renderers),
        tokenizers={name: renderer.tokenizer for name, renderer in renderers.items()},
        folder=settings.folder,
        mounts={name: page.build for name, page in load_plugins().pages.items()},
        metrics=metrics,
        dialects=settings.dialects,
        max_body_bytes=settings.max_body_bytes,
        longest_wait_s=settings.longest_wait_s,
    )
    return app, gateway


def _configure(app: Starlette) -> uvicorn.Config:
    from lightningrl_server.bounded_http import BoundedHttp

    return uvicorn.Config(
        app,
        loop="none",
        http=BoundedHttp,
        ws="websockets-sansio",
        proxy_headers=False,  # nobody asks where a request comes from
        lifespan="off",
        access_log=False,
        log_config=None,
        timeout_keep_alive=300,
        timeout_graceful_shutdown=_GRACE_S,
        ws_max_size=256 * 2**20,
        ws_per_message_deflate=False,
        ws_ping_interval=30,
        ws_ping_timeout=300,
    )


def _watch_parent(loop: asyncio.AbstractEventLoop, stop: Callable[[], None]) -> None:
    while sys.stdin.buffer.read(4096):
        pass
    with contextlib.suppress(RuntimeError):  # the loop is closed already
        loop.call_soon_threadsafe(stop)


def _fail(stdout: BinaryIO, error: LightningError) -> int:
    _say(stdout, {"error": str(error)})
    logger.error("%s", error)
    return error.exit_code


def _say(stdout: BinaryIO, message: dict[str, object]) -> None:
    stdout.write(json.dumps(message).encode() + b"\n")
    stdout.flush()
