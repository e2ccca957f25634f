"""Calls that no policy answers, handed on to the user's own provider: passed through, recorded, never trained.

call ─► a model of the upstream's? ─► POST {base_url}/{path} with the user's key ─► chunks, less that key, to the agent
                                                                               └─► a record, before the answer ends

The record is an `OtherCall`, which no reward or credit ever reads.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from lightningrl.dialects import Dialect
from lightningrl.errors import StoreError, iterate_causes
from lightningrl.keys import MASKED, Mask
from lightningrl.types import OtherCall, OtherCallKind
from lightningrl_server.gateway.calls import Routing
from lightningrl_server.gateway.request import CallContext, Refusal
from lightningrl_server.gateway.settings import GatewaySettings, Upstream
from lightningrl_server.inflate import UNCOMPRESSED, decoded_pieces
from lightningrl_server.records import AttemptInfo
from lightningrl_server.store.protocol import CallLog

if TYPE_CHECKING:
    import httpx
    from starlette.types import Send

__all__ = ["Forwarder", "MaskedBytes", "ReceivedCall"]

logger = logging.getLogger(__name__)

_SENT = ("content-type", "accept", "user-agent")
_RETURNED = ("content-type", "retry-after", "retry-after-ms", "x-should-retry", "x-request-id", "request-id")
_KEPT_BYTES = 2**20
"""Longest request or answer that is recorded, some hundred thousand tokens, or four thousand as the events of a stream;
others are recorded by their size."""
_LAST_EVENT = re.compile(rb"^data: ?\[DONE\]", re.MULTILINE)
_TIMEOUT_S = 600.0
_REASONING = re.compile(rb'"rs_lr-|"signature"\s*:\s*""')
"""Part of a policy's reasoning in a history: providers refuse it, as it has neither their ids nor their signature."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReceivedCall:
    """A call as it came in, and where its answer goes."""

    info: AttemptInfo
    path: str
    """The endpoint below its base, `chat/completions`."""
    request_id: str = ""
    query: bytes = b""
    """The part behind the path's question mark."""
    model: str = ""
    """The name that it asks for, read where there is an upstream; empty for none, which its dialect then refuses."""
    headers: Mapping[bytes, bytes]
    body: bytes = b""
    context: CallContext
    send: Send


class Forwarder:
    """Hands calls on. One per gateway."""

    def __init__(self, log: CallLog, routing: Routing, settings: GatewaySettings) -> None:
        self._log = log
        self._routing = routing
        self._default = settings.upstream
        self._models = dict(settings.upstream_models)
        self._client: httpx.AsyncClient | None = None

    def takes(self, model: str, context: CallContext) -> bool:
        """True if a call is the upstream's: its model is listed, or no policy serves it."""
        if model in self._routing.policies:
            return False
        return self._listed(model) is not None or (
            self._default is not None and not self._routing.may_serve(model, context.agent)
        )

    def has_upstream(self, model: str) -> bool:
        """True if there is an upstream for what no policy can answer, embeddings for instance."""
        return self._default is not None or self._listed(model) is not None

    async def forward(self, call: ReceivedCall, dialect: Dialect) -> None:
        """Pass the call on and its answer back. Raises Refusal where the upstream does not answer."""
        import httpx

        record = _Exchange(call)
        upstream = self._listed(call.model) or self._default
        assert upstream is not None
        if self._client is None:
            # How many call at once is the agents' affair.
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
            self._client = httpx.AsyncClient(timeout=httpx.Timeout(_TIMEOUT_S, connect=15.0), limits=limits)
        mask = Mask([upstream.api_key])
        passing, has_begun = MaskedBytes(mask), False
        try:
            body, sent = _body(upstream, call.body), _headers(upstream, dialect, call.headers)
            request = self._client.build_request("POST", _url(upstream, call), content=body, headers=sent)
            answer = await self._client.send(request, stream=True)
            try:
                record.status = answer.status_code
                given = ((name, value) for name, value in answer.headers.items() if name in _RETURNED)
                headers = [(name.encode(), mask.text(value).encode()) for name, value in given]
                pieces = decoded_pieces(answer)
                await call.send({"type": "http.response.start", "status": answer.status_code, "headers": headers})
                has_begun = True
                async for piece in pieces:
                    await self._pass_on(passing.add(piece), record, call)
                await self._pass_on(passing.end(), record, call)
            finally:
                await answer.aclose()
        except httpx.HTTPError as error:
            record.error, reason = type(error).__name__, mask.text(_reason(error))
            if not has_begun:
                problem = f"the upstream at {upstream.base_url!r} does not answer ({reason})"
                sentence = f"{problem}; check its address, and that it is up"
                raise Refusal(sentence, status=502, code="upstream_failed") from error
            place = call.info.rollout_id, upstream.base_url
            logger.warning("rollout %s: the upstream at %r broke off: %s", *place, reason)
            return  # without its end, so that the connection is closed: half an answer must not pass for a whole one
        except asyncio.CancelledError:
            record.error = "client_gone"
            raise
        finally:
            await asyncio.shield(self._record(call.info, record))
        await call.send({"type": "http.response.body", "body": b""})

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    def _listed(self, model: str) -> Upstream | None:
        return next((upstream for pattern, upstream in self._models.items() if fnmatchcase(model, pattern)), None)

    async def _pass_on(self, piece: bytes, record: _Exchange, call: ReceivedCall) -> None:
        if piece:
            record.add(piece)
            if _LAST_EVENT.search(piece):  # an agent reads no further, and may end its attempt at once
                await self._record(call.info, record)
            await call.send({"type": "http.response.body", "body": piece, "more_body": True})

    async def _record(self, info: AttemptInfo, record: _Exchange) -> None:
        if record.is_recorded:
            return
        record.is_recorded = True
        try:
            await self._log.append_other_calls(info.rollout_id, info.attempt, [record.call()])
        except StoreError as error:  # the attempt has ended: nothing is trained on it, the answer may still be read
            logger.warning("rollout %s: a call to the upstream could not be recorded: %s", info.rollout_id, error)


class _Exchange:
    """The record of a forwarded call, while it is made."""

    def __init__(self, call: ReceivedCall) -> None:
        self._call = call
        self._started_at = time.time()
        self._clock = time.perf_counter()
        is_kept = len(call.body) <= _KEPT_BYTES
        self._request = _parse(call.body) if is_kept else {"model": call.model, "bytes": len(call.body)}
        self._kept: list[bytes] = []
        self._size = 0
        self.is_recorded = False
        self.status: int | None = None
        self.error: str | None = None

    def add(self, chunk: bytes) -> None:
        self._size += len(chunk)
        if self._size <= _KEPT_BYTES:
            self._kept.append(chunk)

    def call(self) -> OtherCall:
        is_ok = self.error is None and self.status is not None and self.status < 400
        return OtherCall(
            kind=OtherCallKind.FORWARDED,
            path=self._call.path,
            model=self._call.model,
            agent=self._call.context.agent,
            status=self.status,
            code=None if is_ok else self.error or f"http_{self.status}",
            request=self._request,
            answer=self._answer(),
            started_at=self._started_at,
            duration_s=time.perf_counter() - self._clock,
        )

    def _answer(self) -> Any:
        if self._size > _KEPT_BYTES:
            return {"bytes": self._size}
        answer = _parse(b"".join(self._kept))
        if isinstance(answer, dict) and self._call.path == "embeddings" and isinstance(answer.get("data"), list):
            answer["data"] = {"vectors": len(answer["data"])}
        return answer


def _url(upstream: Upstream, call: ReceivedCall) -> str:
    """The upstream's address and the call's below it, with both queries (`api-version`, `beta`, `alt`)."""
    address = urlsplit(upstream.base_url)
    query = "&".join(part for part in (address.query, call.query.decode("latin-1")) if part)
    return urlunsplit(address._replace(path=f"{address.path.rstrip('/')}/{call.path}", query=query))


def _body(upstream: Upstream, body: bytes) -> bytes:
    """The body as the agent sent it, but for the model's name where the upstream has another, and a policy's reasoning
    in the history."""
    has_reasoning = _REASONING.search(body) is not None
    fields = _parse(body) if upstream.model is not None or has_reasoning else None
    if not isinstance(fields, dict):
        return body
    if upstream.model is not None:
        fields["model"] = upstream.model
    for key in ("input", "messages"):
        if has_reasoning and isinstance(fields.get(key), list):
            fields[key] = [_without_reasoning(item) for item in fields[key] if not _is_reasoning(item)]
    return json.dumps(fields).encode()


def _without_reasoning(message: Any) -> Any:
    blocks = message.get("content") if isinstance(message, dict) and message.get("role") == "assistant" else None
    if not isinstance(blocks, list):
        return message
    return {**message, "content": [block for block in blocks if not _is_reasoning(block)]}


def _is_reasoning(part: Any) -> bool:
    if not isinstance(part, dict):
        return False
    is_item = part.get("type") == "reasoning" and str(part.get("id")).startswith("rs_lr-")
    return is_item or (part.get("type") == "thinking" and part.get("signature") == "")


def _headers(upstream: Upstream, dialect: Dialect, headers: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """The agent's, as far as they are about the call; the attempt's key stays here."""
    names = [name.encode() for name in (*_SENT, *dialect.sent_headers)]
    sent = {name: headers[name] for name in names if name in headers}
    sent |= {name.encode(): value.encode() for name, value in UNCOMPRESSED.items()}  # chunks are passed on as they come
    if upstream.api_key is not None:
        scheme = "Bearer " if dialect.key_header == "authorization" else ""
        sent[dialect.key_header.encode()] = f"{scheme}{upstream.api_key}".encode()
    return sent


def _reason(error: Exception) -> str:
    """The system's own words, where there are some: httpx has "All connection attempts failed" for refused connections
    and wrong names alike. A request that cannot be sent is quoted by its error, so its name is all that is said."""
    import httpx

    if isinstance(error, httpx.LocalProtocolError):
        return type(error).__name__
    roots = (cause for cause in iterate_causes(error) if isinstance(cause, OSError) and cause.errno is not None)
    root = next(roots, error)
    return f"{type(root).__name__}: {root}".removesuffix(": ")


def _parse(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return data.decode("utf-8", "replace")


class MaskedBytes:
    """Masks the bytes of one answer as they pass: what may be the beginning of a key waits for what comes next."""

    def __init__(self, mask: Mask) -> None:
        self._written = [key.encode() for key in mask.written]
        self._held = b""

    def add(self, chunk: bytes) -> bytes:
        """Take more bytes; return those that can go on."""
        if not self._written:
            return chunk
        data = self._held + chunk
        for key in self._written:
            data = data.replace(key, MASKED.encode())
        sizes = range(min(len(data), max(map(len, self._written)) - 1), 0, -1)
        held = next((size for size in sizes if any(key.startswith(data[-size:]) for key in self._written)), 0)
        self._held = data[len(data) - held :]
        return data[: len(data) - held]

    def end(self) -> bytes:
        """Return the rest."""
        held, self._held = self._held, b""
        return held
