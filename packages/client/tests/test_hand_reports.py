"""Rewards and tool outcomes that an agent reports of itself: in Python, and by a POST from anything that speaks
HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from sizes import PATIENCE_S

from lightningrl import report_reward, role, tool
from lightningrl.types import Outcome, ToolStatus, Trajectory
from lightningrl_client.attribution.role import current_role
from lightningrl_credit.plugin import lightningrl_intermediate_rewards
from lightningrl_credit.rewards import ReportedReward, ReportedTurnReward, ToolStatusReward
from lightningrl_server.app import create_app
from lightningrl_server.engines.registry import EngineRegistry
from lightningrl_server.store import SqlStore
from lightningrl_testing.groups import make_group
from lightningrl_testing.store_conformance import make_call, make_spec
from lightningrl_testing.whole_path import WholePath, whole_path

HERE = Path(__file__).parent


def asks(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'


@pytest.fixture(params=[1, 8], ids=["exclusive", "concurrent"])
async def path(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[WholePath]:
    """One worker that runs each of the agents, one rollout or several at a time."""
    async with whole_path(tmp_path, "hand_reporting.py:act_as", base_dir=HERE, concurrency=request.param) as path:
        yield path


async def run(path: WholePath, agent: str) -> Trajectory:
    (trajectory,) = await path.run({agent: {"agent": agent, "question": "what is 20 + 22?"}})
    return trajectory


@pytest.mark.slow
async def test_what_agents_report_belongs_to_their_rollouts_calls_and_roles(path: WholePath, tmp_path: Path) -> None:
    await a_hand_written_tool_loop_gets_automatic_intermediate_rewards(path)
    await a_tool_that_is_no_tool_call_is_the_outcome_of_the_answer_that_asked(path)
    await a_post_below_the_base_url_says_the_same(path)
    await a_report_on_a_call_that_never_was_fails_the_attempt_with_a_sentence(path)
    await a_report_after_the_end_of_its_rollout_is_nobodys_and_the_log_says_so(path, tmp_path / "worker-0.log")
    if "exclusive" in tmp_path.name:
        await a_process_that_the_agent_starts_reports_for_the_same_rollout(path)


async def a_hand_written_tool_loop_gets_automatic_intermediate_rewards(path: WholePath) -> None:
    path.engine.enqueue(asks('{"a": 20, "b": 22}'), asks('{"c": 1}'), "it is 42")
    trajectory = await run(path, "act")
    assert trajectory.outcome is Outcome.SUCCEEDED, trajectory.error
    assert [call.agent for call in trajectory.transitions] == ["adder"] * 3
    assert [call.reported for call in trajectory.transitions] == [{"brief": 0.5}] * 3
    good, bad = trajectory.tool_calls
    assert (good.name, good.arguments, good.result, good.status, good.agent) == (
        "add",
        '{"a": 20, "b": 22}',
        "42",
        ToolStatus.OK,
        "adder",
    )
    assert (bad.status, bad.error_type) == (ToolStatus.ERROR, "TypeError")
    assert bad.result == "add() got an unexpected keyword argument 'c'", "as the agent went on with"
    assert [good.transition_id, bad.transition_id] == [call.id for call in trajectory.transitions[:2]]
    assert ToolStatusReward(ok=0.1, error=-0.1)(trajectory) == [0.1, -0.1, None]
    assert ReportedReward(name="polite")(trajectory.task, trajectory.output, trajectory) == 0.25
    assert ReportedReward(name="rude")(trajectory.task, trajectory.output, trajectory) is None


async def a_tool_that_is_no_tool_call_is_the_outcome_of_the_answer_that_asked(path: WholePath) -> None:
    trajectories = await path.run(
        {f"r{number}": {"agent": "act_async", "question": f"RID=r{number}"} for number in range(8)}
    )
    for trajectory in trajectories:
        assert trajectory.outcome is Outcome.SUCCEEDED, trajectory.error
        agents = {call.id: call.agent for call in trajectory.transitions}
        assert {(agents[one.transition_id or ""], one.agent, one.status) for one in trajectory.tool_calls} == {
            ("writer-0", "writer-0", ToolStatus.OK),
            ("writer-1", "writer-1", ToolStatus.INVALID_ARGUMENTS),
        }
        assert all(one.duration_s >= 0.009 for one in trajectory.tool_calls)
        assert trajectory.reported == {"count": 2.0}


async def a_post_below_the_base_url_says_the_same(path: WholePath) -> None:
    trajectory = await run(path, "act_by_post")
    assert trajectory.outcome is Outcome.SUCCEEDED, trajectory.error
    (call,), (told,) = trajectory.transitions, trajectory.tool_calls
    assert trajectory.reported == {"polite": 1.0, "odd": None}
    assert (told.transition_id, told.status, told.duration_s) == (call.id, ToolStatus.ERROR, 0.5)
    assert (told.arguments, told.result) == ('{"q": 1}', "[1, 2]")


async def a_process_that_the_agent_starts_reports_for_the_same_rollout(path: WholePath) -> None:
    trajectory = await run(path, "act_in_a_child")
    assert trajectory.reported == {"child": 2.0}, trajectory.error
    (told,) = trajectory.tool_calls
    assert (told.name, told.agent, told.result, told.transition_id) == ("grep", "child", "found", None)


async def a_report_on_a_call_that_never_was_fails_the_attempt_with_a_sentence(path: WholePath) -> None:
    trajectory = await run(path, "act_on_no_call")
    assert trajectory.outcome is Outcome.AGENT_ERROR
    assert "has no call 'chatcmpl-nonsense'; give the id of an answer" in (trajectory.error or "")


async def a_report_after_the_end_of_its_rollout_is_nobodys_and_the_log_says_so(path: WholePath, log: Path) -> None:
    over = log.with_name("the-rollout-is-over")
    await path.run_one("act_late", {"agent": "act_late", "question": str(over)})
    over.touch()
    async with asyncio.timeout(PATIENCE_S):
        while "nobody gets" not in log.read_text():
            await asyncio.sleep(0.01)
    assert "rewards: no rollout runs here, so nobody gets {'rewards': {'late': 1.0}}" in log.read_text()


BAD: list[tuple[str, Any, int, str]] = [
    ("rewards", {"rewards": {"good": "very"}}, 400, "reward 'good' is 'very'; send a number from -1e9 to 1e9, or null"),
    ("rewards", {"reward": 1}, 400, "Object contains unknown field `reward`"),
    ("rewards", {"rewards": {}, "value": 1}, 400, "Object contains unknown field `value`"),
    ("rewards", b'{"rewards": {"good": NaN}}', 400, "reward 'good' is 'nan'; send a number"),
    ("rewards", b"hello", 400, "it is not JSON"),
    ("rewards", {"rewards": {"good": 1}, "call": "chatcmpl-x"}, 404, "has no call 'chatcmpl-x'"),
    (
        "tool_calls",
        {"tool_calls": [{"name": "f"}]},
        400,
        "Object missing required field `status` - at `$.tool_calls[0]`",
    ),
    ("tool_calls", {"tool_calls": [{"name": "f", "status": "bad"}]}, 400, "'ok', 'error', 'unknown_tool'"),
    (
        "tool_calls",
        {"tool_calls": [{"name": "f", "status": "ok", "call": "chatcmpl-x"}]},
        404,
        "has no call 'chatcmpl-x'",
    ),
    ("tool_calls", b"x" * 300_000, 413, "larger than"),
]


@pytest.mark.parametrize(("path", "body", "status", "says"), BAD)
async def test_a_bad_report_is_refused_with_a_sentence_and_leaves_nothing(
    tmp_path: Path, path: str, body: Any, status: int, says: str
) -> None:
    store = await SqlStore.open(f"sqlite:///{tmp_path}/store.db")
    app = create_app(store, EngineRegistry(), run_key="run", max_body_bytes=200_000)
    await store.create_rollouts([make_spec("a")])
    lease = await store.lease("w", 60.0)
    assert lease is not None
    await store.append_call(make_call(lease, "c0", [1, 2], [3]))
    content: dict[str, Any] = {"content": body if isinstance(body, bytes) else json.dumps(body)}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://server") as http:
        url, key = f"{lease.base_path}/{path}", {"x-api-key": lease.key, "content-type": "application/json"}
        answer = await http.post(url, headers=key, **content)
        assert (answer.status_code, says in answer.json()["error"]["message"]) == (status, True), answer.text
        assert (await http.post(url, **content)).status_code in (400, 401, 413)
        good = (
            {"rewards": {"good": 1}, "call": "chatcmpl-c0"}
            if path == "rewards"
            else {"tool_calls": [{"name": "f", "status": "ok"}]}
        )
        assert (await http.post(url, json=good, headers={"authorization": "Bearer wrong"})).status_code == 401
        assert (await http.post(url, json=good, headers=key)).status_code == 204
        await store.finish_attempt("a", 1, Outcome.SUCCEEDED, "x")
        late = await http.post(url, json=good, headers=key)
        assert late.status_code == 409 and "is over" in late.text
    (trajectory,) = await store.trajectories(["a"])
    assert trajectory.reported == {}
    assert len(trajectory.tool_calls) == (path == "tool_calls")
    await store.close()


async def test_a_repeated_tool_call_id_is_kept_once(tmp_path: Path) -> None:
    store = await SqlStore.open(f"sqlite:///{tmp_path}/store.db")
    app = create_app(store, EngineRegistry(), run_key="run")
    await store.create_rollouts([make_spec("a")])
    lease = await store.lease("w", 60.0)
    assert lease is not None
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://server") as http:
        for _ in range(2):
            body = {"tool_calls": [{"name": "f", "status": "ok", "tool_call_id": "call_1"}]}
            answer = await http.post(
                f"{lease.base_path}/tool_calls", json=body, headers={"authorization": f"Bearer {lease.key}"}
            )
            assert answer.status_code == 204
    await store.finish_attempt("a", 1, Outcome.SUCCEEDED, "x")
    ((told,),) = [one.tool_calls for one in await store.trajectories(["a"])]
    assert told.id == "call_1"
    await store.close()


async def test_a_report_on_a_call_decodes_no_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long attempt has megabytes of tokens."""
    store = await SqlStore.open(f"sqlite:///{tmp_path}/store.db")
    app = create_app(store, EngineRegistry(), run_key="run")
    await store.create_rollouts([make_spec("a")])
    lease = await store.lease("w", 60.0)
    assert lease is not None
    await store.append_call(make_call(lease, "c0", [1, 2], [3]))
    reports: dict[str, Any] = {
        "rewards": {"rewards": {"good": 1}, "call": "chatcmpl-c0"},
        "tool_calls": {"tool_calls": [{"name": "f", "status": "ok", "call": "chatcmpl-c0"}]},
    }

    def decode(columns: Any) -> Any:
        raise AssertionError(f"{len(columns)} columns of tokens were decoded")

    with monkeypatch.context() as patch:
        patch.setattr("lightningrl_server.store.reader.decode_many", decode)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://server") as http:
            for path, body in reports.items():
                answer = await http.post(
                    f"{lease.base_path}/{path}", json=body, headers={"authorization": f"Bearer {lease.key}"}
                )
                assert answer.status_code == 204, answer.text
    await store.finish_attempt("a", 1, Outcome.SUCCEEDED, "x")
    (trajectory,) = await store.trajectories(["a"])
    assert trajectory.transitions[0].reported == {"good": 1.0}
    assert trajectory.tool_calls[0].transition_id == "c0"
    await store.close()


def test_outside_of_a_rollout_an_agent_works_as_ever_and_the_log_knows(
    monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "https://api.openai.com/v1")
    with caplog.at_level(logging.INFO, "lightningrl_client"), role("writer"), tool("search", {"q": 1}) as seen:
        seen.result = object()
        report_reward("good", 1.0)
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO"]
    assert caplog.records[0].getMessage() == "rewards: not in a rollout, so nobody gets {'rewards': {'good': 1.0}}"


@pytest.mark.parametrize("value", [np.float32(0.5), np.int64(1), np.float64(0.25), 1, True])
def test_a_number_of_numpy_is_a_number(value: Any, caplog: Any) -> None:
    with caplog.at_level(logging.INFO):
        report_reward("good", value)
    assert str({"good": float(value)}) in caplog.text, "as JSON can say it"


def test_what_a_tool_raises_goes_on_its_way() -> None:
    with pytest.raises(TimeoutError), tool("search") as seen:
        raise TimeoutError
    assert (seen.status, seen.error_type) == (ToolStatus.TIMEOUT, "TimeoutError")
    with pytest.raises(asyncio.CancelledError), tool("search") as seen:
        raise asyncio.CancelledError
    assert (seen.status, seen.error_type) == (ToolStatus.UNKNOWN, "CancelledError"), "its rollout's time was over"
    with pytest.raises(ValueError, match="'fine' is none of 'ok', 'error'"), tool("search") as seen:
        seen.status = "fine"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "high", [1]])
def test_a_reward_that_is_no_number_is_refused_where_it_is_reported(value: Any) -> None:
    with pytest.raises(ValueError, match=r"reward 'good' is .*, no finite number"):
        report_reward("good", value)
    with pytest.raises(ValueError, match="is no name"):
        report_reward("", 1.0)


def test_roles_nest_and_follow_the_context() -> None:
    def in_a_thread() -> str | None:
        with role("inner"):
            return current_role()

    async def in_tasks() -> list[str | None]:
        async def named(name: str) -> str | None:
            with role(name):
                await asyncio.sleep(0.01)
                return current_role()

        return [*await asyncio.gather(named("a"), named("b"), asyncio.to_thread(in_a_thread)), current_role()]

    with role("team"):
        assert asyncio.run(in_tasks()) == ["team/a", "team/b", "team/inner", "team"]
    assert current_role() is None
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(in_a_thread).result() == "inner"
    with pytest.raises(ValueError, match="role '' is no name"), role(""):
        pass


async def test_a_stream_that_is_left_unread_takes_no_role_along() -> None:
    async def chunks() -> Any:
        with role("writer"):
            yield current_role()
            yield "never read"

    stream = chunks()
    assert await asyncio.create_task(anext(stream)) == "writer"
    await stream.aclose()
    assert current_role() is None


def test_what_was_reported_of_calls_is_a_turn_reward_where_the_recipe_says_so() -> None:
    (trajectory,) = make_group((0.5, None, None), rewards=(1.0,)).trajectories
    first, second, third = trajectory.transitions
    calls = (replace(first, reported={"brief": 0.5, "kind": 0.25}), replace(second, reported={"brief": None}), third)
    told = replace(trajectory, transitions=calls)
    assert ReportedTurnReward()(told) == [0.75, None, None]
    assert ReportedTurnReward(name="kind")(told) == [0.25, None, None]
    (plugin,) = [plugin for plugin in lightningrl_intermediate_rewards() if plugin.name == "reported"]
    assert isinstance(plugin.factory(), ReportedTurnReward)
