"""Exactness, end to end with the real torch engine, server and SDK: what was sampled is what is stored, recomputed and
trained.

OpenAI SDK ─► server process (gateway, store) ─► engine link ─► RecordingEngine(TorchEngine)
                    └─ trajectories ─► rows ─► learner
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from openai import AsyncOpenAI
from sizes import PATIENCE_S

from lightningrl.backends import EngineInfo, GenerateRequest, TokenChunk
from lightningrl.types import (
    Advantages,
    Outcome,
    RolloutSpec,
    SamplingSettings,
    Task,
    Trajectory,
    TrajectoryGroup,
    Transition,
)
from lightningrl_client.control.client import ServerClient
from lightningrl_credit.samples import build_samples
from lightningrl_server.engines.link import EngineLink
from lightningrl_server.launcher import ServerProcess
from lightningrl_server.settings import PolicySettings, ServerSettings
from lightningrl_torch.backend import TorchBackend

pytestmark = pytest.mark.asyncio(loop_scope="module")

RUN_KEY = "the-run-key"
TURNS = 3


class RecordingEngine:
    """The torch engine, with a list of what it sampled for each request."""

    def __init__(self, backend: TorchBackend) -> None:
        self._engine = backend.engine
        self.chunks: dict[str, list[TokenChunk]] = {}
        self.requests: dict[str, GenerateRequest] = {}

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        self.requests[request.id] = request
        async for chunk in self._engine.generate(request):
            self.chunks.setdefault(request.id, []).append(chunk)
            yield chunk


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """A whole system but for trainer loop and workers."""

    client: ServerClient
    url: str
    backend: TorchBackend
    engine: RecordingEngine
    link: EngineLink

    async def run(self, *names: str, temperature: float = 1.0, max_tokens: int = 12) -> list[Trajectory]:
        """Run agents at the same time that talk in `TURNS` turns; half of them stream."""
        sampling = SamplingSettings(temperature=temperature, max_tokens=max_tokens)
        task = Task(id="task", input="tell me")
        await self.client.create_rollouts(
            [RolloutSpec(id=name, task=task, group_id="group", sampling=sampling) for name in names]
        )
        await asyncio.gather(*(self._act(stream=number % 2 == 1) for number in range(len(names))))
        await self.client.wait(names, PATIENCE_S)  # an agent may have been given another call's rollout
        return list(await self.client.trajectories(names))

    async def _act(self, *, stream: bool) -> None:
        lease = await self.client.lease("test", lease_s=60)
        assert lease is not None
        messages: list[Any] = [{"role": "user", "content": f"{lease.task.input} ({lease.rollout_id})"}]
        async with AsyncOpenAI(base_url=self.url + lease.base_path, api_key=lease.key) as openai:
            for turn in range(TURNS):
                said = await ask(openai, messages, stream=stream)
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"more, {turn}"}]
        await self.client.finish_attempt(lease.rollout_id, lease.attempt, Outcome.SUCCEEDED, output="done")


async def ask(openai: AsyncOpenAI, messages: list[Any], *, stream: bool) -> str:
    if not stream:
        return (await openai.chat.completions.create(model="policy", messages=messages)).choices[
            0
        ].message.content or ""
    parts = await openai.chat.completions.create(model="policy", messages=messages, stream=True)
    return "".join([part.choices[0].delta.content or "" async for part in parts if part.choices])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tiny_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    folder = tmp_path_factory.mktemp("world")
    settings = ServerSettings(
        store_url=f"sqlite:///{folder / 'store.sqlite'}",
        run_key=RUN_KEY,
        policies={"policy": PolicySettings(model=tiny_policy)},
    )
    backend = TorchBackend(policy=str(tiny_policy), name="policy", device="cpu", threads=1, learning_rate=1e-2)
    engine = RecordingEngine(backend)
    try:
        async with (
            ServerProcess(settings, log_path=folder / "server.log") as server,
            ServerClient(server.url, RUN_KEY) as client,
            EngineLink(engine, server.url, RUN_KEY) as link,
        ):
            yield World(client=client, url=server.url, backend=backend, engine=engine, link=link)
    finally:
        backend.close()


def calls_of(trajectories: list[Trajectory]) -> list[Transition]:
    return [call for trajectory in trajectories for call in trajectory.transitions]


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
async def test_the_store_holds_exactly_what_the_engine_sampled(world: World, temperature: float) -> None:
    before = set(world.engine.chunks)
    calls = calls_of(
        await world.run(*(f"stored-{temperature}-{number}" for number in range(8)), temperature=temperature)
    )
    assert {call.id for call in calls} == world.engine.chunks.keys() - before
    assert len(calls) == 8 * TURNS
    for call in calls:
        sampled = world.engine.chunks[call.id]
        assert tuple(call.prompt_ids.tolist()) == world.engine.requests[call.id].prompt_ids
        assert call.completion_ids.tolist() == [token for chunk in sampled for token in chunk.token_ids]
        np.testing.assert_array_equal(
            call.logprobs, np.array([value for chunk in sampled for value in chunk.logprobs], np.float32)
        )
        assert {call.policy_version} == {chunk.policy_version for chunk in sampled}
        assert call.finish_reason is sampled[-1].finish_reason


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
async def test_recomputed_logprobs_agree_within_1e_4(world: World, tmp_path: Path, temperature: float) -> None:
    from transformers import AutoModelForCausalLM

    calls = calls_of(
        await world.run(*(f"recomputed-{temperature}-{number}" for number in range(4)), temperature=temperature)
    )
    world.backend.export(tmp_path / "exported")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    model.eval()
    worst = 0.0
    for call in calls:
        ids = torch.from_numpy(np.concatenate([call.prompt_ids, call.completion_ids])).long()
        with torch.no_grad():
            logits = model(ids[None]).logits[0, len(call.prompt_ids) - 1 : -1]
        logprobs = (logits / (temperature or 1.0)).log_softmax(-1).gather(-1, ids[len(call.prompt_ids) :, None])[:, 0]
        worst = max(worst, float(np.abs(logprobs.numpy() - call.logprobs).max()))
    assert worst < 1e-4


async def test_a_history_that_only_grows_has_no_breaks(world: World) -> None:
    for trajectory in await world.run(*(f"growing-{number}" for number in range(4))):
        first, *rest = trajectory.transitions
        assert first.parent_id is None and not first.is_break
        assert len(rest) == TURNS - 1
        for before, call in zip(trajectory.transitions, rest, strict=False):
            assert call.parent_id == before.id and not call.is_break
            past = [*before.prompt_ids.tolist(), *before.completion_ids.tolist()]
            assert call.prompt_ids.tolist()[: len(past)] == past
    assert (await world.client.status()).counts.breaks == 0


def credit(trajectories: list[Trajectory]) -> Advantages:
    chance = np.random.default_rng(3)
    return tuple(
        tuple(chance.normal(size=len(call.completion_ids)).astype(np.float32) for call in trajectory.transitions)
        for trajectory in trajectories
    )


async def test_rows_per_call_and_merged_rows_give_the_same_gradient(world: World, tiny_policy: Path) -> None:
    trajectories = await world.run(*(f"rows-{number}" for number in range(4)))
    group = TrajectoryGroup(id="group", trajectories=tuple(trajectories))
    advantages = credit(trajectories)
    per_call = build_samples([group], [advantages], rows="call", aggregation="token_mean")
    merged = build_samples([group], [advantages], rows="merged", aggregation="token_mean")
    assert (len(per_call), len(merged)) == (4 * TURNS, 4)
    plain = TorchBackend(policy=str(tiny_policy), device="cpu", threads=1, share_prefixes=False)
    shared = TorchBackend(policy=str(tiny_policy), device="cpu", threads=1, share_prefixes=True)
    try:
        reference = plain.learner.gradients(merged)
        assert distance(plain.learner.gradients(per_call), reference) < 1e-6
        assert distance(shared.learner.gradients(per_call), reference) < 1e-6
        assert distance(shared.learner.gradients(merged), reference) < 1e-6
    finally:
        plain.close()
        shared.close()


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """‖one - other‖ / ‖other‖ over all parameters."""
    assert one.keys() == other.keys()
    difference = sum(float((one[name] - other[name]).double().square().sum()) for name in other)
    size = sum(float(gradient.double().square().sum()) for gradient in other.values())
    assert size > 0
    return float(np.sqrt(difference / size))


async def test_calls_during_a_weight_update_wait_and_are_answered(world: World) -> None:
    trajectories = await world.run("learned-0", "learned-1")
    version = world.backend.engine.info.version
    group = TrajectoryGroup(id="group", trajectories=tuple(trajectories))
    samples = build_samples([group], [credit(trajectories)], rows="merged")
    known = set(world.engine.chunks)
    before = asyncio.create_task(world.run("early-0", "early-1", max_tokens=100))
    await until(lambda: any(len(chunks) for name, chunks in world.engine.chunks.items() if name not in known))
    await world.link.hold()
    sampled = len(world.engine.chunks)
    during = [asyncio.create_task(world.run(f"late-{number}")) for number in range(6)]
    await asyncio.sleep(0.3)
    await asyncio.to_thread(world.backend.learn, samples)
    assert len(world.engine.chunks) == sampled, "nothing is sampled while weights change"
    assert (await world.client.status()).policies[0].held
    await world.link.release(world.backend.engine.info.version)
    late = calls_of([trajectory for task in during for trajectory in await task])
    assert {call.policy_version for call in late} == {version + 1}
    assert len(late) == 6 * TURNS
    early = calls_of(await before)
    assert len(early) == 2 * TURNS
    assert {call.policy_version for call in early} == {version, version + 1}
    for call in (*early, *late):
        assert {chunk.policy_version for chunk in world.engine.chunks[call.id]} == {call.policy_version}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.002)
