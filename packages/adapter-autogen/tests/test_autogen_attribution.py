"""Unmodified AutoGen agents and teams, a crowd of rollouts: every call belongs to its rollout, none to another one,
none to nobody."""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from attribution import Crowd, run_crowd

from lightningrl import conventions
from lightningrl.loading import load_callable
from lightningrl_testing.adapter_conformance import play_tools
from lightningrl_testing.scripted_server import ScriptedServer

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
run = partial(run_crowd, adapter="autogen", base_dir=HERE)


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


def tasks(crowd: Crowd, kinds: dict[str, int]) -> dict[str, dict[str, str]]:
    return {
        name: {"kind": kind, "text": f"RID={name} {TOOL_TEXTS.get(kind, '').replace('NAME', name)}"}
        for name, kind in crowd.names(tuple(kinds)).items()
    }


def check_attribution(server: ScriptedServer, kinds: dict[str, int], crowd: Crowd) -> None:
    """0 wrong, 0 missing: the prompt of each call says whose it is, and the spans agree."""
    for call in server.calls:
        assert call.rollout_id == (re.search(r"RID=([\w-]+)", call.text) or [None, None])[1]
        assert call.agent == (re.search(r"ROLE=(\w+)", call.text) or [None, None])[1]
    per_rollout = Counter(call.rollout_id for call in server.calls)
    assert len(per_rollout) == crowd.rollouts
    assert {rid: count for rid, count in per_rollout.items() if count != kinds[str(rid).rpartition("-")[0]]} == {}
    for rollout_id in per_rollout:
        assert rollout_id is not None
        result = server.result(rollout_id)
        assert result is not None
        assert result["outcome"] == "succeeded", json.dumps(result)
        spans = server.spans(rollout_id)
        chats = {span.span_id for span in spans if span.attributes.get(conventions.OPERATION_NAME) == conventions.CHAT}
        assert chats == {call.span_id for call in server.calls if call.rollout_id == rollout_id}
        assert len({span.trace_id for span in spans if conventions.OPERATION_NAME in span.attributes}) == 1
        tools = [span for span in spans if span.attributes.get(conventions.OPERATION_NAME) == conventions.EXECUTE_TOOL]
        assert len(tools) == (rollout_id.rpartition("-")[0] in TOOL_TEXTS)
        assert all(tool.parent_id in chats for tool in tools)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("agent", "kinds"), [("answer", ASYNC), ("answer_sync", SYNC)], ids=["on-one-loop", "in-threads"]
)
async def test_concurrent_rollouts_are_attributed_exactly(
    tmp_path: Path, crowd: Crowd, agent: str, kinds: dict[str, int]
) -> None:
    with ScriptedServer(play, max_delay_s=1.0, hold_until=crowd.rollouts) as server:
        each = crowd.rollouts // crowd.shared_workers
        await run(
            server,
            tmp_path,
            f"autogen_agents.py:{agent}",
            tasks(crowd, kinds),
            workers=crowd.shared_workers,
            concurrency=each,
        )
        assert server.most_open == crowd.rollouts  # no call was answered before all of them ran
        check_attribution(server, kinds, crowd)


@pytest.mark.slow
async def test_rollouts_in_exclusive_workers_are_attributed_exactly(tmp_path: Path, crowd: Crowd) -> None:
    workers = crowd.exclusive_workers
    with ScriptedServer(play, max_delay_s=0.02, hold_until=workers) as server:
        await run(server, tmp_path, "autogen_agents.py:answer", tasks(crowd, ASYNC), workers=workers, concurrency=1)
        assert server.most_open == workers
        check_attribution(server, ASYNC, crowd)
