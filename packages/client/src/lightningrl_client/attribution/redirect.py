"""Sends the agent's model calls to the gateway, each under the rollout that makes it.

    POST https://api.openai.com/v1/chat/completions        the agent's client, made whenever, with whatever key
      └─► POST {server}/rollouts/{id}/attempts/{n}/v1/chat/completions   scoped key, call id, agent name, span id
      └─► POST {server}/v1/chat/completions                              outside of any rollout: the gateway refuses (fails closed)

`send` is patched on the client *classes* (httpx, httpx2, requests, aiohttp), when the agent imports them; so clients made at import
time, SDKs, LangChain's cached clients and wrapped transports are all covered. `ThreadPoolExecutor.submit` carries the context along.
`Thread.start` does not: a long-lived thread would carry its first rollout into later ones.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

import wrapt

from lightningrl.call_origin import CallOrigin, OriginResolver, resolve_origin
from lightningrl.dialects import DIALECTS, Dialect, find_endpoint, key_headers
from lightningrl_client.attribution.call_ids import ClaimedCall
from lightningrl_client.attribution.role import current_role
from lightningrl_client.attribution.scope import ActiveRollout, RolloutScope

__all__ = ["UNATTRIBUTED_KEY", "Redirection", "installed_redirection"]

UNATTRIBUTED_KEY: Final = "unattributed"
"""What a call without a rollout carries in place of a key."""

CALL_ID: Final = "x-lightningrl-call-id"
OUR_ATTEMPT: Final = re.compile(r"^/rollouts/[^/]+/attempts/\d+(?=/)")
ANY_MODEL: Final = re.compile(
    r"/(?:chat/completions|completions|responses|v1/messages|api/chat|api/generate|[^/]+:(?:stream)?[gG]enerateContent|invoke|converse)$"
)
"""What asks a model at whatever provider, also in APIs that are no dialect here: Ollama, Gemini, Bedrock."""
OUR_HEADERS: Final = (CALL_ID, "x-lightningrl-agent", "traceparent")

MOST_WARNINGS: Final = 20
"""About calls outside of any rollout; further ones are counted."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Destination:
    """A base URL whose calls are ours: host, port if it matters, path prefix."""

    host: str
    port: int | None
    prefix: str

    @classmethod
    def parse(cls, base_url: str) -> Destination:
        """From a base URL, or from a bare host."""
        parts = urlsplit(base_url if "//" in base_url else f"//{base_url}")
        if not parts.hostname:
            raise ValueError(f"no host in base url {base_url!r}; give something like 'https://llm.example.com/v1'")
        return cls(parts.hostname, parts.port, parts.path.rstrip("/"))

    def matches(self, host: str, port: int | None, path: str) -> bool:
        return host == self.host and self.port in (None, port) and path.startswith(self.prefix)


@dataclass(frozen=True, slots=True)
class RedirectedCall:
    """Where a matching request goes instead, and what becomes of its call id."""

    url: str
    host: str
    headers: Mapping[str, str]
    rollout: ActiveRollout | None
    claimed: ClaimedCall | None

    @contextmanager
    def sent(self) -> Iterator[Callable[[int], None]]:
        """The block sends the call, and tells the status of the answer. Without an answer, or refused, its id is another call's."""
        try:
            yield lambda status: self._give_back() if status >= 400 else None
        except BaseException as error:
            if isinstance(error, Exception) and self.rollout is not None:
                self.rollout.connection_errors.append(error)
            self._give_back()
            raise

    def _give_back(self) -> None:
        if self.rollout is not None and self.claimed is not None:
            self.rollout.calls.give_back(self.claimed)

    def rewrite(self, headers: MutableMapping[str, str], key_headers: Sequence[str], *, closes: bool) -> None:
        """Replace whatever identity the request carried by this call's."""
        for name in (*OUR_HEADERS, *key_headers):
            headers.pop(name, None)
        headers.update(self.headers)
        headers["Host"] = self.host
        if closes:
            headers["Connection"] = "close"


class Redirection:
    """Patches of this process's HTTP clients. `install` once, `uninstall` to restore them."""

    def __init__(
        self,
        *,
        server_url: str,
        scope: RolloutScope,
        base_urls: Sequence[str] = (),
        dialects: Sequence[Dialect] = DIALECTS,
        is_guest: bool = False,
    ) -> None:
        """`is_guest`: the process is not the agent's alone, so that calls whose context was given no rollout are left alone."""
        server = urlsplit(server_url.rstrip("/"))
        if server.scheme not in {"http", "https"} or not server.hostname:
            raise ValueError(f"server url {server_url!r} is no http(s) url; give something like 'http://127.0.0.1:8000'")
        self.scope = scope
        self.is_guest = is_guest
        self.resolvers: list[OriginResolver] = []
        self.home_loop: asyncio.AbstractEventLoop | None = None
        """The worker's one event loop, if the agent runs on it: there pooled connections are kept. A pooled connection of another
        loop would outlive it and break the next rollout, so requests from other loops close theirs."""
        self.server_url = f"{server.scheme}://{server.netloc}{server.path}"
        self._netloc = server.netloc
        self._path = server.path
        self._own = Destination(server.hostname, server.port, server.path)
        self.dialects = tuple(dialects)
        hosts = dict.fromkeys(host for dialect in dialects for host in dialect.hosts)
        self._destinations = tuple(Destination.parse(url) for url in (*hosts, *base_urls))
        self._key_headers = (*key_headers(dialects), "api-key")  # the latter is Azure's
        self.unattributed = 0
        """Model calls outside of any rollout, which were refused."""
        self.pid = os.getpid()
        """A process that is forked from this one has its patches, and nobody who hands in what it keeps."""
        self._unseen_hosts: set[str] = set()
        self._active = False
        self._restores: list[Callable[[], None]] = []

    def install(self) -> None:
        """Patch the client classes that are imported, and the others when they get imported."""
        if self._active:
            raise RuntimeError("this redirection is installed; install it once")
        self._active = True
        _installed.append(self)
        self._patch(ThreadPoolExecutor, "submit", self._submit)
        for module in ("httpx", "httpx2"):
            for client, send in (("Client", self._send_httpx), ("AsyncClient", self._send_httpx_async)):
                self._when_imported(module, client, "send", send)
                self._when_imported(module, client, "_transport_for_url", self._choose_transport)
        self._when_imported("requests", "Session", "send", self._send_requests)
        self._when_imported("aiohttp", "ClientSession", "_request", self._send_aiohttp)

    def uninstall(self) -> None:
        """Restore what `install` patched."""
        self._active = False
        if self in _installed:
            _installed.remove(self)
        while self._restores:
            self._restores.pop()()

    def redirect(self, url: str, body: bytes | None, *, is_retry: bool = False) -> RedirectedCall | None:
        """Where a request to `url` goes; None = it is no model call and goes where it wants. `body` None: it cannot be read."""
        if self.is_guest and not self.scope.is_within():
            return None
        parts = urlsplit(url)
        tail = self._tail(parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80), parts.path)
        rollout = self.scope.current()
        if tail is None:
            self._note_unseen(rollout, parts.hostname or "", parts.path)
            return None
        if rollout is None:
            self._note_unattributed(parts.path)
        key = UNATTRIBUTED_KEY if rollout is None else rollout.key
        attempt = "" if rollout is None else rollout.base_path.removesuffix("/v1")
        headers = {"Authorization": f"Bearer {key}"}
        claimed: ClaimedCall | None = None
        if rollout is not None and body is not None and body != b"":
            claimed = rollout.calls.claim(tail.encode() + b"\n" + body, is_retry=is_retry)
            headers[CALL_ID] = claimed.id
        if rollout is not None:
            headers.update(self._origin().headers())
        target = urlunsplit(urlsplit(self.server_url + attempt + tail)._replace(query=parts.query))
        return RedirectedCall(target, self._netloc, headers, rollout, claimed)

    def _note_unseen(self, rollout: ActiveRollout | None, host: str, path: str) -> None:
        """A model that is neither the policy nor recorded, as far as its path tells."""
        if rollout is not None and host not in rollout.unseen_hosts and ANY_MODEL.search(path):
            rollout.unseen_hosts.add(host)
            if host not in self._unseen_hosts:
                self._unseen_hosts.add(host)
                logger.warning(
                    "rollout %s: a model at %r was called, which is neither recorded nor trained; "
                    "if the policy is to answer in its place, name it in runtime.base_urls",
                    rollout.rollout_id,
                    host,
                )

    def _note_unattributed(self, path: str) -> None:
        self.unattributed += 1
        if self.unattributed <= MOST_WARNINGS:
            logger.warning(
                "a call of %r belongs to no rollout and is refused (%d so far): %s", path, self.unattributed, self.scope.why_none()
            )

    def _origin(self) -> CallOrigin:
        """Who makes this call: the role that the agent's own code names stands before what an adapter calls it."""
        origin = resolve_origin(self.resolvers) or CallOrigin()
        role = current_role()
        return origin if role is None else replace(origin, agent=role)

    def _tail(self, host: str, port: int, path: str) -> str | None:
        """The path below an attempt (`/v1/chat/completions`), if the URL is a model call of ours."""
        if self._is_own(host, port):
            below = OUR_ATTEMPT.sub("", path.removeprefix(self._path))
            if below.startswith("/v1/"):
                return below
            found = find_endpoint(self.dialects, below)
            if found is None:
                return None
            dialect, whole = found
            tail = whole.removeprefix(dialect.bases[0])  # the control API has rollouts that are called `messages`
            return whole if below in {base + tail for base in dialect.bases} else None
        if not any(destination.matches(host, port, path) for destination in self._destinations):
            return None
        endpoint = find_endpoint(self.dialects, path)
        return None if endpoint is None else endpoint[1]

    def is_answered(self, base_url: str) -> bool:
        """True if calls to that base URL go to the gateway, or would if a client made them here."""
        try:
            parts = urlsplit(base_url)
            host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:  # no address, and so nobody's
            return False
        return self._is_own(host, port) or any(destination.matches(host, port, parts.path) for destination in self._destinations)

    def _is_own(self, host: str, port: int) -> bool:
        return self._own.host == host and (self._own.port or port) == port

    def _closes(self) -> bool:
        try:
            return asyncio.get_running_loop() is not self.home_loop
        except RuntimeError:  # trio runs here
            return True

    # --- httpx and httpx2 ---

    def _send_httpx(self, wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = self._rewrite_httpx(args[0] if args else kwargs["request"], closes=False)
        if call is None:
            return wrapped(*args, **kwargs)
        kwargs["auth"] = None  # the client's own scheme would replace our key
        with call.sent() as note_status:
            response = wrapped(*args, **kwargs)
            note_status(response.status_code)
        return response

    async def _send_httpx_async(self, wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = self._rewrite_httpx(args[0] if args else kwargs["request"], closes=self._closes())
        if call is None:
            return await wrapped(*args, **kwargs)
        kwargs["auth"] = None
        with call.sent() as note_status:
            response = await wrapped(*args, **kwargs)
            note_status(response.status_code)
        return response

    def _rewrite_httpx(self, request: Any, *, closes: bool) -> RedirectedCall | None:
        call = self.redirect(str(request.url), httpx_body(request), is_retry=is_sdk_retry(request.headers))
        if call is not None:
            request.url = type(request.url)(call.url)
            call.rewrite(request.headers, self._key_headers, closes=closes)
        return call

    def _choose_transport(self, wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A client's proxy was chosen for the host that the agent named: our server is asked without it."""
        chosen, url = wrapped(*args, **kwargs), args[0] if args else kwargs["url"]
        is_httpx = type(chosen).__name__ in ("HTTPTransport", "AsyncHTTPTransport")
        return instance._transport if is_httpx and self._is_own(url.host, url.port or (443 if url.scheme == "https" else 80)) else chosen

    # --- requests ---

    def _send_requests(self, wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        request = args[0] if args else kwargs["request"]
        body = request.body.encode() if isinstance(request.body, str) else request.body
        call = self.redirect(request.url, body if isinstance(body, bytes) else None, is_retry=is_sdk_retry(request.headers))
        if call is None:
            return wrapped(*args, **kwargs)
        request.url = call.url
        call.rewrite(request.headers, self._key_headers, closes=False)
        kwargs["proxies"] = {}  # they were chosen for the host that the agent named
        with call.sent() as note_status:
            response = wrapped(*args, **kwargs)
            note_status(response.status_code)
        return response

    # --- aiohttp ---

    async def _send_aiohttp(self, wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = kwargs.get("headers") or ()
        if not isinstance(given, Mapping):
            kwargs["headers"] = given = list(given)  # of pairs
        if len(args) < 2 or CALL_ID in {name.lower() for name in dict(given)}:
            return await wrapped(*args, **kwargs)  # the transport of an httpx client that has been redirected above
        method, url, *rest = args
        call = self.redirect(str(instance._build_url(url)), aiohttp_body(kwargs))
        if call is None:
            return await wrapped(*args, **kwargs)
        headers: dict[str, str] = dict(given)
        for name in [name for name in headers if name.lower() in {"authorization", "host", "connection", *OUR_HEADERS, *self._key_headers}]:
            del headers[name]
        call.rewrite(headers, self._key_headers, closes=self._closes())
        # The session's own default headers cannot be taken away, only overridden.
        headers.update({name: headers["Authorization"].removeprefix("Bearer ") for name in self._key_headers if name in instance.headers})
        kwargs |= {"headers": headers, "auth": None, "proxy": None}
        with call.sent() as note_status:
            response = await wrapped(method, type(instance._build_url(url))(call.url), *rest, **kwargs)
            note_status(response.status)
        return response

    # --- threads ---

    def _submit(self, wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return wrapped(contextvars.copy_context().run, *args, **kwargs)

    # --- patching ---

    def _when_imported(self, module: str, owner: str, method: str, wrapper: Callable[..., Any]) -> None:
        def patch(imported: Any) -> None:
            if self._active and hasattr(getattr(imported, owner), method):
                self._patch(getattr(imported, owner), method, wrapper)

        wrapt.register_post_import_hook(patch, module)

    def _patch(self, owner: type, method: str, wrapper: Callable[..., Any]) -> None:
        original = getattr(owner, method)
        setattr(owner, method, wrapt.FunctionWrapper(original, wrapper))
        self._restores.append(lambda: setattr(owner, method, original))


_installed: list[Redirection] = []
"""Patches are of the whole process, and so is this: whoever reports asks here what rollout it works for."""


def installed_redirection() -> Redirection | None:
    """This process's redirection; None = this process is no worker."""
    return _installed[-1] if _installed else None


def is_sdk_retry(headers: Mapping[str, str]) -> bool:
    """The OpenAI and Anthropic SDKs count the retries of a call."""
    return headers.get("x-stainless-retry-count", "0") != "0"


def httpx_body(request: Any) -> bytes | None:
    """The body's bytes; None while they have not been read."""
    try:
        return bytes(request.content)
    except RuntimeError:  # RequestNotRead of httpx or httpx2
        return None


def aiohttp_body(kwargs: Mapping[str, Any]) -> bytes | None:
    """The body's bytes; None where they cannot be known before it is sent."""
    if kwargs.get("json") is not None:
        return json.dumps(kwargs["json"], default=repr).encode()
    data = kwargs.get("data")
    if data is None:
        return b""
    if isinstance(data, str):
        return data.encode()
    return bytes(data) if isinstance(data, bytes | bytearray | memoryview) else None
