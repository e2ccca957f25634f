"""Unmodified agents, 200 rollouts at once: every call belongs to its rollout, none to another one, none to nobody."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from lightningrl.runtime.pool import WorkerPool
from lightningrl.testing.adapter_conformance import play_tools
from lightningrl.testing.scripted_server import ScriptedServer

HERE = Path(__file__).parent
ROLLOUTS = 200
ROLES = {
    "sync": ["draft", "review"],
    "stream": ["draft", "review"],
    "threads": ["draft", "draft", "draft"],
    "handoff": ["triage", "writer"],
    "subagent": ["boss", "boss", "writer", "writer"],
    "async": ["draft", "review"],
    "async_stream": ["draft", "review"],
    "streamed_handoff": ["triage", "writer"],
    "streamed_subagent": ["boss", "boss", "writer", "writer"],
    "guardrail": ["guard", "guarded", "guarded"],
}
ASKED = {"handoff": "TOOL=transfer_to_writer ARGS={}", "subagent": 'TOOL=consult ARGS={"input": "RID=%s one"} ' * 2}


def task(kind: str, rollout_id: str) -> dict[str, str]:
    asked = ASKED.get(kind.removeprefix("streamed_"), "").replace("%s", rollout_id)
    return {"kind": kind, "text": f"RID={rollout_id} {asked}"}


async def run_rollouts(server: ScriptedServer, folder: Path, *, workers: int, concurrency: int) -> None:
    """200 rollouts, the kinds in turn, run by a pool."""
    for number in range(ROLLOUTS):
        kind = tuple(ROLES)[number % len(ROLES)]
        server.add_rollout(f"{kind}-{number}", task(kind, f"{kind}-{number}"), timeout_s=120)
    pool = WorkerPool(
        server.url,
        server.run_key,
        "sdk_agents.py:answer",
        workers=workers,
        concurrency=concurrency,
        adapters=["openai-agents"],
        base_dir=HERE,
        log_folder=folder,
    )
    async with pool:
        await server.wait_finished(timeout_s=270)


def check_attribution(server: ScriptedServer) -> None:
    """0 wrong, 0 missing: the prompt of each call says whose it is."""
    roles: dict[str, Counter[str]] = {}
    for call in server.calls:
        assert call.rollout_id is not None
        assert call.rollout_id == (re.search(r"RID=([\w-]+)", call.text) or [None, None])[1]
        assert call.agent == (re.search(r"ROLE=(\w+)", call.text) or [None, call.agent])[1]
        roles.setdefault(call.rollout_id, Counter())[call.agent or ""] += 1
    assert len(roles) == ROLLOUTS
    assert {rid: dict(made) for rid, made in roles.items() if made != Counter(ROLES[rid.rpartition("-")[0]])} == {}
    for rollout_id in roles:
        result = server.result(rollout_id)
        assert result is not None
        assert result["outcome"] == "succeeded", json.dumps(result)
        chats = {span.span_id for span in server.spans(rollout_id) if span.name.startswith("chat")}
        assert chats == {call.span_id for call in server.calls if call.rollout_id == rollout_id} - {None}


@pytest.mark.slow
@pytest.mark.parametrize("api", ["responses", "chat_completions"])
async def test_200_concurrent_agents_in_shared_workers_are_attributed_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, api: str
) -> None:
    monkeypatch.setenv("API", api)
    with ScriptedServer(play_tools, max_delay_s=1.0, hold_until=ROLLOUTS) as server:
        await run_rollouts(server, tmp_path, workers=2, concurrency=ROLLOUTS // 2)
        assert server.most_open == ROLLOUTS  # no call was answered before all of them ran
        check_attribution(server)


@pytest.mark.slow
async def test_200_agents_in_exclusive_workers_are_attributed_exactly_without_tracing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")
    with ScriptedServer(play_tools, max_delay_s=0.02, hold_until=4) as server:
        await run_rollouts(server, tmp_path, workers=4, concurrency=1)
        assert server.most_open == 4
        check_attribution(server)
