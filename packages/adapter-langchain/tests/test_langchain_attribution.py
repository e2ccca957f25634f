"""Unmodified LangGraph agents, 200 rollouts: every call belongs to its rollout, none to another one, none to nobody."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from lightningrl.runtime.pool import WorkerPool
from lightningrl.testing.scripted_server import ScriptedServer

HERE = Path(__file__).parent
CALLS = {"sync": 2, "stream": 2, "threads": 6, "async": 2, "async_stream": 2}
ROLLOUTS = 200


async def run_rollouts(server: ScriptedServer, folder: Path, *, workers: int, concurrency: int) -> None:
    """200 rollouts, the kinds in turn, run by a pool."""
    for number in range(ROLLOUTS):
        kind = tuple(CALLS)[number % len(CALLS)]
        server.add_rollout(f"{kind}-{number}", {"kind": kind, "text": f"RID={kind}-{number}"}, timeout_s=120)
    pool = WorkerPool(
        server.url,
        server.run_key,
        "graph_agents.py:answer",
        workers=workers,
        concurrency=concurrency,
        adapters=["langchain"],
        base_dir=HERE,
        log_folder=folder,
    )
    async with pool:
        await server.wait_finished(timeout_s=240)


def check_attribution(server: ScriptedServer) -> None:
    """0 wrong, 0 missing: the prompt of each call says whose it is."""
    for call in server.calls:
        assert call.rollout_id == (re.search(r"RID=([\w-]+)", call.text) or [None, None])[1]
        assert call.agent == (re.search(r"ROLE=(\w+)", call.text) or [None, None])[1]
    per_rollout = Counter(call.rollout_id for call in server.calls)
    assert len(per_rollout) == ROLLOUTS
    assert {rid: count for rid, count in per_rollout.items() if count != CALLS[str(rid).rpartition("-")[0]]} == {}
    for rollout_id in per_rollout:
        assert rollout_id is not None
        result = server.result(rollout_id)
        assert result is not None
        assert result["outcome"] == "succeeded", json.dumps(result)
        chats = {span.span_id for span in server.spans(rollout_id) if span.name.startswith("chat")}
        assert chats == {call.span_id for call in server.calls if call.rollout_id == rollout_id}


@pytest.mark.slow
async def test_200_concurrent_rollouts_in_shared_workers_are_attributed_exactly(tmp_path: Path) -> None:
    with ScriptedServer(lambda body: {"content": "one two three"}, max_delay_s=1.0, hold_until=ROLLOUTS) as server:
        await run_rollouts(server, tmp_path, workers=2, concurrency=ROLLOUTS // 2)
        assert server.most_open == ROLLOUTS  # no call was answered before all of them ran
        check_attribution(server)


@pytest.mark.slow
async def test_200_rollouts_in_exclusive_workers_are_attributed_exactly(tmp_path: Path) -> None:
    with ScriptedServer(lambda body: {"content": "one two three"}, max_delay_s=0.02, hold_until=4) as server:
        await run_rollouts(server, tmp_path, workers=4, concurrency=1)
        assert server.most_open == 4
        check_attribution(server)
