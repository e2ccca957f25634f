"""A run that cannot learn says why, a mended one goes on, and whoever looks on stops nothing: the loop over a real
server."""

from __future__ import annotations

import asyncio
import io
import json
import re
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn
from rich.console import Console
from sizes import PATIENCE_S

from lightningrl.backends import EngineInfo, LearnReport
from lightningrl.errors import LightningError
from lightningrl.plugins import hookimpl, load_plugins
from lightningrl.protocols import StepReport
from lightningrl.recipe import Recipe
from lightningrl.records import Lease, RolloutFilter
from lightningrl.types import Outcome, RolloutMode, Sample, Task, Trajectory, TrajectoryGroup
from lightningrl_client.control.client import ServerClient
from lightningrl_credit import IdenticalAssignment
from lightningrl_server.app import create_app
from lightningrl_server.engines.link import EngineLink
from lightningrl_server.engines.registry import EngineRegistry
from lightningrl_server.store import SqlStore
from lightningrl_testing.groups import make_trajectory, make_transition
from lightningrl_testing.live_gateway import live_gateway
from lightningrl_testing.store_conformance import make_call
from lightningrl_training.build import Parts
from lightningrl_training.checkpoints import LoopState
from lightningrl_training.commands.train import _describe
from lightningrl_training.doctor.agent_checks import calls_made
from lightningrl_training.doctor.findings import Verdict
from lightningrl_training.explanations import explain_cache, explain_silence, explain_timeouts
from lightningrl_training.loop import Trainer
from lightningrl_training.policies import Policies, RunningPolicy
from lightningrl_training.progress import LineProgress
from lightningrl_training.run_folder import RunFolder
from lightningrl_training.start import OpenRun
from lightningrl_training.tasks import plan_group, plan_validation

DATA = """
def tasks():
    return [{"id": f"t{number}", "input": number} for number in range(8)]

def held_out():
    return [{"id": f"v{number}", "input": 100 + number} for number in range(2)]

def right(task, output, trajectory):
    return output

def answer(number):
    return number
"""
Agent = Callable[[SqlStore, Lease], Awaitable[None]]


async def call(store: SqlStore, lease: Lease) -> None:
    await store.append_call(make_call(lease, f"{lease.rollout_id}-{lease.attempt}", [1, 2], [3, 4], policy="policy"))


async def finish(store: SqlStore, lease: Lease, output: Any) -> None:
    await store.finish_attempt(lease.rollout_id, lease.attempt, Outcome.SUCCEEDED, output)


async def mixed(store: SqlStore, lease: Lease) -> None:
    """Right every other time."""
    await call(store, lease)
    await finish(store, lease, float(int(lease.rollout_id[-1]) % 2))


async def always_wrong(store: SqlStore, lease: Lease) -> None:
    await call(store, lease)
    await finish(store, lease, 0.0)


async def silent(store: SqlStore, lease: Lease) -> None:
    """Asks no model."""
    await finish(store, lease, 1.0)


async def broken(store: SqlStore, lease: Lease) -> None:
    await call(store, lease)
    await store.finish_attempt(lease.rollout_id, lease.attempt, Outcome.AGENT_ERROR, error="KeyError: 'oops'")


async def broken_at_times(store: SqlStore, lease: Lease) -> None:
    """The first of two raises; the other is right."""
    if lease.rollout_id == "v000000-0000":
        await broken(store, lease)
    else:
        await call(store, lease)
        await finish(store, lease, 1.0)


async def late(store: SqlStore, lease: Lease) -> None:
    await store.finish_attempt(
        lease.rollout_id, lease.attempt, Outcome.TIMEOUT, error="the agent ran longer than its time limit"
    )


class Backend:
    """Counts steps on rows with an advantage."""

    serves_while_learning = False

    def __init__(self) -> None:
        self.version = 0
        self.saving: Callable[[], None] = lambda: None

    @property
    def engine(self) -> Any:
        return SimpleNamespace(info=EngineInfo(policy="policy", version=self.version, context_length=64))

    def learn(self, samples: list[Sample]) -> LearnReport:
        taught = [sample for sample in samples if sample.advantages.any()]
        self.version += bool(taught)
        return LearnReport(policy_version=self.version, tokens=2 * len(taught), seconds=0.0)

    def save(self, folder: Path) -> None:
        self.saving()
        folder.mkdir()


class Link:
    """Holds nothing; the engine is slow."""

    call_speed: float | None = 4.0

    async def hold(self) -> None: ...

    async def release(self, version: int) -> None: ...


class Scene:
    """A run folder and its store, over which one trainer after the other runs."""

    def __init__(self, folder: Path, store: SqlStore, client: ServerClient) -> None:
        self.folder = folder
        self.store = store
        self.client = client
        self.agent: Agent = mixed
        self.plugins = load_plugins()
        self.backend = Backend()
        self.logged: list[Mapping[str, float]] = []
        self.screen = io.StringIO()
        self.work = 0

    def recipe(self, **tables: Any) -> Recipe:
        (self.folder / "reasons_tasks.py").write_text(DATA, encoding="utf-8")
        loop = {"steps": 2, "tasks_per_step": 2, "group_size": 2, "checkpoint_every": 1, **tables.pop("loop", {})}
        return Recipe.model_validate(
            {
                "agent": "reasons_tasks.py:answer",
                "tasks": {"train": "reasons_tasks.py:tasks"},
                "policy": {"model": "org/model", "name": "policy"},
                "rewards": {"right": {"use": "reasons_tasks.py:right"}},
                "loop": loop,
                "folder": self.folder,
                **tables,
            }
        )

    async def train(self, **tables: Any) -> LoopState:
        """Train in the one run folder, from its newest checkpoint if it has one."""
        recipe = self.recipe(**tables)
        parts = Parts.build(recipe, self.plugins)
        path = self.folder / "run"
        if not path.exists():
            RunFolder.create(path, recipe, "recipe.toml", {}, models={}).close()
        with closing(RunFolder(path, (path / ".lock").open("a+", encoding="utf-8"))) as folder:
            saved = folder.latest()
            self.trainer = Trainer(
                recipe=recipe,
                tasks=parts.tasks,
                folder=folder,
                control=self.client,
                policies=Policies([RunningPolicy(name="policy", backend=self.backend, link=Link(), is_trained=True)]),  # type: ignore[arg-type]
                evaluator=parts.evaluator,
                scorer=parts.scorer,
                plugins=self.plugins,
                progress=LineProgress(Console(file=self.screen, width=200)),
                log=lambda step, metrics: self.logged.append(metrics),
                state=saved.state if saved else LoopState(step=0, seconds=0.0, rollouts=0),
                start_workers=self._nothing,
            )
            worker = asyncio.create_task(self._work())
            try:
                return await self.trainer.run()
            finally:
                worker.cancel()
                await asyncio.gather(worker, return_exceptions=True)

    async def attempts(self) -> dict[str, int]:
        return {record.spec.id: len(record.attempts) for record in await self.store.list_rollouts()}

    async def _nothing(self) -> None: ...

    async def _work(self) -> None:
        while True:
            lease = await self.store.lease("worker", 60.0, 10.0)
            if lease is not None:
                self.work += 1
                await self.agent(self.store, lease)


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    store = await SqlStore.open(f"sqlite:///{tmp_path / 'store.sqlite'}")
    app = create_app(store, EngineRegistry(), run_key="key")
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(app, lifespan="off", log_config=None, ws="none", timeout_graceful_shutdown=1)
    )
    serving = asyncio.create_task(server._serve([listener]))  # `serve` would take over the test's signal handlers
    async with ServerClient(f"http://127.0.0.1:{listener.getsockname()[1]}", "key") as client:
        yield Scene(tmp_path, store, client)
    server.should_exit = True
    await serving
    await store.close()


# ---------------------------------------------------------------------- nothing can be learned


async def test_a_run_whose_agent_calls_no_model_names_the_setting_and_fails(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.agent = silent
    with pytest.raises(
        LightningError,
        match=r"nothing was learned in 2 steps: none of 4 rollouts made a model call .*runtime\.base_urls",
    ):
        await scene.train()
    warned = [record.getMessage() for record in caplog.records if "no row carries a signal" in record.getMessage()]
    assert len(warned) == 1, "once for each reason"
    assert "weights stay as they are" in warned[0]
    assert scene.backend.version == 0


async def test_a_run_of_equal_rewards_says_which_reward_and_fails(scene: Scene) -> None:
    scene.agent = always_wrong
    with pytest.raises(
        LightningError,
        match=r"all 4 rewards are 0; `lightningrl rollouts show g000002-000` shows one; show two answers .*`warm_start`",
    ):
        await scene.train()
    with pytest.raises(LightningError, match="nothing was learned in 2 steps"):
        await scene.train()  # to resume a run that is over makes it no success


async def test_one_step_that_teaches_makes_a_run_a_success_also_when_it_was_another_process(scene: Scene) -> None:
    state = await scene.train(loop={"steps": 1})
    assert (state.step, state.steps_with_signal) == (1, 1)
    scene.agent = always_wrong
    state = await scene.train(loop={"steps": 3})
    assert (state.step, state.steps_with_signal) == (3, 1)


async def test_a_client_that_answers_from_a_cache_is_named_for_training_and_for_validation_once(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    known: set[str] = set()

    async def cached(store: SqlStore, lease: Lease) -> None:
        is_first = lease.task.id not in known
        known.add(lease.task.id)
        if is_first:
            await call(store, lease)
        await finish(store, lease, float(is_first))

    scene.agent = cached
    tasks = {"train": "reasons_tasks.py:tasks", "validation": "reasons_tasks.py:held_out"}
    await scene.train(tasks=tasks, validation={"every": 1}, credit={"use": "reinforce"})
    said = [message for record in caplog.records if "from a cache" in (message := record.getMessage())]
    assert [message.partition(" although")[0] for message in said] == [
        "step 1: 2 of 4 rollouts made no model call",
        "validation after step 1: 2 of 2 rollouts made no model call",
    ]
    assert (
        "others of their group did: the agent's client answers from a cache (LangChain's `set_llm_cache`, DSPy's on disk"
        in said[0]
    )
    assert said[0].endswith("so they repeat what was sampled once, and teach nothing; switch it off for training")
    assert "earlier ones of their tasks did" in said[1]
    assert "so validation says what the policy was, not what it is; switch it off" in said[1]


def test_what_is_a_cache_and_what_is_none() -> None:
    def rollout(name: str, group: str, calls: int, **fields: Any) -> Trajectory:
        made = [make_transition(f"{name}/{number}") for number in range(calls)]
        return replace(make_trajectory(name, made, group_id=group), task=Task(id=group, input=group), **fields)

    mixed_groups = [rollout("a", "x", 1), rollout("b", "x", 0), rollout("c", "y", 0)]
    assert (explain_cache(mixed_groups) or "").startswith(
        "1 of 3 rollouts made no model call although others of their group did: "
    )
    assert explain_silence([replace(one, reward=0.0) for one in mixed_groups]) == explain_cache(mixed_groups)
    finding = calls_made(SimpleNamespace(rollouts=mixed_groups))  # type: ignore[arg-type]
    assert (finding.verdict, finding.remedy) == (Verdict.WARN, "switch it off for training")
    alone = [rollout("c", "y", 0)]
    assert explain_cache(alone) is None
    assert (explain_cache(alone, {"y"}) or "").startswith(
        "1 of 1 rollouts made no model call although earlier ones of their tasks did: "
    )
    assert explain_cache(alone, {"z"}) is None, "an agent may ask nothing for some tasks"
    assert "those of training do" in (explain_cache(alone, {"z"}, is_validation=True) or ""), (
        "it lies on the disk, of an earlier run"
    )
    failed = [rollout("a", "x", 1), rollout("b", "x", 0, outcome=Outcome.AGENT_ERROR, error="KeyError")]
    assert explain_cache(failed) is None


async def test_a_run_of_no_steps_only_validates_and_is_no_failure(scene: Scene) -> None:
    scene.agent = silent
    tasks = {"train": "reasons_tasks.py:tasks", "validation": "reasons_tasks.py:held_out"}
    assert (await scene.train(loop={"steps": 0}, tasks=tasks)).step == 0
    assert "validation after step 0: score 1.000" in scene.screen.getvalue()


async def test_refused_calls_are_quoted(tmp_path: Path) -> None:
    async with live_gateway(tmp_path) as gateway:
        attempt = await gateway.attempt()
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {attempt.key}"}) as client:
            body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "logit_bias": {"5": 10}}
            answer = await client.post(f"{attempt.base_url}/chat/completions", json=body)
        await gateway.store.finish_attempt(attempt.rollout_id, attempt.attempt, Outcome.SUCCEEDED, "done")
        why = explain_silence(await gateway.store.trajectories([attempt.rollout_id]))
    assert answer.status_code == 400
    assert why.startswith(f"every model call was refused (1); first, of {attempt.rollout_id!r}: ")
    assert answer.json()["error"]["message"][:100] in why


def test_groups_that_agree_within_themselves_are_told_from_equal_rewards() -> None:
    def make(group: str, reward: float, *, trainable: bool = True) -> Trajectory:
        calls = [make_transition(f"{group}/0", trainable=trainable, agent="write")]
        return make_trajectory(group, calls, reward=reward, group_id=group)

    why = explain_silence([make("a", 0.0), make("a", 0.0), make("b", 1.0)])
    assert why.startswith(
        "in each of 2 groups all rewards are equal (over the step from 0 to 1); raise loop.group_size"
    )
    assert explain_silence([make("a", 0.0), make("a", 1.0)]) == "the credit assigner gives every trained call 0"
    assert "roles of the calls: 'write'" in explain_silence([make("a", 0.0, trainable=False)])


def test_a_seed_of_the_agents_own_is_the_reason_where_groups_agree_by_it() -> None:
    """More rollouts and a higher temperature, which were advised, change nothing there."""

    def ask(seeds: Sequence[int | None]) -> str:
        calls = [make_transition(f"r{number}/0") for number in range(len(seeds))]
        calls = [
            replace(call, sampling=replace(call.sampling, seed=seed)) for call, seed in zip(calls, seeds, strict=True)
        ]
        made = [(call, float(number > 1), "ab"[number > 1]) for number, call in enumerate(calls)]
        return explain_silence(
            [make_trajectory(call.id, [call], reward=reward, group_id=group) for call, reward, group in made]
        )

    assert ask([42, 42, 42, 42]).endswith("let it send no `seed` while it is trained")
    assert ask([1, 2, 3, 4]).startswith(equal := "in each of 2 groups all rewards are equal")
    assert ask([None, None, 42, 42]).startswith(equal)


# ---------------------------------------------------------------------- validation, and time limits


async def test_validation_inherits_the_sampling_of_training_but_is_greedy(scene: Scene) -> None:
    recipe = scene.recipe(sampling={"max_tokens": 1000, "top_p": 0.5})
    (spec,) = plan_validation([Task(id="v", input=1)], recipe, 0)
    assert spec.mode is RolloutMode.VALIDATION
    assert spec.sampling is not None
    assert (spec.sampling.temperature, spec.sampling.max_tokens, spec.sampling.top_p) == (0.0, 1000, 0.5)
    told = scene.recipe(sampling={"max_tokens": 1000}, validation={"sampling": {"max_tokens": 50, "temperature": 0.3}})
    assert (told.validation_sampling.temperature, told.validation_sampling.max_tokens) == (0.3, 50)
    assert json.loads(recipe.frozen_text())["validation"]["sampling"]["max_tokens"] == 1000


async def test_validation_every_zero_means_none_and_says_so(scene: Scene) -> None:
    tables: dict[str, Any] = {
        "tasks": {"train": "reasons_tasks.py:tasks", "validation": "reasons_tasks.py:held_out"},
        "validation": {"every": 0},
    }
    await scene.train(**tables)
    assert not [name for name in await scene.attempts() if name.startswith("v")]
    assert "validation" not in scene.screen.getvalue()
    recipe = scene.recipe(**tables)
    parts = Parts.build(recipe, scene.plugins)
    opened = OpenRun(recipe=recipe, parts=parts, plugins=scene.plugins, folder=scene.trainer.folder, is_resumed=False)
    _describe(Console(file=scene.screen, width=300), opened)
    assert "2 held out (validation.every = 0: not looked at)" in scene.screen.getvalue()


async def test_a_validation_in_which_all_fails_says_so_instead_of_nan(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.agent = broken
    tasks = {"train": "reasons_tasks.py:tasks", "validation": "reasons_tasks.py:held_out"}
    await scene.train(loop={"steps": 0}, tasks=tasks)
    assert "validation after step 0: no score  [2 agent_error]" in scene.screen.getvalue()
    assert "nan" not in scene.screen.getvalue()
    assert (
        "validation after step 0 has no score: every rollout failed (2 agent_error); first, 'v000000-0000': KeyError: 'oops'"
        in caplog.text
    )


async def test_a_validation_counts_the_agents_failures_as_the_lowest_reward(scene: Scene) -> None:
    """Or a policy that breaks on hard tasks would be exported as the best."""
    scene.agent = broken_at_times
    tasks = {"train": "reasons_tasks.py:tasks", "validation": "reasons_tasks.py:held_out"}
    assert (await scene.train(loop={"steps": 0}, tasks=tasks)).best_score == 0.5
    assert "validation after step 0: score 0.500  [1 agent_error, 1 succeeded]" in scene.screen.getvalue()
    kept = await scene.store.list_rollouts(RolloutFilter(mode=RolloutMode.VALIDATION))
    assert sorted((one.outcome or "", one.reward) for one in kept) == [("agent_error", 0.0), ("succeeded", 1.0)]


async def right_once(store: SqlStore, lease: Lease) -> None:
    """The first of each eight is right, each of the others raises at a line of its own."""
    number = int(lease.rollout_id[-1])
    await call(store, lease)
    if number == 0:
        await finish(store, lease, 1.0)
    else:
        error = f'ValueError: {number}\n  File "agent.py", line {number}, in answer'
        await store.finish_attempt(lease.rollout_id, lease.attempt, Outcome.AGENT_ERROR, error=error)


HELD_OUT = {"train": "reasons_tasks.py:tasks", "validation": "reasons_tasks.py:held_out"}


async def test_training_and_validation_judge_what_the_policy_breaks_alike(scene: Scene) -> None:
    """A group of one right and seven crashed rollouts was trained as 1.0, without a signal, and validated as 0.125."""
    scene.agent = right_once
    await scene.train(loop={"steps": 1, "tasks_per_step": 1, "group_size": 8}, tasks=HELD_OUT)
    validated, trained, *_ = scene.logged
    assert validated["validation/reward"] == 0.5  # of two tasks
    assert (trained["reward"], trained["reward/right"], trained["failures/agent_error"]) == (0.125, 0.125, 0.875)
    assert (trained["rollouts_unrewarded"], trained["groups_without_signal"], scene.backend.version) == (0, 0, 1)


async def test_failures_that_grow_are_told_with_their_share_and_what_helps(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    async def breaks_later(store: SqlStore, lease: Lease) -> None:
        is_late = lease.rollout_id.startswith("g") and int(lease.rollout_id[1:7]) > 0
        await (right_once if is_late else mixed)(store, lease)

    scene.agent = breaks_later
    await scene.train(loop={"steps": 2, "tasks_per_step": 1, "group_size": 8}, tasks=HELD_OUT)
    assert (
        "step 2: 7 of 8 rollouts ended in agent_error, 0% did before; first, 'g000001-001': ValueError: 1"
        in caplog.text
    )
    assert "outcomes.infrastructure" in caplog.text
    assert [row["failures/agent_error"] for row in scene.logged if "reward" in row] == [0.0, 0.875]


async def test_a_policy_may_break_one_whole_step_but_not_two_in_a_row(scene: Scene) -> None:
    async def breaks(store: SqlStore, lease: Lease) -> None:
        await (broken if lease.rollout_id.startswith("g") else mixed)(store, lease)

    scene.agent = breaks
    with pytest.raises(
        LightningError, match=r"step 2: every rollout failed \(4 agent_error\); .*KeyError: 'oops'.*earlier checkpoint"
    ):
        await scene.train(loop={"steps": 3}, tasks=HELD_OUT)
    trained = next(row for row in scene.logged if "failures/agent_error" in row and "reward" in row)
    assert (trained["reward"], trained["failures/agent_error"]) == (0.0, 1.0)


async def test_a_task_that_loses_its_workers_again_and_again_is_named(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    async def kills(store: SqlStore, lease: Lease) -> None:
        if lease.rollout_id.startswith("g000001"):
            error = "the worker process exited with status 3"
            await store.finish_attempt(lease.rollout_id, lease.attempt, Outcome.INFRASTRUCTURE_ERROR, error=error)
        else:
            await mixed(store, lease)

    scene.agent = kills
    await scene.train(loop={"steps": 1})
    assert re.search(r"2 rollouts of task 't\d' ended in infrastructure errors in each of their attempts", caplog.text)
    assert "the worker process exited with status 3" in caplog.text
    assert "2 of 4 rollouts were run again after infrastructure errors" in caplog.text
    trained = next(row for row in scene.logged if "reward" in row)
    assert (trained["reward"], trained["rollouts_unrewarded"]) == (0.5, 2)


async def test_agents_killed_by_a_slow_engine_are_told_its_speed_and_what_helps(scene: Scene) -> None:
    scene.agent = late
    with pytest.raises(LightningError) as failure:
        await scene.train(sampling={"max_tokens": 240}, runtime={"timeout_s": 90.0})
    told = str(failure.value)
    assert "4 of 4 rollouts ran out of time: the engine samples 4 tokens/s for a call" in told
    assert "an answer of 240 tokens takes 60 s of the 90 s that a rollout has" in told
    assert "raise runtime.timeout_s, or give a new run a lower sampling.max_tokens; then go on with" in told


def test_an_engine_that_is_fast_enough_is_not_blamed() -> None:
    gone = make_trajectory("r", [], reward=None, outcome=Outcome.TIMEOUT)
    assert explain_timeouts([gone], 1000.0, max_tokens=256, timeout_s=120.0) is None
    assert explain_timeouts([gone], None, max_tokens=256, timeout_s=120.0) is None
    assert explain_timeouts([make_trajectory("r", [])], 1.0, max_tokens=256, timeout_s=120.0) is None
    nothing = explain_timeouts([gone], 0.0, max_tokens=256, timeout_s=120.0)
    assert nothing is not None
    assert "so no answer comes of the 120 s" in nothing


async def test_the_engine_link_measures_a_calls_speed_also_while_it_runs(tmp_path: Path) -> None:
    async with (
        live_gateway(tmp_path, attach=False) as gateway,
        EngineLink(gateway.engine, gateway.url, gateway.run_key) as link,
    ):
        assert link.call_speed is None
        gateway.engine.pause()
        gateway.engine.enqueue("a long answer of some tokens")
        attempt = await gateway.attempt()
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {attempt.key}"}) as client:
            body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
            asked = asyncio.create_task(client.post(f"{attempt.base_url}/chat/completions", json=body))
            while not gateway.engine.requests:
                await asyncio.sleep(0.01)
            assert link.call_speed == 0.0
            gateway.engine.resume()
            assert (await asked).status_code == 200
        assert link.call_speed is not None
        assert link.call_speed > 0.0


# ---------------------------------------------------------------------- mended, and resumed


async def test_a_step_that_failed_whole_is_run_again_by_a_resumed_run_whose_agent_is_mended(scene: Scene) -> None:
    scene.agent = broken
    remedy = "mend the agent; then go on with `lightningrl train --resume"
    with pytest.raises(LightningError, match=rf"step 1: every rollout failed \(4 agent_error\).*{remedy}"):
        await scene.train(loop={"steps": 1})
    limits: list[float] = []

    async def mended(store: SqlStore, lease: Lease) -> None:
        limits.append(lease.timeout_s)
        await mixed(store, lease)

    scene.agent = mended
    state = await scene.train(loop={"steps": 1}, runtime={"timeout_s": 7.0})
    assert state.step == 1
    assert scene.backend.version == 1
    assert set((await scene.attempts()).values()) == {2}, "what failed stays on record"
    assert limits == [7.0] * 4


async def test_an_agent_that_still_fails_stops_the_resumed_run_too(scene: Scene) -> None:
    scene.agent = broken
    for tries in (1, 2, 3):
        with pytest.raises(LightningError, match="every rollout failed"):
            await scene.train(loop={"steps": 1})
        assert set((await scene.attempts()).values()) == {tries}


async def test_what_succeeded_or_is_trained_although_it_failed_is_replayed_as_it_was(scene: Scene) -> None:
    async def partly(store: SqlStore, lease: Lease) -> None:
        await (broken if lease.rollout_id.endswith("g000000-000") else mixed)(store, lease)

    scene.agent = partly
    await scene.train(loop={"steps": 1, "checkpoint_every": 9, "keep_checkpoints": 9})
    work = scene.work
    checkpoint = scene.folder / "run" / "checkpoints" / "step-000001"
    checkpoint.rename(checkpoint.with_name("gone"))
    scene.agent = broken
    await scene.train(loop={"steps": 1})
    assert scene.work == work, "nothing was run again"


# ---------------------------------------------------------------------- who looks on, and what runs in threads


async def test_a_watcher_that_raises_is_named_once_and_counted_while_training_and_other_watchers_go_on(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[int] = []

    class Clumsy:
        @hookimpl
        def lightningrl_rollout_finished(self, trajectory: Trajectory) -> None:
            raise ValueError("rollout")

        @hookimpl
        def lightningrl_group_credited(self, group: TrajectoryGroup) -> None:
            raise ValueError("group")

        @hookimpl
        def lightningrl_step_finished(self, report: StepReport) -> None:
            raise ValueError("step")

    class Careful:
        @hookimpl
        def lightningrl_step_finished(self, report: StepReport) -> None:
            seen.append(report.step)

    for watcher in (Careful(), Clumsy(), Careful()):
        scene.plugins.register(watcher)
    await scene.train()
    assert seen == [1, 1, 2, 2]
    assert [metrics["hooks_failed"] for metrics in scene.logged] == [4 + 2, 4 + 2 + 1]
    for hook in ("rollout_finished", "group_credited", "step_finished"):
        assert caplog.text.count(f"in lightningrl_{hook};") == 1
    assert (
        "plugin 'Clumsy' of the recipe raised ValueError: rollout in lightningrl_rollout_finished; training goes on"
        in caplog.text
    )


class Patient:
    """Lets the event loop have a turn, and gives up where it gets none."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.turns: list[bool] = []

    def wait(self) -> None:
        turn = threading.Event()
        self.loop.call_soon_threadsafe(turn.set)
        self.turns.append(turn.wait(PATIENCE_S))


async def test_credit_and_checkpoints_leave_the_event_loop_alone(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    patient = Patient()
    assign = IdenticalAssignment.assign

    def waiting(self: IdenticalAssignment, group: TrajectoryGroup) -> Any:
        patient.wait()
        return assign(self, group)

    monkeypatch.setattr(IdenticalAssignment, "assign", waiting)
    scene.backend.saving = patient.wait
    await scene.train()
    assert patient.turns == [True] * (1 + 2 * (2 + 1)), (
        "a checkpoint before, and in each step two groups and a checkpoint"
    )


async def test_a_stop_waits_for_the_checkpoint_that_is_being_written(scene: Scene) -> None:
    saving, may_end = threading.Event(), threading.Event()

    def slow() -> None:
        saving.set()
        may_end.wait(PATIENCE_S)

    scene.backend.saving = slow
    running = asyncio.create_task(scene.train())
    await asyncio.to_thread(saving.wait, PATIENCE_S)
    running.cancel()
    await asyncio.sleep(0)
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (scene.folder / "run" / "checkpoints" / "step-000000" / "loop.json").is_file()


async def test_a_step_without_a_reward_names_the_remedy_and_its_rollouts_are_rewarded_once_there_is_one(
    scene: Scene,
) -> None:
    def forgot_to_return(task: Task, output: float, trajectory: Trajectory) -> None:
        float(output)

    def right(task: Task, output: float, trajectory: Trajectory) -> float:
        return output

    remedy = r"check that the rewards return numbers; then go on with `lightningrl train --resume --run \S+`"
    with pytest.raises(LightningError, match=f"step 1: no rollout of 4 has a reward; {remedy}"):
        await scene.train(rewards={"right": {"use": forgot_to_return}}, loop={"steps": 1})
    assert (await scene.train(rewards={"right": {"use": right}}, loop={"steps": 1})).step == 1
    assert scene.work == 4, "none is made anew"


async def test_rewards_are_timed_apart_from_collecting(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    for module in ("loop", "collector"):
        monkeypatch.setattr(f"lightningrl_training.{module}.time", SimpleNamespace(monotonic=lambda: now[0]))

    async def slow(store: SqlStore, lease: Lease) -> None:
        now[0] += 2.0
        await mixed(store, lease)

    async def judge(task: Task, output: float, trajectory: Trajectory) -> float:
        now[0] += 5.0
        return output

    scene.agent = slow
    await scene.train(loop={"steps": 1, "tasks_per_step": 1, "group_size": 4}, rewards={"right": {"use": judge}})
    (metrics,) = scene.logged
    assert (metrics["seconds_collect"], metrics["seconds_reward"]) == (4 * 2.0, 4 * 5.0)
    assert metrics["tokens_per_second"] == 4 * 2 / (4 * 2.0)


def test_tasks_are_drawn_as_they_always_were_with_one_shuffle_per_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Scene(tmp_path, None, None).recipe(loop={"tasks_per_step": 5, "group_size": 1, "seed": 3})  # type: ignore[arg-type]
    tasks = [Task(id=f"t{number}", input=number) for number in range(8)]
    expected: list[str] = []
    for position in range(20):
        epoch, offset = divmod(position, 8)
        expected.append(f"t{np.random.default_rng((3, epoch)).permutation(8)[offset]}")
    made: list[object] = []
    new_generator = np.random.default_rng
    monkeypatch.setattr(np.random, "default_rng", lambda seed: made.append(seed) or new_generator(seed))  # type: ignore[func-returns-value]
    assert [spec.task.id for position in range(20) for spec in plan_group(tasks, recipe, position)] == expected
    assert made == [(3, 0), (3, 1), (3, 2)]
