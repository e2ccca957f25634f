"""A small real server for tests of agents, adapters and the runtime: the control API in memory, and a model that a function plays.

It speaks messages, not tokens: what is under test is who called, not what was sampled (`live_gateway` has the real thing).

    with ScriptedServer(answer=lambda body: {"role": "assistant", "content": "42"}) as server:
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
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, cast

import uvicorn
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from lightningrl import wire
from lightningrl.keys import worker_key
from lightningrl.server.access import Access
from lightningrl.server.worker_routes import worker_routes
from lightningrl.server.workers import Workers
from lightningrl.store.protocol import Lease, RunningAttempt, Store
from lightningrl.testing.loopback import LoopbackServer
from lightningrl.testing.scripted_responses import respond, responses_messages, stream_response_events
from lightningrl.types import RolloutMode, Task

__all__ = ["RecordedCall", "RecordedSpan", "ScriptedServer"]

RUN_KEY = "run-key"
Answer = Callable[[dict[str, Any]], dict[str, Any] | tuple[int, str, str]]
"""Request body → assistant message, or (status, error code, error message)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedCall:
    """One request for a completion, as it arrived."""

    rollout_id: str | None
    """None = it came without a rollout, and was refused."""
    attempt: int
    body: dict[str, Any]
    headers: dict[str, str]
    status: int
    arrived_at: float

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


@dataclass
class Attempt:
    """What the server knows of one attempt."""

    rollout_id: str
    attempt: int
    key: str
    worker_id: str = ""
    result: dict[str, Any] | None = None
    heartbeats: int = 0
    spans: list[RecordedSpan] = field(default_factory=list[RecordedSpan])


class ScriptedServer:
    """Starts in a thread on a free port of 127.0.0.1; stops on exit."""

    def __init__(self, answer: Answer, *, max_delay_s: float = 0.0, max_attempts: int = 1, hold_until: int = 0) -> None:
        """`hold_until`: answer no call before so many attempts have been open at one moment."""
        self.answer = answer
        self.run_key = RUN_KEY
        self.calls: list[RecordedCall] = []
        self.cancelled: set[str] = set()
        self.finished_at: dict[str, float] = {}
        self.most_open = 0
        """Most leased attempts without a result at one moment."""
        self.open = 0
        """Leased attempts without a result."""
        self._workers = Workers()
        self._max_delay_s = max_delay_s
        self._max_attempts = max_attempts
        self._hold_until = hold_until
        self._attempts: dict[str, list[Attempt]] = {}
        self._tasks: dict[str, tuple[Any, float]] = {}
        self._queue: deque[str] = deque()
        self._random = random.Random(0)  # noqa: S311  delays, not secrets
        store = cast("Store", self)
        rollout = "/rollouts/{rid}/attempts/{n:int}"
        app = Starlette(
            routes=[
                Route("/api/v1/leases", self._lease, methods=["POST"]),
                *worker_routes(store, Access(store, RUN_KEY), self._workers, longest_wait_s=3600.0),
                Route(f"/api/v1{rollout}/result", self._result, methods=["POST"]),
                Route(f"/api/v1{rollout}/v1/traces", self._traces, methods=["POST"]),
                Route(f"{rollout}/v1/chat/completions", self._chat, methods=["POST"]),
                Route(f"{rollout}/v1/responses", self._responses, methods=["POST"]),
                Route("/v1/chat/completions", self._refuse, methods=["POST"]),
                Route("/v1/responses", self._refuse, methods=["POST"]),
            ]
        )
        self._server = LoopbackServer(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off"))
        self._thread = threading.Thread(target=self._server.run, name="scripted-server", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        while not self._server.started:
            time.sleep(0.002)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.should_exit = True
        self._server.force_exit = True
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"

    def add_rollout(self, rollout_id: str, task_input: Any, *, timeout_s: float = 900.0) -> None:
        """Queue a rollout."""
        self._tasks[rollout_id] = (task_input, timeout_s)
        self._attempts[rollout_id] = []
        self._queue.append(rollout_id)

    def open_attempt(self, rollout_id: str, worker_id: str = "") -> tuple[int, str, str]:
        """Start an attempt, by default without a worker: (number, base path, scoped key)."""
        attempts = self._attempts.setdefault(rollout_id, [])
        attempts.append(Attempt(rollout_id, len(attempts), f"key-{uuid.uuid4().hex}", worker_id))
        return len(attempts) - 1, f"/rollouts/{rollout_id}/attempts/{len(attempts) - 1}/v1", attempts[-1].key

    def result(self, rollout_id: str, attempt: int = -1) -> dict[str, Any] | None:
        """What the attempt ended with: `outcome`, `output`, `error`, `duration_s`; None while it runs."""
        attempts = self._attempts[rollout_id]
        return attempts[attempt].result if attempts else None

    def heartbeats(self, rollout_id: str) -> int:
        return sum(attempt.heartbeats for attempt in self._attempts[rollout_id])

    def spans(self, rollout_id: str) -> list[RecordedSpan]:
        return [span for attempt in self._attempts[rollout_id] for span in attempt.spans]

    async def wait_finished(self, *rollout_ids: str, timeout_s: float = 900.0) -> None:
        """Returns when these rollouts (default: all) have a result."""
        async with asyncio.timeout(timeout_s):
            while not all(self.result(rid) is not None for rid in rollout_ids or tuple(self._tasks)):  # noqa: ASYNC110  another thread's state
                await asyncio.sleep(0.01)

    async def _lease(self, request: Request) -> Response:
        if request.headers.get("authorization", "").removeprefix("Bearer ") != worker_key(RUN_KEY):
            return JSONResponse({"error": "wrong key"}, 401)
        body = await request.json()
        deadline = time.monotonic() + body["wait_s"]
        while not self._queue:
            if time.monotonic() > deadline or await request.is_disconnected():
                return Response(status_code=204)
            await asyncio.sleep(0.005)
        rid = self._queue.popleft()
        number, _, key = self.open_attempt(rid, body["worker_id"])
        self._workers.note_lease(body["worker_id"])
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        task_input, timeout_s = self._tasks[rid]
        lease = Lease(
            rollout_id=rid,
            attempt=number,
            task=Task(id=f"task-{rid}", input=task_input),
            mode=RolloutMode.TRAIN,
            timeout_s=timeout_s,
            key=key,
            expires_at=time.time() + 60.0,
        )
        return Response(wire.encode(lease), media_type="application/json")

    def _find(self, request: Request) -> Attempt | None:
        """The attempt of the URL, if the key opens it."""
        attempts = self._attempts.get(request.path_params["rid"], [])
        number = request.path_params["n"]
        if number >= len(attempts):
            return None
        key = request.headers.get("authorization", "").removeprefix("Bearer ")
        return attempts[number] if key in {attempts[number].key, RUN_KEY, worker_key(RUN_KEY)} else None

    async def heartbeat(self, rollout_id: str, attempt: int, lease_s: float) -> bool:
        """As a store's."""
        self._attempts[rollout_id][attempt].heartbeats += 1
        return rollout_id not in self.cancelled

    async def running(self, workers: str) -> tuple[RunningAttempt, ...]:
        """As a store's."""
        running = [one for attempts in self._attempts.values() for one in attempts if one.result is None and one.worker_id]
        return tuple(
            RunningAttempt(
                rollout_id=one.rollout_id, attempt=one.attempt, worker_id=one.worker_id, timeout_s=self._tasks[one.rollout_id][1]
            )
            for one in running
            if one.worker_id.startswith(workers)
        )

    async def _result(self, request: Request) -> Response:
        attempt = self._find(request)
        if attempt is None:
            return JSONResponse({"error": "wrong key"}, 403)
        if attempt.result is None:
            attempt.result = await request.json()
            self.open -= 1
            self.finished_at[attempt.rollout_id] = time.perf_counter()
            if attempt.result["outcome"] == "infrastructure_error" and len(self._attempts[attempt.rollout_id]) < self._max_attempts:
                self._queue.append(attempt.rollout_id)
        return JSONResponse({"state": "succeeded"})

    async def _traces(self, request: Request) -> Response:
        attempt = self._find(request)
        if attempt is None:
            return JSONResponse({"error": "wrong key"}, 403)
        message = ExportTraceServiceRequest.FromString(await request.body())
        attempt.spans += [
            RecordedSpan(
                name=span.name,
                span_id=span.span_id.hex(),
                parent_id=span.parent_span_id.hex(),
                trace_id=span.trace_id.hex(),
                attributes={item.key: item.value.string_value for item in span.attributes},
                is_error=span.status.code == 2,
            )
            for resource in message.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        return JSONResponse({})

    async def _refuse(self, request: Request) -> Response:
        self._record(request, None, await request.json(), 403)
        return error_response(403, "no_rollout", "this call belongs to no rollout")

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        message = await self._play(request, body)
        if isinstance(message, Response):
            return message
        return (
            StreamingResponse(stream_events(body, message), media_type="text/event-stream")
            if body.get("stream")
            else completion(body, message)
        )

    async def _responses(self, request: Request) -> Response:
        """The responses dialect; the answer function and the record see `messages` as well."""
        body = await request.json()
        body["messages"] = responses_messages(body)
        message = await self._play(request, body)
        if isinstance(message, Response):
            return message
        return (
            StreamingResponse(stream_response_events(body, message), media_type="text/event-stream")
            if body.get("stream")
            else respond(body, message)
        )

    async def _play(self, request: Request, body: dict[str, Any]) -> dict[str, Any] | Response:
        """The scripted message, or why there is none."""
        attempt = self._find(request)
        if attempt is None:
            self._record(request, None, body, 403)
            return error_response(403, "wrong_key", "this key does not open this attempt")
        while self.most_open < self._hold_until:  # noqa: ASYNC110  open_attempt is called from other threads
            await asyncio.sleep(0.01)
        await asyncio.sleep(self._random.random() * self._max_delay_s)
        message = self.answer(body)
        if isinstance(message, tuple):
            self._record(request, attempt, body, message[0])
            return error_response(*message)
        self._record(request, attempt, body, 200)
        return message

    def _record(self, request: Request, attempt: Attempt | None, body: dict[str, Any], status: int) -> None:
        self.calls.append(
            RecordedCall(
                rollout_id=None if attempt is None else attempt.rollout_id,
                attempt=0 if attempt is None else attempt.attempt,
                body=body,
                headers=dict(request.headers),
                status=status,
                arrived_at=time.perf_counter(),
            )
        )


def error_response(status: int, code: str, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": code, "code": code, "param": None}}, status)


def completion(body: dict[str, Any], message: dict[str, Any]) -> Response:
    choice = {"index": 0, "message": {"role": "assistant", "content": None, **message}, "finish_reason": finish_reason(message)}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return JSONResponse(
        {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
            "choices": [choice],
            "usage": usage,
        }
    )


async def stream_events(body: dict[str, Any], message: dict[str, Any]) -> AsyncIterator[str]:
    head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": "chat.completion.chunk", "created": 0, "model": body["model"]}
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": piece} for piece in re.findall(r"\S+\s*", message.get("content") or "")]
    deltas += [{"tool_calls": [{"index": index, **call}]} for index, call in enumerate(message.get("tool_calls") or ())]
    for delta in deltas:
        yield f"data: {json.dumps({**head, 'choices': [{'index': 0, 'delta': delta, 'finish_reason': None}]})}\n\n"
        await asyncio.sleep(0)
    yield f"data: {json.dumps({**head, 'choices': [{'index': 0, 'delta': {}, 'finish_reason': finish_reason(message)}]})}\n\n"
    yield "data: [DONE]\n\n"


def finish_reason(message: dict[str, Any]) -> str:
    return "tool_calls" if message.get("tool_calls") else "stop"
