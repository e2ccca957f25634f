"""Unmodified AutoGen agents and teams, 200 rollouts: every call belongs to its rollout, none to another one, none to nobody."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lightningrl.loading import load_callable
from lightningrl.runtime.pool import WorkerPool
from lightningrl.testing.adapter_conformance import play_tools
from lightningrl.testing.scripted_server import ScriptedServer
from lightningrl.tracing import semconv

HERE = Path(__file__).parent
ASYNC = {"async": 2, "async_stream": 2, "round_robin": 3, "selector": 4, "swarm": 3, "reflect_stream": 2}
SHARED = {"shared": 3, "shared_selector": 4}
AS_TOOLS = {"consult": 3}
SYNC = {"sync": 2, "stream": 2, "threads": 6}
TOOL_TEXTS = {
    "swarm": "TOOL=transfer_to_helper ARGS={}",
    "reflect_stream": 'TOOL=add ARGS={"a": 1, "b": 2}',
    "consult": 'TOOL=helper ARGS={"task": "RID=NAME why?"}',
}
ROLLOUTS = 200


def is_there(module: str, name: str) -> bool:
    try:
        return hasattr(__import__(module, fromlist=[name]), name)
    except ImportError:
        return False


if load_callable("autogen_agents.py:takes_runtimes", HERE)():
    ASYNC |= SHARED
if is_there("autogen_agentchat.tools", "AgentTool"):
    ASYNC |= AS_TOOLS


def play(body: dict[str, Any]) -> dict[str, Any]:
    if "ROLE=SelectorGroupChatManager" in str(body["messages"]):
        return {"content": "writer"}
    return play_tools(body) if body.get("tools") else {"content": "one two three"}


async def run_rollouts(server: ScriptedServer, folder: Path, agent: str, kinds: dict[str, int], *, workers: int, concurrency: int) -> None:
    """200 rollouts, the kinds in turn, run by a pool."""
    for number in range(ROLLOUTS):
        kind = tuple(kinds)[number % len(kinds)]
        name = f"{kind}-{number}"
        text = f"RID={name} {TOOL_TEXTS.get(kind, '').replace('NAME', name)}"
        server.add_rollout(name, {"kind": kind, "text": text}, timeout_s=200)
    pool = WorkerPool(
        server.url,
        server.run_key,
        f"autogen_agents.py:{agent}",
        workers=workers,
        concurrency=concurrency,
        adapters=["autogen"],
        base_dir=HERE,
        log_folder=folder,
    )
    async with pool:
        await server.wait_finished(timeout_s=280)


def check_attribution(server: ScriptedServer, kinds: dict[str, int]) -> None:
    """0 wrong, 0 missing: the prompt of each call says whose it is, and the spans agree."""
    for call in server.calls:
        assert call.rollout_id == (re.search(r"RID=([\w-]+)", call.text) or [None, None])[1]
        assert call.agent == (re.search(r"ROLE=(\w+)", call.text) or [None, None])[1]
    per_rollout = Counter(call.rollout_id for call in server.calls)
    assert len(per_rollout) == ROLLOUTS
    assert {rid: count for rid, count in per_rollout.items() if count != kinds[str(rid).rpartition("-")[0]]} == {}
    for rollout_id in per_rollout:
        assert rollout_id is not None
        result = server.result(rollout_id)
        assert result is not None
        assert result["outcome"] == "succeeded", json.dumps(result)
        spans = server.spans(rollout_id)
        chats = {span.span_id for span in spans if span.attributes.get(semconv.OPERATION_NAME) == semconv.CHAT}
        assert chats == {call.span_id for call in server.calls if call.rollout_id == rollout_id}
        assert len({span.trace_id for span in spans if semconv.OPERATION_NAME in span.attributes}) == 1
        tools = [span for span in spans if span.attributes.get(semconv.OPERATION_NAME) == semconv.EXECUTE_TOOL]
        assert len(tools) == (rollout_id.rpartition("-")[0] in TOOL_TEXTS)
        assert all(tool.parent_id in chats for tool in tools)


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_200_concurrent_rollouts_on_one_loop_are_attributed_exactly(tmp_path: Path) -> None:
    with ScriptedServer(play, max_delay_s=1.0, hold_until=ROLLOUTS) as server:
        await run_rollouts(server, tmp_path, "answer", ASYNC, workers=2, concurrency=ROLLOUTS // 2)
        assert server.most_open == ROLLOUTS  # no call was answered before all of them ran
        check_attribution(server, ASYNC)


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_200_concurrent_rollouts_in_threads_are_attributed_exactly(tmp_path: Path) -> None:
    with ScriptedServer(play, max_delay_s=1.0, hold_until=ROLLOUTS) as server:
        await run_rollouts(server, tmp_path, "answer_sync", SYNC, workers=2, concurrency=ROLLOUTS // 2)
        assert server.most_open == ROLLOUTS
        check_attribution(server, SYNC)


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_200_rollouts_in_exclusive_workers_are_attributed_exactly(tmp_path: Path) -> None:
    with ScriptedServer(play, max_delay_s=0.02, hold_until=4) as server:
        await run_rollouts(server, tmp_path, "answer", ASYNC, workers=4, concurrency=1)
        assert server.most_open == 4
        check_attribution(server, ASYNC)
