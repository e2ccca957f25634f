"""One HTTP exchange with an agent: who it is, what it sent, what it gets, and whether it still listens."""

from __future__ import annotations

import asyncio
import hashlib
import zlib
from codecs import BOM_UTF8
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from gzip import GzipFile
from io import BytesIO
from typing import Any
from urllib.parse import unquote

from starlette.types import Receive, Scope, Send

from lightningrl.records import AttemptInfo
from lightningrl.roles import LONGEST_ROLE
from lightningrl_server.gateway.calls import PolicyCalls
from lightningrl_server.gateway.errors import Refusal
from lightningrl_server.gateway.request import CallContext

__all__ = ["ClientGone", "ReceivedCall", "authorise", "call_context", "read_body", "send_json", "while_connected"]

_GZIP = b"\x1f\x8b"
_JSON = (b"content-type", b"application/json")
_RETRY = {503: b"true", 409: b"false"}
"""For SDKs, which try again by status: a call that has diverged, or whose id is taken, is refused each time."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReceivedCall:
    """A call as it came in, and where its answer goes."""

    info: AttemptInfo
    path: str
    """The endpoint below its base, `chat/completions`."""
    query: bytes = b""
    """What stood behind the path's question mark."""
    model: str = ""
    """The name that it asks for, read where there is an upstream; empty where it names none, which its dialect then refuses."""
    headers: Mapping[bytes, bytes]
    body: bytes = b""
    context: CallContext
    send: Send


class ClientGone(Exception):
    """Nobody listens any more."""


async def authorise(policy_calls: PolicyCalls, key_headers: Sequence[str], scope: Scope, headers: Mapping[bytes, bytes]) -> AttemptInfo:
    """The attempt that the call's path names and its key opens. Raises Refusal."""
    scheme, _, key = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    if scheme.lower() != "bearer" or not key:
        key = next((headers[name.encode()].decode("latin-1") for name in key_headers if name.encode() in headers), "")
    if not key:
        ways = " or ".join(["'Authorization: Bearer …'", *(f"'{name}: …'" for name in key_headers)])
        raise Refusal(
            f"the call shows no key; send the attempt's key as {ways}",
            status=401,
            code="invalid_api_key",
        )
    place = scope["path_params"]
    return await policy_calls.authorise(place["rollout_id"], place["attempt"], key.strip())


async def read_body(headers: Mapping[bytes, bytes], receive: Receive, limit: int) -> bytes:
    """The whole body. Raises Refusal beyond the limit or where the headers say what no call may, ClientGone where it never comes."""
    if len(said_role(headers) or "") > LONGEST_ROLE:
        raise Refusal(f"the role in 'x-lightningrl-agent' is longer than {LONGEST_ROLE} characters; give it a shorter name")
    declared = headers.get(b"content-length", b"")
    too_large = Refusal(f"the request body is larger than {limit} bytes; shorten the messages", status=413, code="body_too_large")
    if declared.isdigit() and int(declared) > limit:
        raise too_large
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise too_large
        chunks.append(chunk)
        if not message.get("more_body", False):
            body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
            coding = headers.get(b"content-encoding", b"").strip().lower().decode("latin-1")
            if coding not in ("", "identity") or body.startswith(_GZIP):
                body = await asyncio.to_thread(_inflate, body, coding, limit)
            return body.removeprefix(BOM_UTF8)


def _inflate(body: bytes, coding: str, limit: int) -> bytes:
    """A compressed body, never inflated much beyond the limit. Raises Refusal."""
    if coding not in ("", "identity", "gzip", "x-gzip", "deflate"):
        raise Refusal(f"the body is compressed as {coding[:40]!r}; send it plain, or as gzip", status=415, code="invalid_encoding")
    try:
        if coding == "deflate":
            inflating = zlib.decompressobj()
            plain = inflating.decompress(body, limit + 1)
            is_cut = not inflating.eof
        else:
            plain, is_cut = GzipFile(fileobj=BytesIO(body)).read(limit + 1), False
    except EOFError:
        plain, is_cut = b"", True
    except (OSError, zlib.error) as error:
        raise Refusal(f"the body is not compressed as it says: {error}; send it plain", code="invalid_encoding") from None
    if len(plain) > limit:
        raise Refusal(
            f"the request body is larger than {limit} bytes when unpacked; shorten the messages", status=413, code="body_too_large"
        )
    if is_cut:
        raise Refusal("the compressed body ends too early; send all of it, or send it plain", code="invalid_encoding")
    return plain


def said_role(headers: Mapping[bytes, bytes]) -> str | None:
    """The role that the call's header names; None = none."""
    agent = headers.get(b"x-lightningrl-agent")
    return unquote(agent.decode("latin-1")) if agent else None  # headers carry ASCII only


def call_context(headers: Mapping[bytes, bytes], body: bytes) -> CallContext:
    """The call's context, from its headers."""
    retries = headers.get(b"x-stainless-retry-count", b"0")
    call_id = headers.get(b"x-lightningrl-call-id")
    agent = said_role(headers)
    parent = headers.get(b"traceparent", b"").split(b"-")
    return CallContext(
        call_id=call_id.decode("latin-1") if call_id else None,
        retries=int(retries) if retries.isdigit() and len(retries) < 10 else 0,
        agent=agent and agent[:LONGEST_ROLE],  # of a longer one the refusal is kept
        span_id=parent[2].decode("latin-1") if len(parent) == 4 and len(parent[2]) == 16 else None,
        body_digest="" if call_id else hashlib.blake2b(body, digest_size=12).hexdigest(),
    )


async def send_json(send: Send, status: int, body: bytes) -> None:
    headers = [_JSON, (b"content-length", b"%d" % len(body))]
    if status in _RETRY:
        headers.append((b"x-should-retry", _RETRY[status]))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Finish the work, or cancel it when the client goes away."""
    task = asyncio.current_task()
    assert task is not None
    is_gone = False

    async def watch() -> None:
        nonlocal is_gone
        while (await receive())["type"] != "http.disconnect":
            pass
        is_gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        await work
    except asyncio.CancelledError:
        if not is_gone:
            raise
        task.uncancel()
    finally:
        watcher.cancel()
