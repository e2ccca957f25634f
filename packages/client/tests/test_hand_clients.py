"""Agents on plain clients, unchanged, through worker, server and store: each call under its rollout and its role."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from attribution import Crowd

from lightningrl.types import Outcome, RolloutState, Trajectory
from lightningrl_testing.scripted_engine import ScriptedEngine
from lightningrl_testing.tokenizers import tiny_tokenizer
from lightningrl_testing.whole_path import WholePath, repeated_calls, running_services

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
HERE = Path(__file__).parent
SYNC = (
    *("openai", "openai_stream", "responses", "anthropic", "anthropic_stream", "httpx", "httpx_stream", "httpx2"),
    *("requests", "requests_stream", "requests_messages"),
)
ASYNC = (
    *("openai", "openai_stream", "responses", "anthropic", "anthropic_stream"),
    *("httpx", "httpx_stream", "aiohttp", "aiohttp_stream"),
)


def check(trajectory: Trajectory) -> None:
    """Four calls, each of which says itself where it belongs."""
    assert trajectory.outcome is Outcome.SUCCEEDED, trajectory.error
    assert len(trajectory.transitions) == 4
    tokenizer = tiny_tokenizer()
    for call in trajectory.transitions:
        text = tokenizer.decode(call.prompt_ids.tolist())
        assert re.findall(r"RID=([\w-]+)", text) == [trajectory.rollout_id]
        assert re.findall(r"ROLE=([\w/]*)", text) == [call.agent or ""]
        assert len(call.completion_ids) == len(call.logprobs) > 0
    assert sorted(call.agent or "" for call in trajectory.transitions) == [
        "",
        "team/critic",
        "team/critic",
        "team/planner",
    ]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def path(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[WholePath]:
    """One server for all of these tests."""
    engine = ScriptedEngine(tiny_tokenizer(), reply=lambda _: "fine, thanks")
    async with running_services(tmp_path_factory.mktemp("path"), engine=engine) as path:
        yield path


@pytest.mark.parametrize(("agent", "kinds"), [("act", SYNC), ("act_async", ASYNC)], ids=["sync", "async"])
async def test_every_plain_client_is_recorded_with_no_code_changes(
    path: WholePath, agent: str, kinds: tuple[str, ...]
) -> None:
    async with path.workers(f"hand_agents.py:{agent}", base_dir=HERE):
        trajectories = await path.run({f"{agent}-{kind}": {"client": kind, "rid": f"{agent}-{kind}"} for kind in kinds})
        branches = [await path.branch(trajectory, 2) for trajectory in trajectories]
    for branch, trajectory in zip(branches, trajectories, strict=True):
        assert (branch.outcome, repeated_calls(branch, trajectory.transitions)) == (Outcome.SUCCEEDED, 2), branch.error
    for trajectory in trajectories:
        check(trajectory)
        assert trajectory.output == ["fine, thanks"] * 4


@pytest.mark.parametrize(("agent", "kinds"), [("act", SYNC), ("act_async", ASYNC)], ids=["threads", "asyncio"])
async def test_many_rollouts_at_once_never_mix(
    path: WholePath, crowd: Crowd, agent: str, kinds: tuple[str, ...]
) -> None:
    names = [f"{agent}-{number}" for number in range(crowd.rollouts)]
    tasks = {name: {"client": kinds[number % len(kinds)], "rid": name} for number, name in enumerate(names)}
    workers, each = crowd.shared_workers, crowd.rollouts // crowd.shared_workers
    async with path.workers(f"hand_agents.py:{agent}", base_dir=HERE, workers=workers, concurrency=each):
        path.engine.pause()
        running = asyncio.create_task(path.run(tasks))
        while (await path.client.status()).counts.states.get(RolloutState.RUNNING, 0) < crowd.rollouts:
            await asyncio.sleep(0.1)
        path.engine.resume()
        trajectories = await running
    assert len(trajectories) == crowd.rollouts
    for trajectory in trajectories:
        check(trajectory)
