"""The real server for tests of agents, adapters and the runtime, in a thread: gateway, control API and store.

A function of the messages plays the policy; what arrived is kept, as it arrived.

    with ScriptedServer(lambda body: {"content": "42"}) as server:
        server.add_rollout("r1", {"question": "6*7?"})
        ...
        server.calls[0].rollout_id, server.calls[0].agent, server.spans("r1")
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Self, TypeVar

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lightningrl import wire
from lightningrl.control_api import Result
from lightningrl.records import AttemptRecord
from lightningrl.types import RolloutSpec, RolloutState, SamplingSettings, Task
from lightningrl_server.gateway.dialects.responses import parse_responses_request
from lightningrl_server.gateway.settings import GatewaySettings
from lightningrl_testing.live_gateway import LiveGateway, live_gateway
from lightningrl_testing.scripted_engine import ScriptedEngine
from lightningrl_testing.tokenizers import tiny_tokenizer

__all__ = ["RecordedCall", "RecordedSpan", "ScriptedServer"]

Answer = Callable[[dict[str, Any]], "dict[str, Any] | tuple[int, str, str] | Response"]
"""Makes the assistant's message from a request body, which has its `messages` in every dialect.

Also what our gateway would never say: (status, error code, error message), or another provider's whole response.
"""
T = TypeVar("T")

_PLACE: Final = re.compile(r"(?:/api/v1)?/rollouts/([^/]+)/attempts/(\d+)/(.*)")
_SAID: ContextVar[str] = ContextVar("said")
"""The policy's words for the request that is being served."""
_NO_JSON: Final = '{"no": "json"}'
"""The policy's arguments where a test wants some that are no JSON; the answer then has those."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedCall:
    """One request for a completion, as it arrived."""

    rollout_id: str | None
    """None = it came without a rollout that runs, and was refused."""
    attempt: int
    body: dict[str, Any]
    headers: dict[str, str]
    status: int

    @property
    def text(self) -> str:
        """Everything that the messages say."""
        return json.dumps(self.body.get("messages") or self.body.get("input"))

    @property
    def agent(self) -> str | None:
        return self.headers.get("x-lightningrl-agent")

    @property
    def call_id(self) -> str | None:
        return self.headers.get("x-lightningrl-call-id")

    @property
    def span_id(self) -> str | None:
        parent = self.headers.get("traceparent")
        return None if parent is None else parent.split("-")[2]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedSpan:
    """One span that was exported."""

    name: str
    span_id: str
    parent_id: str
    trace_id: str
    attributes: dict[str, str]
    is_error: bool


class ScriptedServer:
    """Server in a thread on a free port of 127.0.0.1; stops on exit."""

    def __init__(self, answer: Answer, *, max_delay_s: float = 0.0, hold_until: int = 0) -> None:
        """Answer no call before `hold_until` attempts have been open at one moment."""
        self.answer = answer
        self.calls: list[RecordedCall] = []
        self.rollout_ids: list[str] = []
        self.open = self.most_open = 0
        """Leased attempts without a result: now, and most at one moment."""
        self._max_delay_s = max_delay_s
        self._hold_until = hold_until
        self._heartbeats: Counter[str] = Counter()
        self._spans: defaultdict[str, list[RecordedSpan]] = defaultdict(list)
        self._random = random.Random(0)  # noqa: S311  delays, not secrets
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="scripted-server", daemon=True)
        self._gateway: LiveGateway
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event

    def __enter__(self) -> Self:
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    @property
    def url(self) -> str:
        return self._gateway.url

    @property
    def run_key(self) -> str:
        return self._gateway.run_key

    def add_rollout(self, rollout_id: str, task_input: Any, *, timeout_s: float = 900.0) -> None:
        """Queue a rollout."""
        task = Task(id=f"task-{rollout_id}", input=task_input)
        spec = RolloutSpec(id=rollout_id, task=task, group_id="g", timeout_s=timeout_s)
        self._ask(self._gateway.store.create_rollouts([spec]))
        self.rollout_ids.append(rollout_id)

    def open_attempt(self, rollout_id: str) -> tuple[int, str, str]:
        """Start an attempt without a worker, where no rollout is queued: (number, base path, scoped key)."""
        attempt = self._ask(self._gateway.attempt(rollout_id=rollout_id))
        self.rollout_ids.append(rollout_id)
        return attempt.attempt, attempt.base_url.removeprefix(self.url), attempt.key

    def attempts(self, rollout_id: str) -> tuple[AttemptRecord, ...]:
        """Return the attempts that have begun."""
        return self._ask(self._gateway.store.rollout(rollout_id)).attempts

    def result(self, rollout_id: str) -> dict[str, Any] | None:
        """Return what the last attempt ended with: `outcome`, `output`, `error`, `duration_s`; None while it runs."""
        last = next(reversed(self.attempts(rollout_id)), None)
        if last is None or last.outcome is None:
            return None
        return {name: getattr(last, name) for name in ("outcome", "output", "error", "duration_s")}

    def state(self, rollout_id: str) -> RolloutState:
        return self._ask(self._gateway.store.rollout(rollout_id)).state

    def cancel(self, rollout_id: str) -> None:
        self._ask(self._gateway.store.cancel([rollout_id]))

    def heartbeats(self, rollout_id: str) -> int:
        return self._heartbeats[rollout_id]

    def spans(self, rollout_id: str) -> list[RecordedSpan]:
        return self._spans[rollout_id]

    async def wait_finished(self, *rollout_ids: str, timeout_s: float = 900.0) -> None:
        """Wait until these rollouts (default: all) have a result."""
        wanted = rollout_ids or tuple(self.rollout_ids)
        finished = await asyncio.to_thread(self._ask, self._gateway.store.wait_finished(wanted, timeout_s))
        if len(finished) < len(wanted):
            raise TimeoutError(f"rollouts did not end within {timeout_s:g} s")

    def _ask(self, question: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(question, self._loop).result()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        engine = ScriptedEngine(tiny_tokenizer(), reply=lambda prompt: _rest(_SAID.get(), prompt), chunk_tokens=64)
        settings = GatewaySettings(sampling={engine.policy: SamplingSettings(max_tokens=8192)})
        with TemporaryDirectory() as folder:
            serving = live_gateway(Path(folder), engine=engine, settings=settings, around=self._around)
            async with serving as self._gateway:
                self._started.set()
                await self._stop.wait()

    def _around(self, app: ASGIApp) -> ASGIApp:
        """Look at what the app is asked and what it answers, from outside."""

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            path = scope.get("path", "")
            place = _PLACE.fullmatch(path)
            rollout_id, number, what = place.groups() if place else (None, "0", path.rpartition("/v1/")[2])
            if scope["type"] != "http" or scope["method"] != "POST":
                await app(scope, receive, send)
                return
            body = await Request(scope, receive).body()
            if what.removeprefix("v1/") in ("chat/completions", "responses", "messages"):
                await self._call(app, (rollout_id, int(number)), body, scope, receive, send)
                return
            if rollout_id is not None and what in ("v1/traces", "result"):
                spans = body if what == "v1/traces" else wire.decode(body, Result).spans
                self._spans[rollout_id] += _spans_of(spans or b"")
            elif what.endswith("/beat"):
                self._heartbeats.update(running for running, _ in json.loads(body).get("running", ()))
            counted = partial(self._count, send) if what in ("leases", "result") else send
            await app(scope, _again(body, receive), counted)

        return serve

    async def _count(self, send: Send, message: Message) -> None:
        """Count open attempts by the answers to results and leases, which are of one part."""
        answer = json.loads(message.get("body") or b"{}")
        self.open += ("task" in answer or "lease" in answer) - ("state" in answer)
        self.most_open = max(self.most_open, self.open)
        await send(message)

    async def _call(
        self, app: ASGIApp, place: tuple[str | None, int], data: bytes, scope: Scope, receive: Receive, send: Send
    ) -> None:
        (rollout_id, attempt), body = place, json.loads(data)
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}

        async def record(message: Message) -> None:
            if message["type"] == "http.response.start":
                status = message["status"]
                known_id = None if status in (401, 403, 409) else rollout_id
                call = RecordedCall(rollout_id=known_id, attempt=attempt, body=body, headers=headers, status=status)
                self.calls.append(call)
            await send(message)

        if rollout_id is None:
            await app(scope, _again(data, receive), record)
            return
        if "messages" not in body:
            body["messages"] = list(parse_responses_request(data).call.messages)
        while self.most_open < self._hold_until:  # noqa: ASYNC110  open_attempt is called from other threads
            await asyncio.sleep(0.01)
        await asyncio.sleep(self._random.random() * self._max_delay_s)
        answer = self.answer(body)
        if isinstance(answer, tuple):
            status, code, text = answer
            answer = JSONResponse({"error": {"message": text, "type": code, "code": code, "param": None}}, status)
        if isinstance(answer, Response):
            await answer(scope, receive, record)
            return
        text, no_json = _written(answer)
        _SAID.set(text)
        await app(scope, _again(data, receive), _BrokenArguments(record, no_json) if no_json else record)


class _BrokenArguments:
    """Sends an answer with arguments that are no JSON."""

    def __init__(self, send: Send, text: str) -> None:
        self._send, self._text = send, text
        self._start: Message = {}
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            return
        self._body += message.get("body", b"")
        if not message.get("more_body"):
            body = self._body.replace(json.dumps(_NO_JSON)[1:-1].encode(), json.dumps(self._text)[1:-1].encode())
            headers = [(name, value) for name, value in self._start["headers"] if name.lower() != b"content-length"]
            await self._send({**self._start, "headers": headers})
            await self._send({**message, "body": body})


def _written(message: dict[str, Any]) -> tuple[str, str]:
    """Return a message as the policy writes it, and its arguments that are no JSON."""
    text, no_json = message.get("content") or "", ""
    for call in message.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        try:
            json.loads(arguments)
        except ValueError:
            arguments, no_json = _NO_JSON, arguments
        text += (
            f'\n<tool_call>\n{{"name": {json.dumps(call["function"]["name"])}, "arguments": {arguments}}}\n</tool_call>'
        )
    return text.lstrip("\n"), no_json


def _rest(text: str, prompt: str) -> str:
    """Return what is left to say where a tool call is forced: its beginning stands at the end of the prompt."""
    lengths = range(len(text), 0, -1) if text.startswith("<tool_call>") else ()
    return text[next((length for length in lengths if prompt.endswith(text[:length])), 0) :]


def _again(body: bytes, receive: Receive) -> Receive:
    """Return a receiver that hands a body that was read to the app, then what comes after it."""
    parts: list[Message] = [{"type": "http.request", "body": body}]

    async def next_part() -> Message:
        return parts.pop() if parts else await receive()

    return next_part


def _spans_of(body: bytes) -> list[RecordedSpan]:
    return [
        RecordedSpan(
            name=span.name,
            span_id=span.span_id.hex(),
            parent_id=span.parent_span_id.hex(),
            trace_id=span.trace_id.hex(),
            attributes={item.key: item.value.string_value for item in span.attributes},
            is_error=span.status.code == 2,
        )
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
