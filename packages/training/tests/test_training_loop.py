"""What the loop orders, and what it makes of it: each rollout once; with DAPO's dynamic sampling, other tasks for
groups without signal."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from rich.console import Console

from lightningrl.advantages import teaching_rows
from lightningrl.backends import LearnReport
from lightningrl.errors import LightningError, PluginError
from lightningrl.plugins import hookimpl, load_plugins
from lightningrl.recipe import Recipe
from lightningrl.records import RolloutFilter, RolloutRecord, Score
from lightningrl.types import Advantages, Outcome, RolloutMode, RolloutSpec, Sample, Trajectory, TrajectoryGroup
from lightningrl_credit.baselines import IdenticalAssignment
from lightningrl_credit.scoring import unread_rewards
from lightningrl_testing.groups import make_trajectory, make_transition
from lightningrl_training.build import Parts
from lightningrl_training.checkpoints import LoopState, find_checkpoint
from lightningrl_training.loggers import JsonlLogger
from lightningrl_training.loop import Trainer
from lightningrl_training.policies import Policies
from lightningrl_training.progress import LineProgress
from lightningrl_training.run_folder import RunFolder
from lightningrl_training.steps_telemetry import StepSpans

DATA = """
def tasks():
    return [{"id": f"t{number}", "input": number} for number in range(40)]

def held_out():
    return [{"id": f"h{number}", "input": 100 + number} for number in range(8)]

def right(task, output, trajectory):
    return float(output)

def answer(number):
    return number
"""


class Store:
    """Rollouts that have ended when they are ordered. Every third task is one that both rollouts of a group get right
    or wrong alike."""

    def __init__(self) -> None:
        self.ordered: dict[str, RolloutSpec] = {}
        self.trained: dict[int, list[str]] = {}
        self.metrics: dict[str, float] = {}
        self.all_alike = False
        self.all_fail = False
        self.left: tuple[str, ...] = ()
        """By each rollout of training."""
        self.forgotten: list[tuple[int, int]] = []
        self.scores: list[float] = []
        """Of validations, in their order."""

    async def create_rollouts(self, specs: Sequence[RolloutSpec]) -> int:
        self.ordered |= {spec.id: spec for spec in specs}
        return len(specs)

    async def wait(self, rollout_ids: Sequence[str], wait_s: float, min_finished: int | None = None) -> Sequence[str]:
        return rollout_ids

    async def trajectories(self, rollout_ids: Sequence[str]) -> Sequence[Trajectory]:
        return [self._trajectory(self.ordered[rollout_id]) for rollout_id in rollout_ids]

    async def set_scores(self, scores: Sequence[Score]) -> None: ...

    async def mark_trained(self, step: int, rollout_ids: Sequence[str], metrics: Mapping[str, float]) -> None:
        self.trained[step] = list(rollout_ids)

    async def rollback_steps(self, after: int) -> int:
        return 0

    async def forget_rollouts(self, through: int, slack: int = 0) -> int:
        self.forgotten.append((through, slack))
        return 0

    async def retry(self, rollout_ids: Sequence[str], timeout_s: float) -> int:
        return 0

    async def list_rollouts(self, where: RolloutFilter) -> Sequence[RolloutRecord]:
        return ()

    def _trajectory(self, spec: RolloutSpec) -> Trajectory:
        if spec.mode is RolloutMode.VALIDATION:
            score = self.scores[spec.step]
            call = make_transition(f"{spec.id}/0")
            return replace(
                make_trajectory(spec.id, [call], reward=None, group_id=spec.group_id, output=score), mode=spec.mode
            )
        alike = self.all_alike or spec.task.input % 3 == 0
        right = float(alike or spec.id.endswith("0"))
        call = make_transition(f"{spec.id}/0", agent="team/write")
        made = make_trajectory(spec.id, [call], reward=None, group_id=spec.group_id, output=right)
        made = replace(made, left_threads=self.left)
        return replace(made, outcome=Outcome.AGENT_ERROR, error="closed") if self.all_fail else made


class Learned(Policies):
    """Keeps the rows of the last step."""

    samples: Sequence[Sample] = ()

    def __init__(self, *policies: Any) -> None:
        super().__init__(*policies)
        self.went_back: list[tuple[Path, float]] = []

    async def go_back(self, folder: Path, *, slower: float) -> dict[str, float]:
        self.went_back.append((folder, slower))
        return {"policy": 1e-6}

    @property
    def versions(self) -> dict[str, int]:
        return {"policy": 0}

    async def learn(self, samples: Sequence[Sample], *, say: Callable[[str], None] = print) -> dict[str, LearnReport]:
        self.samples = samples
        return {}


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def learned() -> Learned:
    return Learned(())


@pytest.fixture
def make_trainer(tmp_path: Path, store: Store, learned: Learned) -> Iterator[Callable[..., Trainer]]:
    made: list[Trainer] = []
    (tmp_path / "loop_tasks.py").write_text(DATA, encoding="utf-8")

    def make(
        trained: Sequence[str] | None = None,
        paid: Sequence[str] | None = None,
        validated: bool = False,
        goes_back: bool = False,
        credit: str = "grpo",
        intermediate: Sequence[str] = (),
        options: Mapping[str, float] | None = None,
        **loop: float,
    ) -> Trainer:
        recipe = Recipe.model_validate(
            {
                "agent": "loop_tasks.py:answer",
                "tasks": {
                    "train": "loop_tasks.py:tasks",
                    **({"validation": "loop_tasks.py:held_out"} if validated else {}),
                },
                "validation": {"every": 1, "go_back": goes_back},
                "policy": {"model": "org/model", "trained_agents": trained},
                "roles": {"write": {"model": "writer"}},
                "rewards": {"right": {"use": "loop_tasks.py:right", "agents": paid}},
                "intermediate_rewards": {name: {"use": name} for name in intermediate},
                "credit": {"use": credit, "options": options or {}},
                "samples": {"aggregation": "token_mean"},
                "loop": {"steps": 1, "tasks_per_step": 9, "group_size": 2, **loop},
                "folder": tmp_path,
            }
        )
        plugins = load_plugins()
        parts = Parts.build(recipe, plugins)
        folder = RunFolder.create(tmp_path / f"run{len(made) or ''}", recipe, "recipe.toml", {}, models={})
        made.append(
            Trainer(
                recipe=recipe,
                tasks=parts.tasks,
                folder=folder,
                control=store,
                policies=learned,
                evaluator=parts.evaluator,
                scorer=parts.scorer,
                plugins=plugins,
                progress=LineProgress(Console(file=io.StringIO())),
                log=lambda step, metrics: store.metrics.update(metrics),
                state=LoopState(step=0, seconds=0.0, rollouts=0),
                start_workers=_nothing,
            )
        )
        return made[-1]

    yield make
    for trainer in made:
        trainer.folder.close()


async def _nothing() -> None: ...


async def test_each_rollout_is_rewarded_once(make_trainer: Callable[..., Trainer]) -> None:
    trainer = make_trainer(steps=3)
    seen: list[str] = []

    class Watcher:
        @hookimpl
        def lightningrl_rollout_finished(self, trajectory: Trajectory) -> None:
            seen.append(trajectory.rollout_id)

    trainer.plugins.register(Watcher())
    await trainer.run()
    assert len(seen) == len(set(seen)) == 3 * 9 * 2


def groups_of(store: Store) -> set[str]:
    return {spec.group_id for spec in store.ordered.values()}


async def test_other_tasks_are_sampled_until_as_many_groups_teach_as_the_step_has_tasks(
    make_trainer: Callable[..., Trainer], store: Store, learned: Learned
) -> None:
    await make_trainer(dynamic_sampling=9).run()
    taught = {sample.rollout_id.rpartition("-")[0] for sample in learned.samples}
    assert len(taught) == 9
    assert len(groups_of(store)) > 9
    assert sum(float(sample.weights.sum()) for sample in learned.samples) == pytest.approx(1.0), (
        "means are over groups that teach"
    )
    assert sorted(store.trained[1]) == sorted(store.ordered), "what was sampled counts, also where it teaches nothing"
    assert store.metrics["groups"] == len(groups_of(store))
    assert store.metrics["groups_without_signal"] == len(groups_of(store)) - 9


@pytest.mark.parametrize("dynamic_sampling", [0, 9])
async def test_credit_is_assigned_once_for_each_group_also_of_those_that_taught_nothing(
    make_trainer: Callable[..., Trainer], store: Store, monkeypatch: pytest.MonkeyPatch, dynamic_sampling: int
) -> None:
    assigned: list[str] = []

    def assign(credit: IdenticalAssignment, group: TrajectoryGroup) -> Advantages:
        assigned.append(group.id)
        return inner(credit, group)

    inner = IdenticalAssignment.assign
    monkeypatch.setattr(IdenticalAssignment, "assign", assign)
    await make_trainer(steps=2, dynamic_sampling=dynamic_sampling).run()
    assert len(assigned) == len(set(assigned)), "an assigner that remembers, or is paid for, is asked once"
    assert set(assigned) == groups_of(store)
    assert (len(assigned) > 2 * 9) == (dynamic_sampling > 0)


async def test_without_it_such_groups_stay_in_the_means(
    make_trainer: Callable[..., Trainer], store: Store, learned: Learned
) -> None:
    await make_trainer().run()
    assert len(groups_of(store)) == 9
    share = 1 - store.metrics["groups_without_signal"] / 9
    assert 0 < share < 1
    assert sum(float(sample.weights.sum()) for sample in teaching_rows(learned.samples)) == pytest.approx(share)


async def test_it_gives_up_after_so_many_rounds(
    make_trainer: Callable[..., Trainer], store: Store, learned: Learned
) -> None:
    store.all_alike = True
    with pytest.raises(LightningError, match="nothing was learned in 1 steps"):
        await make_trainer(dynamic_sampling=2).run()
    assert len(groups_of(store)) == 3 * 9
    assert not learned.samples


async def test_failures_are_no_reason_to_sample_more(make_trainer: Callable[..., Trainer], store: Store) -> None:
    store.all_fail = True
    with pytest.raises(LightningError, match="every rollout failed"):
        await make_trainer(dynamic_sampling=2).run()
    assert len(groups_of(store)) == 9


@pytest.mark.parametrize("scores", [(0.5, 0.5, 0.5), (0.5, 0.75, 0.5)], ids=["still", "better"])
async def test_a_run_whose_validation_did_not_move_says_so_at_its_end(
    make_trainer: Callable[..., Trainer], store: Store, caplog: pytest.LogCaptureFixture, scores: tuple[float, ...]
) -> None:
    trainer = make_trainer(validated=True, steps=2)
    store.scores = list(scores)
    logger = JsonlLogger(trainer.folder.metrics)
    trainer.log = logger.log
    await trainer.run()
    logger.close()
    said = [message for message in caplog.messages if "validation is no better" in message]
    if scores[1] > scores[0]:
        assert not said
        return
    assert said == [
        "validation is no better than before the first step: 0.500 then, 0.500 since; 8 of 8 answers are what they were, to the letter: "
        "raise learner.learning_rate, or loop.steps"
    ]


async def test_a_resumed_step_orders_the_same_rollouts(make_trainer: Callable[..., Trainer], store: Store) -> None:
    trainer = make_trainer(dynamic_sampling=9)
    await trainer.run()
    before = dict(store.ordered)
    trainer.state = LoopState(step=0, seconds=0.0, rollouts=0)
    await trainer.run()
    assert store.ordered == before


async def test_a_role_that_no_call_has_is_named(
    make_trainer: Callable[..., Trainer], store: Store, learned: Learned, caplog: pytest.LogCaptureFixture
) -> None:
    await make_trainer(trained=["writ", "team"], paid=["wrote", "team/write"]).run()
    assert (
        "step 1: no call has the role 'writ', 'wrote', which `trained_agents` or `rewards.NAME.agents` names"
        in caplog.text
    )
    assert "roles of the calls: 'team/write'" in caplog.text


async def test_threads_that_outlive_their_rollout_are_told_of_once_and_counted(
    make_trainer: Callable[..., Trainer], store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    store.left = ("writer",)
    await make_trainer(steps=2).run()
    assert caplog.text.count("rollouts left threads running ('writer'); model calls that they make") == 1
    assert "step 1: " in caplog.text and "threads_left counts them" in caplog.text
    assert store.metrics["threads_left"] == store.metrics["rollouts"]


@pytest.mark.parametrize(("credit", "is_read"), [("grpo", False), ("turns", True)])
async def test_rewards_of_calls_that_credit_does_not_read_are_named(
    make_trainer: Callable[..., Trainer], caplog: pytest.LogCaptureFixture, credit: str, is_read: bool
) -> None:
    await make_trainer(credit=credit, intermediate=["tool_status"]).run()
    said = "step 1: intermediate_rewards.tool_status: credit.use = 'grpo' reads no rewards of calls (these do: 'turns', 'turn_gae')"
    assert (said in caplog.text) is not is_read


@pytest.mark.parametrize("options", [{}, {"gamma": 0.0}])
def test_rewards_of_calls_are_read_where_the_first_call_is_of_a_role_that_is_not_trained(
    make_trainer: Callable[..., Trainer], options: Mapping[str, float]
) -> None:
    trainer = make_trainer(trained=["player"], credit="turns", options=options, intermediate=["tool_status"])
    rollouts = [
        make_trajectory(
            name,
            [make_transition(f"{name}/0", agent="planner"), make_transition(f"{name}/1", agent="player")],
            reward=reward,
            group_id="g",
        )
        for name, reward in (("a", 1.0), ("b", 0.0))
    ]
    assert unread_rewards(trainer.recipe, trainer.scorer, trainer.scorer.credit(rollouts)) is None


CREDIT = """
import numpy as np
from lightningrl import CreditAssigner
class Mine(CreditAssigner):
    requires = frozenset()

    def assign(self, group):
        return tuple(tuple(self.of(call) for call in one.transitions) for one in group.trajectories)

    def of(self, call):
        return {returns}

    def finish_step(self, groups, advantages):
        return {monitors}
"""


@pytest.mark.parametrize(
    ("returns", "monitors", "said"),
    [
        (
            "sum(call.rewards['a'])",
            "{}",
            "credit assigner 'Mine' failed for group 'g000000': KeyError: 'a' (mine.py, line 11); mend it",
        ),
        (
            "0.5",
            "{}",
            "2 completion tokens but advantages that are a float; a credit assigner returns an array with one number per token",
        ),
        (
            "np.mean(np.zeros(2), axis=3)",
            "{}",
            "credit assigner 'Mine' failed for group 'g000000': AxisError: axis 3 is out of bounds for array of dimension 1 (mine.py",
        ),
        ("np.zeros(9)", "{}", "2 completion tokens but advantages of shape (9,); a credit assigner returns an array"),
        (
            "np.ones(2)",
            "{'a': 1 / 0}",
            "credit assigner 'Mine' failed in finish_step(): ZeroDivisionError: division by zero (mine.py",
        ),
    ],
)
async def test_credit_of_ones_own_that_breaks_ends_the_run_with_a_sentence(
    make_trainer: Callable[..., Trainer], tmp_path: Path, returns: str, monitors: str, said: str
) -> None:
    (tmp_path / "mine.py").write_text(
        CREDIT.replace("{returns}", returns).replace("{monitors}", monitors), encoding="utf-8"
    )
    with pytest.raises(PluginError, match="step 1: ") as refused:
        await make_trainer(credit="mine.py:Mine").run()
    assert said in str(refused.value)
    assert str(refused.value).endswith(f"; then go on with `lightningrl train --resume --run {tmp_path / 'run'}`")


def test_calls_that_are_not_trained_have_no_advantage_whatever_credit_of_ones_own_says(
    make_trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(CREDIT.format(returns="np.ones(1)", monitors="dict()"), encoding="utf-8")
    scorer = make_trainer(trained=["player"], credit="mine.py:Mine").scorer
    calls = [
        make_transition("r/0", agent="planner", completion=[1]),
        make_transition("r/1", agent="player", completion=[1]),
    ]
    (score,) = scorer.build(scorer.credit([make_trajectory("r", calls, reward=1.0)])).scores
    assert score.advantages == {"r/0": None, "r/1": [1.0]}


async def test_a_group_teaches_nothing_where_no_call_of_it_is_trained(
    make_trainer: Callable[..., Trainer], store: Store, learned: Learned, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(
        LightningError, match="nothing was learned in 1 steps: no call is of a policy and role that is trained"
    ):
        await make_trainer(trained=["check"]).run()
    assert store.metrics["groups_without_signal"] == store.metrics["groups"] == 9
    assert not learned.samples
    assert "no row carries a signal" in caplog.text


async def test_a_steps_spans_are_a_tree_of_what_it_did(make_trainer: Callable[..., Trainer]) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trainer = make_trainer(steps=2, tasks_per_step=2, checkpoint_every=2)
    trainer.spans = StepSpans(provider.get_tracer("test"))
    await trainer.run()
    found = sorted(exporter.get_finished_spans(), key=lambda span: span.start_time or 0)
    names = {span.context.span_id: span.name.removeprefix("lightningrl.") for span in found if span.context is not None}
    tree = [
        (span.name.removeprefix("lightningrl."), None if span.parent is None else names[span.parent.span_id])
        for span in found
    ]
    step = [("step", None), ("collect", "step"), ("score", "step")]
    assert tree == [("checkpoint", None), *step, *step, ("checkpoint", None)]
    said = [dict(span.attributes or {}) for span in found if span.name == "lightningrl.step"]
    assert [(one["lightningrl.step"], one["lightningrl.rollouts"]) for one in said] == [(1, 4), (2, 4)]
    assert all(0.0 <= float(str(one["lightningrl.reward"])) <= 1.0 for one in said)


async def test_rollouts_are_forgotten_once_no_kept_checkpoint_goes_on_from_them(
    make_trainer: Callable[..., Trainer], store: Store
) -> None:
    loop = {"steps": 8, "tasks_per_step": 2, "checkpoint_every": 2, "keep_checkpoints": 2}
    await make_trainer(**loop).run()
    assert store.forgotten == []
    await make_trainer(**loop, keep_rollouts=1, max_staleness=1).run()
    assert store.forgotten == [(2, 0), (4, 0), (6, 0)], "up to the older one of two checkpoints"
    store.forgotten.clear()
    await make_trainer(**loop, keep_rollouts=5).run()
    assert store.forgotten == [(1, 0), (3, 0)]


async def test_a_run_stops_when_validation_is_no_better_and_keeps_its_best_weights(
    make_trainer: Callable[..., Trainer], store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    store.scores = [0.1, 0.3, 0.7, 0.7, 0.2, 0.9, 0.9]
    first = make_trainer(validated=True, steps=6, patience=2, checkpoint_every=10, keep_checkpoints=1, tasks_per_step=2)
    state = await first.run()
    assert (state.step, state.best_score, state.validations_since_best) == (4, 0.7, 2), (
        "0.7 again is no better than 0.7"
    )
    assert [saved.state.step for saved in first.folder.checkpoints()] == [2, 4], (
        "the best, although no checkpoint was due, and the newest"
    )
    assert find_checkpoint(first.folder.path).state.step == 2
    stopped = (
        "stopped early after step 4: 2 validations were no better than the best, 0.700; to go on, raise loop.patience"
    )
    assert stopped in caplog.text

    caplog.clear()
    resumed = make_trainer(validated=True, steps=6, patience=2, tasks_per_step=2)
    resumed.folder.close()
    resumed.folder, resumed.state = first.folder, find_checkpoint(first.folder.path, "newest").state
    assert (await resumed.run()).step == 4, "it stays stopped"
    assert stopped in caplog.text
    patient = make_trainer(validated=True, steps=6, patience=3, tasks_per_step=2)
    patient.folder.close()
    patient.folder, patient.state = resumed.folder, resumed.state
    assert (await patient.run()).best_score == 0.9, "with more patience it goes on, and finds better"


@pytest.mark.parametrize("goes_back", [True, False])
async def test_a_policy_that_falls_far_below_its_best_goes_back_to_it(
    make_trainer: Callable[..., Trainer],
    store: Store,
    learned: Learned,
    caplog: pytest.LogCaptureFixture,
    goes_back: bool,
) -> None:
    store.scores = [0.5, 0.7, 0.2, 0.2, 0.1]
    trainer = make_trainer(validated=True, goes_back=goes_back, steps=4, tasks_per_step=2, checkpoint_every=10)
    state = await trainer.run()
    assert "the policy became worse: 0.200" in caplog.text
    assert ("after step 2 the policy goes back to its weights after step 1" in caplog.text) is goes_back
    if not goes_back:
        assert learned.went_back == []
        return
    best = trainer.folder.path / "checkpoints" / "step-000001" / "policies"
    assert learned.went_back == [(best, 0.5), (best, 0.5)], "after steps 2 and 3; at the end nothing is left to do"
    assert store.metrics["went_back_to"] == 1.0
    kept = {saved.state.step: saved.state for saved in trainer.folder.checkpoints()}
    assert kept[3].score == kept[1].score == 0.7, "a resumed run goes on from there"
    assert kept[3].rollouts == kept[1].rollouts, "the weights no longer contain what steps 2 and 3 learned"
    assert state.rollouts == kept[1].rollouts + 4
    assert find_checkpoint(trainer.folder.path).state.step == 1


async def test_a_run_stops_once_validation_reaches_its_target_and_goes_on_when_that_is_raised(
    make_trainer: Callable[..., Trainer], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.scores = [0.1, 0.3, 0.7, 0.6, 0.9]
    said: list[str] = []
    monkeypatch.setattr(LineProgress, "say", lambda _, sentence: said.append(sentence))
    first = make_trainer(validated=True, steps=6, stop_at=0.7, checkpoint_every=10, tasks_per_step=2)
    state = await first.run()
    assert (state.step, state.best_score) == (2, 0.7)
    assert find_checkpoint(first.folder.path, "newest").state.step == 2, "the weights that reached it are kept"
    assert said[-1].startswith("validation reached 0.700 after step 2 (loop.stop_at = 0.7); to go on, raise it: ")
    resumed = make_trainer(validated=True, steps=6, stop_at=0.9, tasks_per_step=2)
    resumed.folder.close()
    resumed.folder, resumed.state = first.folder, state
    assert (await resumed.run()).step == 4
