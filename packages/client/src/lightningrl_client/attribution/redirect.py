"""Redirection of this process: its HTTP clients send the agent's model calls to the gateway.

`send` is patched on the client *classes*, when the agent imports them: httpx and httpx2 (the OpenAI and Anthropic SDKs,
most frameworks), requests, and aiohttp, alone or as a transport of httpx. So clients made at import, SDKs, LangChain's
cached clients and wrapped transports are covered. `ThreadPoolExecutor.submit` carries the context along. `Thread.start`
does not: a long-lived thread would carry its first rollout into later ones. Semantic Kernel's agents handle a message
in its sender's context.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing.process
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from copy import copy
from typing import Any, Final

from lightningrl.carried_context import carry_senders_context
from lightningrl.instrumentation import Args, Kwargs, Patches
from lightningrl_client.attribution.model_calls import CALL_ID, OUR_HEADERS, ModelCalls, RedirectedCall, is_sdk_retry

__all__ = ["Redirection", "installed_redirection"]

SEMANTIC_KERNEL: Final = "semantic_kernel.agents.runtime"


class Redirection(ModelCalls):
    """Model calls of this process's HTTP clients. `install` once, `uninstall` to restore the clients."""

    _patches: Patches | None = None

    def install(self) -> None:
        """Patch the client classes that are imported, and the others when they get imported."""
        if self._patches is not None:
            raise RuntimeError("this redirection is installed; install it once")
        self._patches = Patches()
        _installed.append(self)
        self._patches.wrap(ThreadPoolExecutor, "submit", self._submit)
        if not self.scope.exclusive:
            self._patches.wrap(asyncio.BaseEventLoop, "create_task", self._create_task)
            self._patches.wrap(multiprocessing.process.BaseProcess, "start", self._start_process)
        self._patch_clients(self._patches)
        _patch_semantic_kernel(self._patches)

    def uninstall(self) -> None:
        """Restore what `install` patched."""
        if self in _installed:
            _installed.remove(self)
        if self._patches is not None:
            self._patches.restore()
        self._patches = None

    def _submit(self, wrapped: Callable[..., Any], instance: Any, args: Args, kwargs: Kwargs) -> Any:
        """Wrap `submit` of an executor: the job runs in its caller's context."""
        context, work = self.scope.begin_work(f"job {_name_of(args[:1])}")
        future = wrapped(context.run, *args, **kwargs)
        if work is not None:
            work.watch(future)
        return future

    def _create_task(self, wrapped: Callable[..., Any], instance: Any, args: Args, kwargs: Kwargs) -> Any:
        context, work = self.scope.begin_work(f"task {_name_of(args[:1])}")
        if work is None:
            return wrapped(*args, **kwargs)
        has_own = kwargs.get("context") is not None or instance.get_task_factory() is not None
        task = wrapped(*args, **(kwargs if has_own else {**kwargs, "context": context}))
        work.watch(task)
        if has_own:
            self.scope.works_of_others[task] = work
        return task

    def _start_process(self, wrapped: Callable[..., Any], instance: Any, args: Args, kwargs: Kwargs) -> None:
        wrapped(*args, **kwargs)
        if (work := self.scope.begin_work(f"process {instance.name!r}")[1]) is not None:
            work.watch(instance, lambda process: process._closed or not process.is_alive())
            self.scope.works_of_others[instance] = work
            work.rollout.works.add(work)  # what it asks is not seen here

    def _patch_clients(self, patches: Patches) -> None:
        def patch_httpx(module: Any) -> None:
            for client, send in ((module.Client, self._send_httpx), (module.AsyncClient, self._send_httpx_async)):
                patches.wrap(client, "send", send)
                if hasattr(client, "_transport_for_url"):
                    patches.wrap(client, "_transport_for_url", self._choose_transport)

        patches.when_imported("httpx", patch_httpx)
        patches.when_imported("httpx2", patch_httpx)
        if not self.scope.exclusive:
            patches.when_imported("uvloop", lambda module: patches.wrap(module.Loop, "create_task", self._create_task))
        patches.when_imported("requests", lambda module: patches.wrap(module.Session, "send", self._send_requests))
        patches.when_imported(
            "aiohttp", lambda module: patches.wrap(module.ClientSession, "_request", self._send_aiohttp)
        )

    def _send_httpx(self, wrapped: Callable[..., Any], instance: Any, args: Args, kwargs: Kwargs) -> Any:
        call = self._rewrite_httpx(args, kwargs, closes=False)
        if call is None:
            return wrapped(*args, **kwargs)
        with call.sent() as note_status:
            response = wrapped(*args, **kwargs)
            note_status(response.status_code)
        return response

    async def _send_httpx_async(self, wrapped: Callable[..., Any], instance: Any, args: Args, kwargs: Kwargs) -> Any:
        closes = self.closes_connections()
        call = self._rewrite_httpx(args, kwargs, closes=closes)
        if call is None:
            return await wrapped(*args, **kwargs)
        token = _closing.set(closes)
        try:
            with call.sent() as note_status:
                response = await wrapped(*args, **kwargs)
                note_status(response.status_code)
        finally:
            _closing.reset(token)
        return response

    def _rewrite_httpx(self, args: Args, kwargs: Kwargs, *, closes: bool) -> RedirectedCall | None:
        request = args[0] if args else kwargs["request"]
        try:
            body = bytes(request.content)
        except RuntimeError:  # RequestNotRead of httpx or httpx2
            body = None
        call = self.redirect(str(request.url), body, is_retry=is_sdk_retry(request.headers))
        if call is not None:
            request.url = type(request.url)(call.url)
            call.rewrite(request.headers, self.key_headers, closes=closes)
            kwargs["auth"] = None  # the client's own scheme would replace our key
        return call

    def _choose_transport(self, wrapped: Callable[..., Any], instance: Any, args: Args, kwargs: Kwargs) -> Any:
        """Ask our server without the client's proxy, which was chosen for the host that the agent named.

        A call from another loop than the worker's goes without the client's connections, too: they are read on the
        loop that opened them.
        """
        transport, url = wrapped(*args, **kwargs), args[0] if args else kwargs["url"]
        is_async = type(transport).__name__ == "AsyncHTTPTransport"
        is_ours = self.is_own(url.host, url.port or (443 if url.scheme == "https" else 80))
        if not is_ours or not (is_async or type(transport).__name__ == "HTTPTransport"):
            return transport
        own = instance._transport
        return _without_connections(own) if is_async and _closing.get() else own

    def _send_requests(self, wrapped: Callable[..., Any], instance: Any, args: Args, kwargs: Kwargs) -> Any:
        request = args[0] if args else kwargs["request"]
        body = request.body.encode() if isinstance(request.body, str) else request.body
        is_retry = is_sdk_retry(request.headers)
        call = self.redirect(request.url, body if isinstance(body, bytes) else None, is_retry=is_retry)
        if call is None:
            return wrapped(*args, **kwargs)
        request.url = call.url
        call.rewrite(request.headers, self.key_headers, closes=False)
        kwargs["proxies"] = {}  # they were chosen for the host that the agent named
        with call.sent() as note_status:
            response = wrapped(*args, **kwargs)
            note_status(response.status_code)
        return response

    async def _send_aiohttp(self, wrapped: Callable[..., Any], instance: Any, args: Args, kwargs: Kwargs) -> Any:
        given = kwargs.get("headers") or ()
        if not isinstance(given, Mapping):
            kwargs["headers"] = given = list(given)  # of pairs
        if len(args) < 2 or CALL_ID in {name.lower() for name in dict(given)}:
            return await wrapped(*args, **kwargs)  # the transport of an httpx client that has been redirected already
        method, url, *rest = args
        whole = instance._build_url(url)
        call = self.redirect(str(whole), _aiohttp_body(kwargs))
        if call is None:
            return await wrapped(*args, **kwargs)
        key_headers = self.key_headers
        replaced = {"authorization", "host", "connection", *OUR_HEADERS, *key_headers}
        headers: dict[str, str] = {name: value for name, value in dict(given).items() if name.lower() not in replaced}
        call.rewrite(headers, key_headers, closes=self.closes_connections())
        # The session's own default headers cannot be taken away, only overridden.
        key = headers["Authorization"].removeprefix("Bearer ")
        headers.update({name: key for name in key_headers if name in instance.headers})
        kwargs |= {"headers": headers, "auth": None, "proxy": None}
        with call.sent() as note_status:
            response = await wrapped(method, type(whole)(call.url), *rest, **kwargs)
            note_status(response.status)
        return response


def _patch_semantic_kernel(patches: Patches) -> None:
    def patch(module: Any) -> None:
        def within(agent: Any) -> Any:
            return module.MessageHandlerContext.populate_context(agent.id)

        def patch_agents(agents: Any) -> None:
            carry_senders_context(patches, module.InProcessRuntime, agents.BaseAgent, within)

        patches.when_imported(f"{SEMANTIC_KERNEL}.core.base_agent", patch_agents)

    patches.when_imported(f"{SEMANTIC_KERNEL}.in_process.in_process_runtime", patch)


def _without_connections(transport: Any) -> Any:
    """Return a transport of httpx with the same settings and a pool of its own."""
    if not hasattr(transport, "_pool"):
        return transport
    alone = copy(transport)
    alone._pool = copy(transport._pool)
    alone._pool._connections, alone._pool._requests = [], []
    return alone


def _aiohttp_body(kwargs: Mapping[str, Any]) -> bytes | None:
    """The body's bytes; None where they cannot be known before it is sent."""
    if kwargs.get("json") is not None:
        return json.dumps(kwargs["json"], default=repr).encode()
    data = kwargs.get("data")
    if data is None:
        return b""
    if isinstance(data, str):
        return data.encode()
    return bytes(data) if isinstance(data, bytes | bytearray | memoryview) else None


_closing: ContextVar[bool] = ContextVar("closing", default=False)
"""True within a redirected call whose connection closes after it."""
_installed: list[Redirection] = []
"""Patches are of the whole process, and so is this: whoever reports asks here what rollout it works for."""


def installed_redirection() -> Redirection | None:
    """Return this process's redirection; None = this process is no worker."""
    return _installed[-1] if _installed else None


def _name_of(code: tuple[Any, ...]) -> str:
    """The name of a coroutine or function, as it is told to a person."""
    return repr(getattr(code[0], "__qualname__", type(code[0]).__name__)[-100:]) if code else "''"
