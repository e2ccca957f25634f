"""Collection as a stream: what is out, in which order it is taken, how old it may be, and that each task is done with
once."""

from __future__ import annotations

import asyncio
import io
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from lightningrl.backends import EngineInfo, LearnReport
from lightningrl.errors import LightningError, RewardError, ServerError
from lightningrl.plugins import load_plugins
from lightningrl.recipe import Recipe
from lightningrl.records import RolloutFilter, RolloutRecord, Score
from lightningrl.types import Outcome, RolloutMode, RolloutSpec, RolloutState, Sample, Task, Trajectory
from lightningrl_testing.groups import make_trajectory, make_transition
from lightningrl_training.build import Parts
from lightningrl_training.checkpoints import LoopState
from lightningrl_training.collector import Collector
from lightningrl_training.loop import Trainer
from lightningrl_training.pacing import Pacing
from lightningrl_training.policies import Policies, RunningPolicy
from lightningrl_training.progress import LineProgress
from lightningrl_training.run_folder import RunFolder
from lightningrl_training.tasks import plan_group

DATA = """
def tasks():
    return [{"id": f"t{number}", "input": number} for number in range(7)]

def right(task, output, trajectory):
    return "much" if output == "wrong" else float(trajectory.rollout_id[-1])

def answer(number):
    return number
"""


class Server:
    """Rollouts end when the test says so, sampled by the version that is served then."""

    def __init__(self) -> None:
        self.specs: dict[str, RolloutSpec] = {}
        self.born: dict[str, int] = {}
        """By rollout, the version that it was sampled by."""
        self.ended: set[str] = set()
        self.version = 0
        self.trained: dict[int, list[str]] = {}
        self.kept: list[str] = []
        self.wrong: set[str] = set()
        self.failed: set[str] = set()
        self.forgotten: set[str] = set()
        self.queued: tuple[str, ...] = ()
        """Groups that wait for a worker, until they `begin`."""
        self.most_out = 0
        self.is_gone = False

    async def create_rollouts(self, specs: Sequence[RolloutSpec]) -> int:
        if any(self.specs.get(spec.id, spec) != spec for spec in specs):
            raise ServerError("rollout id is already used with another step")
        new = {spec.id: spec for spec in specs if spec.id not in self.specs}
        self.specs |= new
        self.born |= dict.fromkeys(new, self.version)
        self.most_out = max(self.most_out, len(self.out))
        return len(new)

    @property
    def out(self) -> list[str]:
        return sorted(self.specs.keys() - self.ended)

    def end(self, *names: str) -> None:
        """`g000001` = all of the group."""
        self.ended |= {one for one in self.specs if one.startswith(names)}

    async def wait(self, rollout_ids: Sequence[str], wait_s: float, min_finished: int | None = None) -> Sequence[str]:
        while True:
            if self.is_gone:
                raise ServerError("no server answers")
            done = [name for name in rollout_ids if name in self.ended]
            if wait_s == 0 or len(done) >= (len(rollout_ids) if min_finished is None else min_finished):
                return done
            await asyncio.sleep(0)

    async def trajectories(self, rollout_ids: Sequence[str]) -> Sequence[Trajectory]:
        return [self._trajectory(self.specs[name]) for name in rollout_ids]

    async def set_scores(self, scores: Sequence[Score]) -> None:
        for score in scores:
            if score.rollout_id in self.forgotten:
                raise ServerError(f"rollout {score.rollout_id!r} has no attempt 1; attempts start with a lease")
            self.kept.append(score.rollout_id)

    async def mark_trained(self, step: int, rollout_ids: Sequence[str], metrics: Mapping[str, float]) -> None:
        self.trained[step] = list(rollout_ids)

    async def rollback_steps(self, after: int) -> int:
        self.trained = {step: names for step, names in self.trained.items() if step <= after}
        return 0

    async def forget_rollouts(self, through: int, slack: int = 0) -> int:
        trained = {name: step for step, names in self.trained.items() for name in names}
        planned = {spec.id: spec.step or 0 for spec in self.specs.values() if spec.id in self.ended}
        gone = {
            name
            for name, step in planned.items()
            if (trained[name] <= through if name in trained else step < through - slack)
        }
        self.forgotten |= gone
        return len(gone)

    async def list_rollouts(self, where: RolloutFilter) -> Sequence[RolloutRecord]:
        """Those that no worker has begun."""
        assert (where.state, where.mode) == (RolloutState.QUEUED, RolloutMode.TRAIN)
        waiting = sorted((name for name in self.out if name.startswith(self.queued)), reverse=True)
        return [
            RolloutRecord(spec=self.specs[name], state=RolloutState.QUEUED, outcome=None, attempts=())
            for name in waiting[where.offset : where.offset + where.limit]
        ]

    def begin(self, *groups: str) -> None:
        """A worker takes them out of the queue, and their first calls are of this version."""
        self.queued = tuple(group for group in self.queued if group not in groups)
        self.born |= {name: self.version for name in self.specs if name.startswith(groups)}

    async def retry(self, rollout_ids: Sequence[str], timeout_s: float) -> int:
        self.ended -= set(rollout_ids)
        self.failed -= set(rollout_ids)
        return len(rollout_ids)

    def _trajectory(self, spec: RolloutSpec) -> Trajectory:
        call = make_transition(f"{spec.id}/0", version=self.born[spec.id])
        output = "wrong" if spec.id in self.wrong else "right"
        made = make_trajectory(spec.id, [call], reward=None, group_id=spec.group_id, output=output)
        outcome = Outcome.AGENT_ERROR if spec.id in self.failed else Outcome.SUCCEEDED
        return replace(made, task=spec.task, outcome=outcome)


class Backend:
    """Each step with rows is a version."""

    serves_while_learning = True

    def __init__(self, server: Server) -> None:
        self.server = server
        self.learning: Callable[[], None] = lambda: None

    @property
    def engine(self) -> Any:
        return SimpleNamespace(info=EngineInfo(policy="policy", version=self.server.version, context_length=64))

    def learn(self, samples: Iterable[Sample]) -> LearnReport:
        self.learning()
        self.server.version += 1
        return LearnReport(policy_version=self.server.version, tokens=len(list(samples)), seconds=0.0)

    def save(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "version").write_text(str(self.server.version), encoding="utf-8")


class Link:
    call_speed: float | None = 1.0

    async def hold(self) -> None: ...

    async def release(self, version: int) -> None: ...


class Scene:
    """A run folder and a server, over which one trainer after the other runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server = Server()
        self.backend = Backend(self.server)
        self.metrics: dict[int, Mapping[str, float]] = {}
        self.started = 0
        (folder / "stream_tasks.py").write_text(DATA, encoding="utf-8")

    def recipe(self, **loop: Any) -> Recipe:
        return Recipe.model_validate(
            {
                "agent": "stream_tasks.py:answer",
                "tasks": {"train": "stream_tasks.py:tasks"},
                "policy": {"model": "org/model"},
                "rewards": {"right": {"use": "stream_tasks.py:right"}},
                "loop": {"steps": 4, "tasks_per_step": 3, "group_size": 2, "checkpoint_every": 1, **loop},
                "folder": self.folder,
            }
        )

    def collector(self, *, in_order: bool) -> Collector:
        evaluator = Parts.build(self.recipe(), load_plugins()).evaluator
        pacing = Pacing(tasks_per_step=3, max_staleness=1, versions=lambda: {"policy": self.server.version})
        return Collector(
            rollouts=self.server,
            evaluator=evaluator,
            start_workers=self.start_workers,
            pacing=None if in_order else pacing,
        )

    async def start_workers(self) -> None:
        self.started += 1

    def specs(self, *positions: int) -> dict[int, list[RolloutSpec]]:
        return {position: plan_group([Task(id="t", input=1)], self.recipe(), position) for position in positions}

    async def train(self, **loop: Any) -> LoopState:
        recipe, plugins, path = self.recipe(**loop), load_plugins(), self.folder / "run"
        if not path.exists():
            RunFolder.create(path, recipe, "recipe.toml", {}, models={}).close()
        with closing(RunFolder(path, (path / ".lock").open("a+", encoding="utf-8"))) as folder:
            if saved := folder.latest():
                self.server.version = int((saved.folder / "policy" / "version").read_text())
            parts = Parts.build(recipe, plugins)
            trainer = Trainer(
                recipe=recipe,
                tasks=parts.tasks,
                folder=folder,
                control=self.server,
                policies=Policies([RunningPolicy(name="policy", backend=self.backend, link=Link(), is_trained=True)]),  # type: ignore[arg-type]
                evaluator=parts.evaluator,
                scorer=parts.scorer,
                plugins=plugins,
                progress=LineProgress(Console(file=io.StringIO())),
                log=lambda step, metrics: self.metrics.update({step: metrics}),
                state=saved.state if saved else LoopState(step=0, seconds=0.0, rollouts=0),
                start_workers=self.start_workers,
            )
            return await trainer.run()

    async def trained_steps(self, count: int) -> int:
        """The steps that have been trained, half a second after `count` of them have."""
        async with asyncio.timeout(60):
            while len(self.server.trained) < count:
                await asyncio.sleep(0)
        await asyncio.sleep(0.5)
        return len(self.server.trained)

    @asynccontextmanager
    async def agents(
        self, chance: random.Random, *, slow: tuple[str, ...] = (), stuck: bool = False
    ) -> AsyncIterator[None]:
        """End what is out one by one, in any order; what is `slow`, only where nothing else is left, and not at all if
        it is `stuck`."""

        async def work() -> None:
            while True:
                out = [name for name in self.server.out if not name.startswith(slow)] if slow else self.server.out
                if not out and not stuck:
                    out = self.server.out
                if out:
                    self.server.ended.add(chance.choice(out))
                await asyncio.sleep(0)

        working = asyncio.create_task(work())
        try:
            yield
        finally:
            working.cancel()


@pytest.fixture
async def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


# ---------------------------------------------------------------------- what comes back, and when


async def test_groups_are_rewarded_as_they_end_and_taken_in_the_order_of_their_tasks(scene: Scene) -> None:
    async with aclosing(scene.collector(in_order=True)) as collector:
        await collector.order(scene.specs(0, 1, 2))
        scene.server.end("g000002", "g000000-000")
        while "g000002-001" not in scene.server.kept:
            await asyncio.sleep(0)
        assert collector.ended(1) == 1
        assert collector.ended(3) == 3
        scene.server.end("g000000")
        assert (await collector.take()).position == 0, "nobody waits for group 1"
        assert collector.out == 2
        scene.server.end("g000001")
        assert [(await collector.take(wanted)).position for wanted in (2, 1)] == [1, 2]
    assert Counter(scene.server.kept) == dict.fromkeys(scene.server.specs, 1)


async def test_or_as_they_finish_and_an_order_that_comes_meanwhile_is_seen_at_once(scene: Scene) -> None:
    async with aclosing(scene.collector(in_order=False)) as collector:
        await collector.order(scene.specs(0, 1))
        scene.server.end("g000001")
        assert (await collector.take()).position == 1
        taking = asyncio.create_task(collector.take())
        await asyncio.sleep(0)
        await collector.order(scene.specs(5))
        scene.server.end("g000005")
        group = await taking
    assert [trajectory.rollout_id for trajectory in group.trajectories] == ["g000005-000", "g000005-001"]
    assert [trajectory.reward for trajectory in group.trajectories] == [0.0, 1.0]


async def test_what_the_store_has_is_replayed_and_needs_no_workers(scene: Scene) -> None:
    await scene.server.create_rollouts([spec for group in scene.specs(0, 1).values() for spec in group])
    scene.server.end("g000000")
    async with aclosing(scene.collector(in_order=True)) as collector:
        await collector.order(scene.specs(0))
        assert scene.started == 0
        assert (await collector.take()).is_replay
        await collector.order(scene.specs(1, 2))
        assert scene.started == 1
        scene.server.end("g")
        assert not (await collector.take()).is_replay


async def test_what_fails_for_good_is_raised_where_groups_are_taken(scene: Scene) -> None:
    async with aclosing(scene.collector(in_order=True)) as collector:
        await collector.order(scene.specs(0, 1))
        scene.server.wrong.add("g000001-000")
        scene.server.end("g000001")
        with pytest.raises(RewardError, match="reward 'right' returned 'much' of type str on rollout 'g000001-000'"):
            await collector.take(2)
    async with aclosing(scene.collector(in_order=True)) as collector:
        await collector.order(scene.specs(2))
        scene.server.is_gone = True
        with pytest.raises(ServerError, match="no server answers"):
            await collector.take()


async def test_what_is_cancelled_from_within_ends_the_run(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    async def cancelled(*_: Any, **__: Any) -> None:
        raise asyncio.CancelledError

    async with aclosing(scene.collector(in_order=True)) as collector:
        monkeypatch.setattr(collector, "_reward", cancelled)
        await collector.order(scene.specs(0))
        scene.server.end("g")
        with pytest.raises(LightningError, match="cancelled from within"):
            await collector.take()


# ---------------------------------------------------------------------- what is out


async def test_on_policy_nothing_is_out_while_a_step_is_learned(scene: Scene) -> None:
    scene.backend.learning = lambda: out.append(len(scene.server.out))
    out: list[int] = []
    async with scene.agents(random.Random(0)):
        state = await scene.train()
    assert out == [0] * 4
    assert scene.server.most_out == 3 * 2
    assert (state.position, state.done_beyond, state.rollouts) == (12, (), 24)
    assert [names[0] for names in scene.server.trained.values()] == [f"g{3 * step:06d}-000" for step in range(4)]


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_capacity_is_the_tasks_of_so_many_more_steps_and_ends_with_the_run(
    scene: Scene, *, asynchronous: bool
) -> None:
    async with scene.agents(random.Random(0)):
        state = await scene.train(max_staleness=2, asynchronous=asynchronous)
    assert 2 * 3 * 2 < scene.server.most_out <= 3 * 3 * 2
    assert len(scene.server.specs) == 24, "nothing is ordered that no step would take"
    assert (state.position, state.done_beyond) == (12, ())


async def test_in_order_each_step_has_its_own_tasks_and_their_age_is_bounded(scene: Scene) -> None:
    async with scene.agents(random.Random(3)):
        await scene.train(max_staleness=2, steps=6)
    for step, names in scene.server.trained.items():
        assert names == [f"g{3 * (step - 1) + task:06d}-{member:03d}" for task in range(3) for member in range(2)]
        assert all(0 <= step - 1 - scene.server.born[name] <= 2 for name in names)


@pytest.mark.parametrize("staleness", [1, 2, 4])
async def test_asynchronous_steps_pass_a_straggler_by_until_it_would_be_too_old_and_then_wait_for_it(
    scene: Scene, staleness: int
) -> None:
    """It was left out, and its task never learned from."""
    straggler = "g000001"
    async with scene.agents(random.Random(1), slow=(straggler,), stuck=True):
        training = asyncio.create_task(scene.train(max_staleness=staleness, asynchronous=True, steps=7))
        assert await scene.trained_steps(staleness) == staleness, "the next step waits"
        scene.server.end(straggler)
        await training
    assert {straggler} == {name[:7] for name in scene.server.trained[staleness + 1]} & {straggler}
    for step, names in scene.server.trained.items():
        assert all(step - 1 - scene.server.born[name] <= staleness for name in names), step
        assert len(names) == 6
    assert max(metrics["staleness_slow"] for metrics in scene.metrics.values()) <= staleness


async def test_a_group_that_no_worker_has_begun_has_no_age(scene: Scene) -> None:
    """Steps would wait for it as if its calls had been made when it was ordered."""
    late = "g000001"
    scene.server.queued = (late,)
    async with scene.agents(random.Random(1), slow=(late,), stuck=True):
        training = asyncio.create_task(scene.train(max_staleness=1, asynchronous=True, steps=6))
        while scene.server.version < 3:
            await asyncio.sleep(0)
        scene.server.begin(late)
        assert await scene.trained_steps(3) == 3, "it waited for a worker when step 3 began, at version 2"
        scene.server.end(late)
        await training
    assert late in {name[:7] for step in (4, 5) for name in scene.server.trained[step]}, "it was of version 3 after all"
    assert all(
        step - 1 - scene.server.born[name] <= 1 for step, names in scene.server.trained.items() for name in names
    )


@pytest.mark.parametrize("staleness", [1, 2, 4])
@pytest.mark.parametrize("workers", [24, 120], ids=["queued", "all-at-once"])
def test_tasks_that_take_eight_times_as_long_have_their_share_of_every_step(staleness: int, workers: int) -> None:
    """With groups left out for their age they had 0.000 to 0.010 of 0.200."""
    chance, tasks_per_step, steps = random.Random(staleness), 8, 400
    pacing = Pacing(tasks_per_step=tasks_per_step, max_staleness=staleness, versions=dict)
    out: dict[int, dict[str, float]] = {}
    taken: list[bool] = []
    ordered, clock = 0, 0.0
    for version in range(steps):
        for wanted in range(tasks_per_step, 0, -1):
            while len(out) < wanted + min(staleness, steps - 1 - version) * tasks_per_step:
                out[ordered] = {"needs": 8.0 if chance.random() < 0.2 else 1.0}
                ordered += 1
            while True:  # time goes on until one that may be taken has ended
                free = workers - sum("ends" in group and group["ends"] > clock for group in out.values())
                for group in [group for group in out.values() if "ends" not in group][: max(0, free)]:
                    group |= {"born": version, "ends": clock + group["needs"] * chance.uniform(0.9, 1.1)}
                ages = {place: version - int(group.get("born", version)) for place, group in out.items()}
                may = pacing.takeable(ages, wanted)
                done = [place for place in may if out[place].get("ends", clock + 1) <= clock]
                if done:
                    break
                clock = min(group["ends"] for group in out.values() if group.get("ends", 0.0) > clock)
            assert ages[done[0]] <= staleness
            taken.append(out.pop(done[0])["needs"] > 1)
    assert not out
    for part in (taken[: len(taken) // 2], taken[len(taken) // 2 :]):
        assert sum(part) / len(part) == pytest.approx(0.2, abs=0.03)


def test_what_is_already_too_old_is_taken_first_and_blocks_nothing() -> None:
    pacing = Pacing(tasks_per_step=2, max_staleness=1, versions=dict)
    assert pacing.takeable({}, 2) == []
    assert pacing.takeable({4: 5, 5: 5, 6: 5, 7: 0}, 2) == [4]
    assert pacing.takeable({4: 0, 5: 1, 6: 1}, 2) == [5, 6], "one place in this step is left beside the next take"
    assert pacing.takeable({4: 0, 5: 1}, 2) == [5, 4]


async def test_what_a_straggler_s_group_has_so_far_is_not_forgotten_however_late_it_is(scene: Scene) -> None:
    """Its group was rewarded when the straggler came, and the run ended: the store had no attempt of the others any
    more."""
    kept = {"keep_rollouts": 1, "keep_checkpoints": 1}
    async with scene.agents(random.Random(1), slow=("g000001-001",), stuck=True):
        scene.backend.learning = lambda: scene.server.end("g000001-001") if scene.server.version == 3 else None
        await scene.train(max_staleness=4, asynchronous=True, steps=10, **kept)
    assert {"g000001-000", "g000001-001"} <= set(scene.server.kept)
    assert "g000000-000" in scene.server.forgotten


async def test_asynchronous_on_policy_is_refused(scene: Scene) -> None:
    with pytest.raises(ValueError, match=r"set loop\.max_staleness above 0"):
        scene.recipe(asynchronous=True)


# ---------------------------------------------------------------------- killed, and resumed


@pytest.mark.parametrize("seed", range(20))
async def test_nothing_is_trained_twice_and_no_task_is_lost_over_kills(scene: Scene, seed: int) -> None:
    chance = random.Random(seed)
    loop = {
        "steps": 12,
        "max_staleness": 2,
        "asynchronous": True,
        "checkpoint_every": 3,
        "dynamic_sampling": chance.choice([0, 1]),
    }
    async with scene.agents(chance, slow=(f"g00000{chance.randrange(9)}",)):
        for _ in range(4):
            turns = chance.randrange(4000)
            running = asyncio.create_task(scene.train(**loop))
            while turns and not running.done():
                turns -= 1
                await asyncio.sleep(0)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        state = await scene.train(**loop)
    trained = [name for step in sorted(scene.server.trained) for name in scene.server.trained[step]]
    assert sorted(scene.server.trained) == list(range(1, 13))
    assert len(trained) == len(set(trained)) == state.rollouts
    assert state.position is not None
    done = {*range(state.position), *state.done_beyond}
    assert {int(name[1:7]) for name in trained} == done


async def test_groups_that_are_run_again_outlive_a_kill_after_a_step_of_others(scene: Scene) -> None:
    loop = {"steps": 2, "max_staleness": 1, "asynchronous": True}
    first, later = ("g000000", "g000001", "g000002"), ("g000003", "g000004", "g000005")
    scene.server.failed = {f"{group}-{number:03d}" for group in first for number in range(2)}
    async with scene.agents(random.Random(0), slow=later, stuck=True):
        with pytest.raises(LightningError, match="every rollout failed"):
            await scene.train(**loop)
    async with scene.agents(random.Random(0), slow=first, stuck=True):
        running = asyncio.create_task(scene.train(**loop))
        while not (scene.folder / "run" / "checkpoints" / "step-000001").exists():
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    async with scene.agents(random.Random(0)):
        await scene.train(**loop)
    assert [{name[:7] for name in scene.server.trained[step]} for step in (1, 2)] == [set(later), set(first)]
