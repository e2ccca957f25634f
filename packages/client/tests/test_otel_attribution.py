"""A crowd of agents that only OpenTelemetry describes: each call belongs to its rollout and role, none to another."""

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
from lightningrl_testing.adapter_conformance import play_tools
from lightningrl_testing.scripted_server import RecordedSpan, ScriptedServer

run = partial(run_crowd, adapter="opentelemetry", base_dir=Path(__file__).parent)
ADD = 'TOOL=add ARGS={"a": 1, "b": 2}'


def play(body: dict[str, Any]) -> dict[str, Any]:
    return play_tools(body) if body.get("tools") else {"content": "one two three"}


def make_tasks(crowd: Crowd, texts: dict[str, str]) -> dict[str, str]:
    return {name: f"RID={name} {texts[kind].replace('NAME', name)}" for name, kind in crowd.names(tuple(texts)).items()}


async def run_at_once(server: ScriptedServer, folder: Path, crowd: Crowd, agent: str, texts: dict[str, str]) -> None:
    each = crowd.rollouts // crowd.shared_workers
    tasks = make_tasks(crowd, texts)
    await run(server, folder, f"otel_agents.py:{agent}", tasks, workers=crowd.shared_workers, concurrency=each)


def role_of(spans: list[RecordedSpan], span_id: str | None) -> str | None:
    """The nearest agent on the way up, as the server finds it."""
    by_id = {span.span_id: span for span in spans}
    while span_id in by_id:
        span = by_id[span_id]
        if conventions.AGENT_NAME in span.attributes:
            return span.attributes[conventions.AGENT_NAME]
        span_id = span.parent_id
    return None


def check(
    server: ScriptedServer,
    crowd: Crowd,
    calls: int | dict[str, int],
    *,
    told_early: bool = True,
    may_miss: bool = False,
) -> None:
    """0 wrong, 0 missing. `told_early`: the role goes along with the request, and is not only found by the spans.

    `may_miss`: a call may have no role and no span; it must still not have another one's.
    """
    assert len(server.calls) > 0
    per_rollout = Counter(call.rollout_id for call in server.calls)
    assert len(per_rollout) == crowd.rollouts
    for rollout_id, count in per_rollout.items():
        assert rollout_id is not None
        assert count == (calls if isinstance(calls, int) else calls[rollout_id.rpartition("-")[0]])
        result = server.result(rollout_id)
        assert result is not None and result["outcome"] == "succeeded", json.dumps(result)
    spans = {rollout_id: server.spans(str(rollout_id)) for rollout_id in per_rollout}
    for call in server.calls:
        assert call.rollout_id == (re.search(r"RID=([\w-]+)", call.text) or [None, None])[1]
        role = (re.search(r"ROLE=(\w+)", call.text) or [None, None])[1]
        assert role_of(spans[call.rollout_id], call.span_id) in ({role, None} if may_miss else {role})
        assert call.agent in ({role} if told_early else {role, None})
    spanned = [(call.rollout_id, call.span_id) for call in server.calls if call.span_id is not None or not may_miss]
    assert len(set(spanned)) == len(spanned)  # each call has a span of its own


def tools_of(server: ScriptedServer) -> Counter[tuple[str, str]]:
    tools = [
        span
        for rollout_id in server.rollout_ids
        for span in server.spans(rollout_id)
        if conventions.TOOL_STATUS in span.attributes
    ]
    return Counter((tool.attributes[conventions.TOOL_NAME], tool.attributes[conventions.TOOL_STATUS]) for tool in tools)


@pytest.mark.slow
async def test_openinference_on_one_loop(tmp_path: Path, crowd: Crowd) -> None:
    with ScriptedServer(play, max_delay_s=0.5, hold_until=crowd.rollouts) as server:
        await run_at_once(server, tmp_path, crowd, "openinference_openai", {"openai": ""})
        check(server, crowd, 4)


@pytest.mark.slow
async def test_genai_spans_in_threads(tmp_path: Path, crowd: Crowd) -> None:
    with ScriptedServer(play, max_delay_s=0.5, hold_until=crowd.rollouts) as server:
        texts = {kind: f"KIND={kind} " for kind in ("sync", "stream", "threads")}
        await run_at_once(server, tmp_path, crowd, "genai", texts)
        check(server, crowd, {"sync": 2, "stream": 2, "threads": 6})


@pytest.mark.slow
async def test_pydantic_ai_with_an_agent_as_a_tool(tmp_path: Path, crowd: Crowd) -> None:
    with ScriptedServer(play, max_delay_s=0.5, hold_until=crowd.rollouts) as server:
        texts = {
            "consult": 'TOOL=consult ARGS={"question": "RID=NAME why?"}',
            "add": f"{ADD} " + ADD.replace('"a": 1', '"a": "x"'),
        }
        await run_at_once(server, tmp_path, crowd, "pydantic_ai", texts)
        check(server, crowd, {"consult": 3, "add": 2})
        assert tools_of(server) == dict.fromkeys(
            (("consult", "ok"), ("add", "ok"), ("add", "invalid_arguments")), crowd.rollouts // 2
        )


@pytest.mark.slow
async def test_openinference_by_callbacks_of_langgraph(tmp_path: Path, crowd: Crowd) -> None:
    """It names a node when its span ends, and sets no span in the context that makes the request."""
    with ScriptedServer(play, max_delay_s=0.5, hold_until=crowd.rollouts) as server:
        texts = {"add": ADD, "fail": "TOOL=fail ARGS={}"}
        await run_at_once(server, tmp_path, crowd, "openinference_langgraph", texts)
        check(server, crowd, 2, told_early=False)
        assert tools_of(server) == dict.fromkeys((("add", "ok"), ("fail", "error")), crowd.rollouts // 2)


@pytest.mark.slow
async def test_callbacks_of_nodes_that_run_at_once_are_not_mistaken_for_each_other(
    tmp_path: Path, crowd: Crowd
) -> None:
    """Nothing says which span a request belongs to: no role is better than a wrong one."""
    with ScriptedServer(play, max_delay_s=0.5, hold_until=crowd.rollouts) as server:
        await run_at_once(server, tmp_path, crowd, "openinference_parallel", {"parallel": ""})
        check(server, crowd, 3, told_early=False, may_miss=True)


@pytest.mark.slow
async def test_one_rollout_at_a_time_in_each_worker(tmp_path: Path, crowd: Crowd) -> None:
    workers = crowd.exclusive_workers
    with ScriptedServer(play, max_delay_s=0.02, hold_until=workers) as server:
        tasks = make_tasks(crowd, {"openai": ""})
        await run(server, tmp_path, "otel_agents.py:openinference_openai", tasks, workers=workers, concurrency=1)
        check(server, crowd, 4)
