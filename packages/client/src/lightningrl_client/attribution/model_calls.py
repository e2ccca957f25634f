"""Model calls of the agent: which requests are such calls, and where each goes instead.

POST https://api.openai.com/v1/chat/completions        the agent's client, made whenever, with whatever key
  └─► POST {server}/rollouts/{id}/attempts/{n}/v1/chat/completions   scoped key, call id, agent name, span id
  └─► POST {server}/v1/chat/completions                              outside of any rollout: refused (fails closed)
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final
from urllib.parse import urlsplit, urlunsplit

from lightningrl.call_origin import CallOrigin, OriginResolver, resolve_origin
from lightningrl.dialects import DIALECTS, Dialect, find_endpoint, key_headers
from lightningrl_client.attribution.role import current_role
from lightningrl_client.attribution.scope import ActiveRollout, ClaimedCall, RolloutScope

__all__ = ["CALL_ID", "OUR_HEADERS", "UNATTRIBUTED_KEY", "ModelCalls", "RedirectedCall", "is_sdk_retry"]

UNATTRIBUTED_KEY: Final = "unattributed"
"""Key of a call without a rollout."""

CALL_ID: Final = "x-lightningrl-call-id"
OUR_ATTEMPT: Final = re.compile(r"^/rollouts/[^/]+/attempts/\d+(?=/)")
ANY_MODEL: Final = re.compile(
    r"/(?:chat/completions|completions|responses|v1/messages|api/chat|api/generate|invoke|converse"
    r"|[^/]+:(?:stream)?[gG]enerateContent)$"
)
"""Paths that ask a model at any provider, also in APIs that are no dialect here: Ollama, Gemini, Bedrock."""
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
        """The block sends the call, and tells the status of the answer. Without an answer, or refused, its id is
        another call's."""
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


class ModelCalls:
    """Routes of the model calls that are made in this process."""

    def __init__(
        self,
        *,
        server_url: str,
        scope: RolloutScope,
        base_urls: Sequence[str] = (),
        dialects: Sequence[Dialect] = DIALECTS,
        is_guest: bool = False,
    ) -> None:
        """`is_guest`: the process is not the agent's alone; calls whose context was given no rollout are left alone."""
        server = urlsplit(server_url.rstrip("/"))
        if server.scheme not in {"http", "https"} or not server.hostname:
            problem = f"server url {server_url!r} is no http(s) url"
            raise ValueError(f"{problem}; give something like 'http://127.0.0.1:8000'")
        self.scope = scope
        self.is_guest = is_guest
        self.resolvers: list[OriginResolver] = []
        self.home_loop: asyncio.AbstractEventLoop | None = None
        """The worker's one event loop, if the agent runs on it: there pooled connections are kept. A pooled connection
        of another loop would outlive it and break the next rollout, so requests from other loops close theirs."""
        self.server_url = f"{server.scheme}://{server.netloc}{server.path}"
        self._netloc = server.netloc
        self._path = server.path
        self._own = Destination(server.hostname, server.port, server.path)
        self.dialects = tuple(dialects)
        hosts = dict.fromkeys(host for dialect in dialects for host in dialect.hosts)
        self._destinations = tuple(Destination.parse(url) for url in (*hosts, *base_urls))
        self.key_headers = (*key_headers(dialects), "api-key")  # the latter is Azure's
        self.unattributed = 0
        """Model calls outside of any rollout, which were refused."""
        self._unseen_hosts: set[str] = set()
        self.pid = os.getpid()
        """A process that is forked from this one has its patches, and nobody who hands in what it keeps."""

    def redirect(self, url: str, body: bytes | None, *, is_retry: bool = False) -> RedirectedCall | None:
        """Route a request to `url`; None = it is no model call, and is left alone. `body` None: it cannot be read."""
        if self.is_guest and not self.scope.is_within():
            return None
        parts = urlsplit(url)
        tail = self._tail(parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80), parts.path)
        rollout = self.scope.current()
        if tail is None:
            self._note_unseen(rollout, parts.hostname or "", parts.path)
            return None
        key, attempt = UNATTRIBUTED_KEY, ""
        if rollout is None:
            self._note_unattributed(parts.path)
        else:
            key, attempt = rollout.key, rollout.base_path.removesuffix("/v1")
        headers = {"Authorization": f"Bearer {key}"}
        claimed: ClaimedCall | None = None
        if rollout is not None and body:
            claimed = rollout.calls.claim(tail.encode() + b"\n" + body, is_retry=is_retry)
            headers[CALL_ID] = claimed.id
        if rollout is not None:
            self.scope.note_call(rollout, headers.get(CALL_ID, ""))
            headers.update(self._origin().headers())
        target = urlunsplit(urlsplit(self.server_url + attempt + tail)._replace(query=parts.query))
        return RedirectedCall(target, self._netloc, headers, rollout, claimed)

    def _note_unseen(self, rollout: ActiveRollout | None, host: str, path: str) -> None:
        """A model that is neither the policy nor recorded, as far as its path tells."""
        if rollout is not None and host not in rollout.unseen_hosts and ANY_MODEL.search(path):
            rollout.unseen_hosts.add(host)
            if host not in self._unseen_hosts:
                self._unseen_hosts.add(host)
                sentence = "rollout %s: a model at %r was called, which is neither recorded nor trained; %s"
                remedy = "if the policy is to answer in its place, name it in runtime.base_urls"
                logger.warning(sentence, rollout.rollout_id, host, remedy)

    def _note_unattributed(self, path: str) -> None:
        self.unattributed += 1
        if self.unattributed <= MOST_WARNINGS:
            sentence = "a call of %r belongs to no rollout and is refused (%d so far): %s"
            logger.warning(sentence, path, self.unattributed, self.scope.why_none())

    def _origin(self) -> CallOrigin:
        """Name the caller: the role in the agent's own code counts before the name that an adapter has for it."""
        origin = resolve_origin(self.resolvers) or CallOrigin()
        role = current_role()
        return origin if role is None else replace(origin, agent=role)

    def _tail(self, host: str, port: int, path: str) -> str | None:
        """The path below an attempt (`/v1/chat/completions`), if the URL is a model call of ours."""
        if self.is_own(host, port):
            below = OUR_ATTEMPT.sub("", path.removeprefix(self._path))
            if below.startswith("/v1/"):
                return below
            endpoint = find_endpoint(self.dialects, below)
            if endpoint is None:
                return None
            dialect, whole = endpoint
            tail = whole.removeprefix(dialect.bases[0])  # the control API has rollouts that are called `messages`
            return whole if below in {base + tail for base in dialect.bases} else None
        endpoint = find_endpoint(self.dialects, path) if self._is_listed(host, port, path) else None
        return None if endpoint is None else endpoint[1]

    def _is_listed(self, host: str, port: int, path: str) -> bool:
        return any(destination.matches(host, port, path) for destination in self._destinations)

    def is_answered(self, base_url: str) -> bool:
        """True if calls to that base URL go to the gateway, or would if a client made them here."""
        try:
            parts = urlsplit(base_url)
            host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:  # no address, and so nobody's
            return False
        return self.is_own(host, port) or self._is_listed(host, port, parts.path)

    def is_own(self, host: str, port: int) -> bool:
        return self._own.host == host and (self._own.port or port) == port

    def closes_connections(self) -> bool:
        try:
            return asyncio.get_running_loop() is not self.home_loop
        except RuntimeError:  # trio runs here
            return True


def is_sdk_retry(headers: Mapping[str, str]) -> bool:
    """The OpenAI and Anthropic SDKs count the retries of a call."""
    return headers.get("x-stainless-retry-count", "0") != "0"
