"""Unmodified LangGraph agents, a crowd of rollouts: every call belongs to its rollout, none to another one, none to
nobody."""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from attribution import Crowd, run_crowd

from lightningrl_testing.scripted_server import ScriptedServer

CALLS = {"sync": 2, "stream": 2, "threads": 6, "async": 2, "async_stream": 2}
run = partial(run_crowd, agent="graph_agents.py:answer", adapter="langchain", base_dir=Path(__file__).parent)


def tasks(crowd: Crowd) -> dict[str, dict[str, str]]:
    return {name: {"kind": kind, "text": f"RID={name}"} for name, kind in crowd.names(tuple(CALLS)).items()}


def check_attribution(server: ScriptedServer, crowd: Crowd) -> None:
    """0 wrong, 0 missing: the prompt of each call says whose it is."""
    for call in server.calls:
        assert call.rollout_id == (re.search(r"RID=([\w-]+)", call.text) or [None, None])[1]
        assert call.agent == (re.search(r"ROLE=(\w+)", call.text) or [None, None])[1]
    per_rollout = Counter(call.rollout_id for call in server.calls)
    assert len(per_rollout) == crowd.rollouts
    assert {rid: count for rid, count in per_rollout.items() if count != CALLS[str(rid).rpartition("-")[0]]} == {}
    for rollout_id in per_rollout:
        assert rollout_id is not None
        result = server.result(rollout_id)
        assert result is not None
        assert result["outcome"] == "succeeded", json.dumps(result)
        chats = {span.span_id for span in server.spans(rollout_id) if span.name.startswith("chat")}
        assert chats == {call.span_id for call in server.calls if call.rollout_id == rollout_id}


@pytest.mark.slow
async def test_concurrent_rollouts_in_shared_workers_are_attributed_exactly(tmp_path: Path, crowd: Crowd) -> None:
    with ScriptedServer(
        lambda body: {"content": "one two three"}, max_delay_s=1.0, hold_until=crowd.rollouts
    ) as server:
        each = crowd.rollouts // crowd.shared_workers
        await run(server, tmp_path, tasks=tasks(crowd), workers=crowd.shared_workers, concurrency=each)
        assert server.most_open == crowd.rollouts  # no call was answered before all of them ran
        check_attribution(server, crowd)


@pytest.mark.slow
async def test_rollouts_in_exclusive_workers_are_attributed_exactly(tmp_path: Path, crowd: Crowd) -> None:
    workers = crowd.exclusive_workers
    with ScriptedServer(lambda body: {"content": "one two three"}, max_delay_s=0.02, hold_until=workers) as server:
        await run(server, tmp_path, tasks=tasks(crowd), workers=workers, concurrency=1)
        assert server.most_open == workers
        check_attribution(server, crowd)
