"""One request at an attempt's end: its result, its spans, the next lease. However often it is sent, each of them counts
once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from sizes import PATIENCE_S
from starlette.types import Receive, Scope, Send

from lightningrl import control_api as api
from lightningrl import wire
from lightningrl.errors import ServerError
from lightningrl.keys import worker_key
from lightningrl.records import Lease, WorkerState
from lightningrl.types import Outcome, RolloutState, Trajectory
from lightningrl_client.control.blocking import ControlClient
from lightningrl_client.control.client import ServerClient
from lightningrl_client.runtime.pool import WorkerPool
from lightningrl_server.app import create_app
from lightningrl_server.engines.registry import EngineRegistry
from lightningrl_server.launcher import ServerProcess
from lightningrl_server.settings import ServerSettings
from lightningrl_server.store import SqlStore
from lightningrl_testing.live_gateway import LiveGateway, live_gateway
from lightningrl_testing.loopback import serving
from lightningrl_testing.store_conformance import leased, make_call, make_spec

RUN_KEY = "the-run-key"
THEN = api.ThenLease(worker_id="w", lease_s=60.0)
TOOL = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "sql"}
RESULT = "/api/v1/rollouts/a/attempts/1/result"


def make_spans(*told: dict[str, str], evaluation: float | None = None) -> bytes:
    """An export of one span for each of `told`, its attributes; `evaluation` is said of the last."""
    request = ExportTraceServiceRequest()
    scope = request.resource_spans.add().scope_spans.add()
    for number, attributes in enumerate(told, 1):
        span = scope.spans.add(
            name="span", span_id=bytes([number] * 8), trace_id=b"\1" * 16, start_time_unix_nano=10**18
        )
        for name, value in attributes.items():
            span.attributes.add(key=name).value.string_value = value
        if evaluation is not None and number == len(told):
            evaluate(span, evaluation)
    return bytes(request.SerializeToString())


def evaluate(span: Span, score: float) -> None:
    event = span.events.add(name="gen_ai.evaluation.result")
    event.attributes.add(key="gen_ai.evaluation.name").value.string_value = "style"
    event.attributes.add(key="gen_ai.evaluation.score.value").value.double_value = score


def make_result(
    spans: bytes | None = None, then: api.ThenLease | None = None, outcome: Outcome = Outcome.SUCCEEDED
) -> api.Result:
    return api.Result(outcome=outcome, output=42, spans=spans, then=then)


async def send(url: str, result: api.Result, key: str = worker_key(RUN_KEY)) -> httpx.Response:
    """As a worker sends it, once."""
    async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
        return await http.post(RESULT, content=wire.encode(result), headers={"authorization": f"Bearer {key}"})


def kept(answer: httpx.Response) -> api.ResultKept:
    assert answer.status_code == 200, answer.text
    return wire.decode(answer.content, api.ResultKept)


async def report(url: str, lease: Lease, result: api.Result) -> Lease | None:
    """As a worker sends it, however often."""
    client = ControlClient(url, worker_key(RUN_KEY))
    try:
        return await asyncio.to_thread(client.report, lease, result)
    finally:
        client.close()


async def trajectory(control: LiveGateway, rollout_id: str = "a") -> Trajectory:
    return (await control.store.trajectories([rollout_id]))[0]


@pytest.fixture
async def control(tmp_path: Path) -> AsyncIterator[LiveGateway]:
    async with live_gateway(tmp_path, attach=False, max_body_bytes=20_000) as control:
        yield control


async def lease_of_two(control: LiveGateway) -> Lease:
    """That of `a`; `b` waits."""
    await control.store.create_rollouts([make_spec("a"), make_spec("b")])
    lease = await control.store.lease("w", 60.0, exclusive=True)
    assert lease is not None and lease.rollout_id == "a"
    return lease


# ---------------------------------------------------------------------- once


async def test_a_result_brings_its_spans_and_takes_the_next_lease(control: LiveGateway) -> None:
    await lease_of_two(control)
    answer = kept(await send(control.url, make_result(make_spans(TOOL), THEN)))
    assert answer.state is RolloutState.SUCCEEDED and answer.lease is not None
    assert (answer.lease.rollout_id, answer.lease.attempt, answer.lease.task.answer) == ("b", 1, None)
    assert await control.store.authorise("b", 1, answer.lease.key) is not None
    assert [(call.name, call.agent) for call in (await trajectory(control)).tool_calls] == [("sql", None)]


async def test_where_nothing_is_queued_a_result_is_answered_at_once_without_a_lease(control: LiveGateway) -> None:
    await control.store.create_rollouts([make_spec("a")])
    await leased(control.store)
    answer = await send(control.url, make_result(None, THEN))
    assert answer.json() == {"state": "succeeded"}


async def test_a_result_that_is_repeated_adds_no_spans_and_takes_no_second_lease(control: LiveGateway) -> None:
    await lease_of_two(control)
    await control.store.create_rollouts([make_spec("c")])
    result = make_result(make_spans(TOOL, evaluation=0.5), THEN)
    first, again = kept(await send(control.url, result)), kept(await send(control.url, result))
    assert first.lease is not None and first.lease.rollout_id == "b"
    assert again == api.ResultKept(state=RolloutState.SUCCEEDED)
    assert len((await trajectory(control)).tool_calls) == 1
    assert [(one.rollout_id, one.attempt) for one in await control.store.running("w")] == [("b", 1)]
    assert (await control.store.rollout("c")).state is RolloutState.QUEUED


async def test_two_results_of_one_attempt_at_the_same_moment_take_one_lease(control: LiveGateway) -> None:
    await lease_of_two(control)
    await control.store.create_rollouts([make_spec("c")])
    answers = await asyncio.gather(*(send(control.url, make_result(make_spans(TOOL), THEN)) for _ in range(4)))
    assert sorted(one.rollout_id for one in (kept(answer).lease for answer in answers) if one is not None) == ["b"]
    assert len((await trajectory(control)).tool_calls) == 1
    assert len(await control.store.running("w")) == 1


@pytest.mark.parametrize("lost", ["answer", "request"])
async def test_a_worker_whose_answer_is_lost_gets_the_lease_by_asking_for_it(control: LiveGateway, lost: str) -> None:
    lease = await lease_of_two(control)
    async with losing_the_first(control.url, lost) as (url, seen):
        client = ControlClient(url, worker_key(RUN_KEY))
        found = await asyncio.to_thread(client.report, lease, make_result(make_spans(TOOL), THEN))
        assert seen["requests"] == 2
        if found is None:
            found = await asyncio.to_thread(lambda: client.lease(worker_id="w", wait_s=0.0, lease_s=60.0))
        client.close()
    assert found is not None and found.rollout_id == "b"
    assert await control.store.authorise("b", found.attempt, found.key) is not None
    assert [(one.rollout_id, one.attempt) for one in await control.store.running("w")] == [("b", found.attempt)]
    assert await control.store.finish_attempt("b", found.attempt, Outcome.SUCCEEDED) is RolloutState.SUCCEEDED
    assert len((await trajectory(control)).tool_calls) == 1


@asynccontextmanager
async def losing_the_first(url: str, lost: str) -> AsyncIterator[tuple[str, Counter[str]]]:
    """The server behind a line that breaks once: after the server has answered, or before it has heard anything."""
    seen: Counter[str] = Counter()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                body = await reader.readexactly(length)
                seen["requests"] += 1
                if seen["requests"] == 1 and lost == "request":
                    break
                to, back = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
                back.write(head + body)
                answer = await to.readuntil(b"\r\n\r\n")
                answer += await to.readexactly(int(answer.lower().split(b"content-length:")[1].split(b"\r\n")[0]))
                back.close()
                if seen["requests"] == 1:
                    break
                writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", seen


async def test_a_lease_whose_worker_went_before_its_answer_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with live_gateway(tmp_path, attach=False) as control:
        await lease_of_two(control)
        finish, has_gone = control.store.finish_and_lease, asyncio.Event()

        async def finish_late(*place: Any) -> Any:
            done = await finish(*place)
            await has_gone.wait()
            return done

        monkeypatch.setattr(control.store, "finish_and_lease", finish_late)
        reader, writer = await asyncio.open_connection(urlsplit(control.url).hostname, urlsplit(control.url).port)
        body = wire.encode(make_result(None, THEN))
        head = f"POST {RESULT} HTTP/1.1\r\nhost: h\r\nauthorization: Bearer {RUN_KEY}\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        while (await control.store.rollout("a")).state is not RolloutState.SUCCEEDED:
            await asyncio.sleep(0.01)
        writer.close()
        await asyncio.sleep(0.1)
        has_gone.set()
        while (await control.store.rollout("b")).state is not RolloutState.QUEUED:
            await asyncio.sleep(0.01)
        assert (await control.store.rollout("b")).attempts == ()
        del reader


@pytest.mark.slow
async def test_a_server_that_is_killed_over_results_keeps_each_once_and_leases_each_rollout(tmp_path: Path) -> None:
    """Workers report and go on while the server is killed three times: every rollout succeeds, with its one tool
    call."""
    settings = ServerSettings(store_url=f"sqlite:///{tmp_path}/store.db", run_key=RUN_KEY)
    names = [f"r{number}" for number in range(120)]
    async with (
        ServerProcess(settings, log_path=tmp_path / "server.log") as server,
        ServerClient(server.url, RUN_KEY) as client,
    ):
        await client.create_rollouts([make_spec(name, max_attempts=1) for name in names])
        ran: Counter[str] = Counter()

        def work(number: int) -> None:
            line, lease = ControlClient(server.url, worker_key(RUN_KEY)), None
            then = api.ThenLease(worker_id=f"w{number}", lease_s=60.0)
            while (lease := lease or line.lease(worker_id=then.worker_id, wait_s=0.0, lease_s=60.0)) is not None:
                ran[lease.rollout_id] += 1
                lease = line.report(lease, make_result(make_spans(TOOL, evaluation=0.5), then))
            line.close()

        working = [asyncio.create_task(asyncio.to_thread(work, number)) for number in range(4)]
        for so_many in (20, 50, 80):
            while len(await client.wait(names, 0.2, so_many)) < so_many:
                pass
            assert server.pid is not None
            os.kill(server.pid, signal.SIGKILL)
            await server.wait_ended()
            await server.restart()
        await asyncio.gather(*working)
        assert set(await client.wait(names, 60.0)) == set(names)
        found = [
            one for start in range(0, len(names), 40) for one in await client.trajectories(names[start : start + 40])
        ]
    assert {one.outcome for one in found} == {Outcome.SUCCEEDED}
    assert {len(one.tool_calls) for one in found} == {1}
    assert {tuple(one.reported.items()) for one in found} == {(("style", 0.5),)}
    assert sum(ran.values()) <= len(names) + 3 * 4, "leases whose answers were lost are given again; no others are"


# ---------------------------------------------------------------------- spans that come with a result


async def test_an_evaluation_in_the_spans_is_kept_with_the_result(control: LiveGateway) -> None:
    lease = await lease_of_two(control)
    await control.store.append_call(make_call(lease, "c0", [1], [2], span_id="01" * 8))
    waiting = asyncio.create_task(control.store.wait_finished(["a"], 60.0))
    await send(control.url, make_result(make_spans({}, evaluation=0.25)))
    assert await waiting == ("a",)
    assert (await trajectory(control)).transitions[0].reported == {"style": 0.25}


async def test_spans_that_cannot_be_read_are_refused_with_their_result_and_nothing_has_ended(
    control: LiveGateway,
) -> None:
    await lease_of_two(control)
    answer = await send(control.url, make_result(b"\xff\xff\xff", THEN))
    assert answer.status_code == 400
    sentence = answer.json()["error"]["message"]
    assert sentence == (
        "the spans of the result: the body is no OTLP ExportTraceServiceRequest; export with OTLP over HTTP, protobuf or JSON; "
        "the attempt has not ended: send its result without them"
    )
    assert [(await control.store.rollout(name)).state for name in "ab"] == [RolloutState.RUNNING, RolloutState.QUEUED]


async def test_a_worker_whose_spans_cannot_be_read_loses_them_alone(
    control: LiveGateway, caplog: pytest.LogCaptureFixture
) -> None:
    lease = await lease_of_two(control)
    with caplog.at_level(logging.WARNING, "lightningrl"):
        after = await report(control.url, lease, make_result(b"\xff\xff\xff", THEN))
    assert after is not None and after.rollout_id == "b"
    assert ((await trajectory(control)).outcome, (await trajectory(control)).output) == (Outcome.SUCCEEDED, 42)
    assert "rollout a: its spans are lost" in caplog.text and "no OTLP" in caplog.text


async def test_spans_that_are_too_large_beside_a_result_go_by_themselves(
    control: LiveGateway, caplog: pytest.LogCaptureFixture
) -> None:
    lease = await lease_of_two(control)
    spans = make_spans(
        {**TOOL, "gen_ai.tool.call.arguments": "x" * 16_000}
    )  # as base64 with the result, more than 20,000 bytes
    with caplog.at_level(logging.WARNING, "lightningrl"):
        after = await report(control.url, lease, make_result(spans, THEN))
    assert after is not None and after.rollout_id == "b"
    assert [call.name for call in (await trajectory(control)).tool_calls] == ["sql"]
    assert not caplog.records


async def test_spans_of_an_attempt_that_is_over_are_not_kept(control: LiveGateway) -> None:
    await lease_of_two(control)
    await control.store.cancel(["a"])
    answer = await send(control.url, make_result(make_spans(TOOL, evaluation=1.0), THEN))
    assert answer.status_code == 409 and "is over (cancelled)" in answer.json()["error"]["message"]
    ended = await trajectory(control)
    assert (ended.tool_calls, dict(ended.reported)) == ((), {})
    assert (await control.store.rollout("b")).state is RolloutState.QUEUED


# ---------------------------------------------------------------------- who may have a lease


async def test_an_attempts_key_reports_and_leases_nothing(control: LiveGateway) -> None:
    lease = await lease_of_two(control)
    answer = await send(control.url, make_result(None, THEN), lease.key)
    assert answer.status_code == 401
    assert [(await control.store.rollout(name)).state for name in "ab"] == [RolloutState.RUNNING, RolloutState.QUEUED]
    assert kept(await send(control.url, make_result(), lease.key)) == api.ResultKept(state=RolloutState.SUCCEEDED)


async def test_a_worker_that_is_to_stop_is_given_no_more(control: LiveGateway) -> None:
    await lease_of_two(control)
    async with ServerClient(control.url, RUN_KEY) as client:
        await client.ask(api.BEAT, api.WorkerBeat(pid=1, host="h", state=WorkerState.READY), wid="w")
        await client.ask(api.STOP_WORKERS, api.WorkerPrefix(prefix="w"))
    assert kept(await send(control.url, make_result(None, THEN))).lease is None
    assert (await control.store.rollout("b")).state is RolloutState.QUEUED


@pytest.mark.slow
async def test_a_worker_asks_for_a_lease_only_where_its_report_brought_none(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("def answer(task): return task")
    store = await SqlStore.open(f"sqlite:///{tmp_path}/store.db")
    app = create_app(store, EngineRegistry(), run_key=RUN_KEY)
    requests: Counter[str] = Counter()
    waits = asyncio.Event()

    async def counting(scope: Scope, receive: Receive, send: Send) -> None:
        requests[scope["path"].rpartition("/")[2]] += 1
        if requests["leases"] == 2:
            waits.set()
        await app(scope, receive, send)

    names = [f"r{number}" for number in range(12)]
    await store.create_rollouts([make_spec(name) for name in names])
    async with (
        serving(counting, ws="none") as url,
        WorkerPool(url, RUN_KEY, "agent.py:answer", workers=1, base_dir=tmp_path, log_folder=tmp_path),
    ):
        assert set(await store.wait_finished(names, PATIENCE_S)) == set(names)
        await asyncio.wait_for(waits.wait(), PATIENCE_S)
    assert {one.outcome for one in await store.trajectories(names)} == {Outcome.SUCCEEDED}
    assert (requests["result"], requests["leases"]) == (12, 2), "one at first, one that waits where the queue is empty"
    await store.close()


async def test_a_line_that_was_interrupted_before_it_was_open_asks_for_nothing(tmp_path: Path) -> None:
    async with live_gateway(tmp_path, attach=False) as control:
        await control.store.create_rollouts([make_spec("a")])
        with contextlib.closing(ControlClient(control.url, control.run_key)) as client:
            client.interrupt()
            with pytest.raises(ServerError, match="interrupted"):
                await asyncio.to_thread(client.lease, worker_id="w", wait_s=PATIENCE_S, lease_s=60.0)
        assert (await control.store.rollout("a")).state is RolloutState.QUEUED


async def test_a_server_of_another_version_is_told_in_a_sentence_by_trainer_and_worker(tmp_path: Path) -> None:
    async def later(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b'[{"renamed": 1}]'})

    async with serving(later) as url, ServerClient(url, RUN_KEY) as client:
        with pytest.raises(ServerError, match=f"server '{url}' answered .*; is it of the same version"):
            await client.status()
        with pytest.raises(ServerError, match="is it of the same version"):
            await client.trajectories(["r1"])
        with (
            contextlib.closing(ControlClient(url, RUN_KEY)) as line,
            pytest.raises(ServerError, match="is it of the same version"),
        ):
            await asyncio.to_thread(line.lease, worker_id="w", wait_s=0.0, lease_s=60.0)
