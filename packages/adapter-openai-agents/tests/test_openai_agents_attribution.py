"""Unmodified agents, a crowd of rollouts at once: every call belongs to its rollout, none to another one, none to
nobody."""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from attribution import Crowd, run_crowd

from lightningrl_testing.adapter_conformance import play_tools
from lightningrl_testing.scripted_server import ScriptedServer

run = partial(run_crowd, agent="sdk_agents.py:answer", adapter="openai-agents", base_dir=Path(__file__).parent)
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


def tasks(crowd: Crowd) -> dict[str, dict[str, str]]:
    return {
        name: {"kind": kind, "text": f"RID={name} {asked(kind, name)}"}
        for name, kind in crowd.names(tuple(ROLES)).items()
    }


def asked(kind: str, rollout_id: str) -> str:
    return ASKED.get(kind.removeprefix("streamed_"), "").replace("%s", rollout_id)


def check_attribution(server: ScriptedServer, crowd: Crowd) -> None:
    """0 wrong, 0 missing: the prompt of each call says whose it is."""
    roles: dict[str, Counter[str]] = {}
    for call in server.calls:
        assert call.rollout_id is not None
        assert call.rollout_id == (re.search(r"RID=([\w-]+)", call.text) or [None, None])[1]
        assert call.agent == (re.search(r"ROLE=(\w+)", call.text) or [None, call.agent])[1]
        roles.setdefault(call.rollout_id, Counter())[call.agent or ""] += 1
    silent = set(server.rollout_ids) - roles.keys()
    assert silent == set(), [server.result(rollout_id) for rollout_id in silent]
    assert len(roles) == crowd.rollouts
    for rollout_id in roles:
        result = server.result(rollout_id)
        assert result is not None
        assert result["outcome"] == "succeeded", json.dumps(result)
    assert {rid: dict(made) for rid, made in roles.items() if made != Counter(ROLES[rid.rpartition("-")[0]])} == {}
    for rollout_id in roles:
        chats = {span.span_id for span in server.spans(rollout_id) if span.name.startswith("chat")}
        assert chats == {call.span_id for call in server.calls if call.rollout_id == rollout_id} - {None}


@pytest.mark.slow
@pytest.mark.parametrize("api", ["responses", "chat_completions"])
async def test_concurrent_agents_in_shared_workers_are_attributed_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crowd: Crowd, api: str
) -> None:
    monkeypatch.setenv("API", api)
    with ScriptedServer(play_tools, max_delay_s=1.0, hold_until=crowd.rollouts) as server:
        each = crowd.rollouts // crowd.shared_workers
        await run(server, tmp_path, tasks=tasks(crowd), workers=crowd.shared_workers, concurrency=each)
        assert server.most_open == crowd.rollouts  # no call was answered before all of them ran
        check_attribution(server, crowd)


@pytest.mark.slow
async def test_agents_in_exclusive_workers_are_attributed_exactly_without_tracing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crowd: Crowd
) -> None:
    monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")
    workers = crowd.exclusive_workers
    with ScriptedServer(play_tools, max_delay_s=0.02, hold_until=workers) as server:
        await run(server, tmp_path, tasks=tasks(crowd), workers=workers, concurrency=1)
        assert server.most_open == workers
        check_attribution(server, crowd)
