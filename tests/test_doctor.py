"""`lightningrl doctor`: planted faults are found, each by its check and by no other; a recipe that is well is left in
peace; the bill.

Faults of the agent share one run in which each task plants its own, faults of rewards and of the recipe look at that
run's healthy rollouts with other settings, faults of learning teach the real backend. With `--long` each is a recipe of
its own for the whole command.
"""

from __future__ import annotations

import asyncio
import inspect
import io
import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import faulty_agent
import numpy as np
import pytest
from rich.console import Console
from warm import WarmCommand

import lightningrl
from lightningrl.backends import LearnReport, MemoryPlan, Speed
from lightningrl.errors import ConfigError
from lightningrl.loading import resolve
from lightningrl.machine import FreeMemory, MemoryGrowth
from lightningrl.plugins import load_plugins
from lightningrl.recipe import Recipe
from lightningrl.types import FinishReason, Trajectory, TrajectoryGroup
from lightningrl_client.recipe_file import load_recipe, with_settings
from lightningrl_credit.scoring import unread_rewards
from lightningrl_testing.groups import make_trajectory, make_transition
from lightningrl_testing.scripted_engine import ScriptedEngine
from lightningrl_testing.tokenizers import tiny_tokenizer
from lightningrl_torch.engine import TorchEngine
from lightningrl_training import memory_check, run
from lightningrl_training.build import build_backends, build_credit
from lightningrl_training.checks import build_checked
from lightningrl_training.commands.doctor import console_for_tables, show
from lightningrl_training.commands.doctor import doctor as doctor_command
from lightningrl_training.doctor import Diagnosis, Observation, Verdict, diagnose, examination, examine
from lightningrl_training.doctor.agent_checks import markup_readable, tools_work
from lightningrl_training.doctor.bill import (
    BEYOND,
    HALF_WAY_NATS,
    Bill,
    ToCome,
    distinct_tokens,
    forecast,
    make_bill,
    moved,
    plan_run,
    prompt_tokens,
    signals_to_come,
    step_tokens,
    way_gone,
)
from lightningrl_training.doctor.examination import WeightHolder, falls_silent, forget_prompts, observe, reward, teach
from lightningrl_training.doctor.findings import Row, passed, warned
from lightningrl_training.doctor.observation import Cost, Costs, GpuMemory, Lesson, Machine, TriedStep
from lightningrl_training.doctor.recipe_checks import tasks_differ
from lightningrl_training.doctor.signal_checks import rewards_to_gain
from lightningrl_training.tasks import TaskSets

ROOT = Path(__file__).resolve().parents[1]
HERE = Path(faulty_agent.__file__)
WARN, FAIL = Verdict.WARN, Verdict.FAIL


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is wrong, and who has to say so."""

    check: str
    verdict: Verdict
    said: str
    """A pattern of the evidence."""
    agent: str = "converse"
    """Which function of `faulty_agent` the tasks name."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    also: frozenset[str] = frozenset()
    """Checks that see the same fault."""


def of_agent(agent: str, check: str, verdict: Verdict, said: str, *also: str) -> Fault:
    return Fault(agent=agent, check=check, verdict=verdict, said=said, also=frozenset(also))


def of_reward(
    name: str, verdict: Verdict, said: str, check: str = "rewards", settings: Mapping[str, Any] | None = None
) -> Fault:
    return Fault(
        check=check, verdict=verdict, said=said, settings={"rewards.given.use": f"{HERE}:{name}", **(settings or {})}
    )


AGENT_FAULTS = {
    "it makes no call": of_agent("makes_no_call", "calls", FAIL, r"(\d+) of \1 rollouts made no model call"),
    "it calls another endpoint": of_agent(
        "calls_another_endpoint", "calls", FAIL, r"models were called at 127\.0\.0\.1 \(\d+ rollouts\)"
    ),
    "every call is refused": of_agent("asks_in_vain", "calls", FAIL, "every call was refused: .*function", "errors"),
    "it raises": of_agent(
        "raises", "errors", FAIL, r"\d+ of \d+ rollouts raised; .*ValueError: no \\x1b\[2J table \\u202e named singers"
    ),
    "it retries by hand": of_agent("retries_by_hand", "retries", WARN, r"(\d+) calls of \1 rollouts repeat the prompt"),
    "it rewrites its history": of_agent("rewrites_history", "histories", WARN, r"(\d+) of \1 calls that go on"),
    "it outgrows the context": of_agent(
        "outgrows_the_context", "context", FAIL, r"\d+ of \d+ rollouts went over the context of 1024", "calls"
    ),
    "its answers are cut off": of_agent(
        "cuts_answers_off",
        "cut off",
        FAIL,
        r"\d+ of \d+ answers were cut off, most at 1 tokens \(the agent's",
        "sampling",
    ),
    "its tool never works": of_agent(
        "breaks_its_tool", "tools", FAIL, r"lookup: (\d+) of \1 failed; lookup said: no such column \\x1b\[31m"
    ),
    "its tool is unsteady": of_agent(
        "has_an_unsteady_tool", "repeats", WARN, "the same call of 'clock' was answered otherwise"
    ),
    "it tells the time": of_agent("tells_the_time", "repeats", WARN, r"(\d+) of \1 rollouts, run again .*Say it again"),
    "it fixes its seed": of_agent("fixes_its_seed", "sampling", FAIL, "said the same: the agent sends a fixed seed"),
    "it stops at once": Fault(
        agent="stops_at_once",
        check="sampling",
        verdict=FAIL,
        said="said the same: the agent stops at",
        settings={"loop.steps": 200},  # few tokens a rollout: a short run would go little of its way
    ),
    "it asks for temperature 0": of_agent(
        "asks_for_no_chance", "sampling", WARN, r"temperature=0 in \d+ calls, top_p=0.5 in \d+ calls; the run"
    ),
    "it leaves its streams": of_agent(
        "leaves_its_streams", "captured", WARN, r"\d+ of them streams that the agent left"
    ),
    "it names no role": Fault(
        agent="names_no_role",
        check="roles",
        verdict=FAIL,
        said="no call has the role 'writer'",
        settings={"policy.trained_agents": ["writer"]},
    ),
}
REWARD_FAULTS = {
    "all rewards are equal": of_reward("same_for_all", FAIL, r"all rewards are 0\.5", "variety"),
    "a reward is not finite": of_reward("no_number", FAIL, "given: returned nan"),
    "a reward is out of its range": of_reward(
        "too_much", FAIL, r"outside of its range \[0, 1\]", settings={"rewards.given.range": [0, 1]}
    ),
    "no reward has an opinion": of_reward("nothing", FAIL, r"given said nothing \(None\)"),
    "a reward is no number": of_reward("a_text", FAIL, r"returned 'very \\x1b\[2J good' of type str"),
    "a reward raises": of_reward("raising", FAIL, r"RuntimeError: the grader \\x1b\[2J is away"),
    "a trained role is misspelt": of_reward(
        "of_rollout", FAIL, "no call has the role 'wirter'", "roles", {"policy.trained_agents": ["wirter"]}
    ),
    "nobody reads the rewards of calls": of_reward(
        "of_rollout",
        WARN,
        "intermediate_rewards.each: credit.use = 'grpo' reads no",
        "settings",
        {"intermediate_rewards.each.use": f"{HERE}:of_calls"},
    ),
    "no role fits": of_reward(
        "of_rollout", WARN, "roles.critic: no call fits it", "settings", {"roles.critic.model": "critic"}
    ),
    "a schedule that is constant": of_reward(
        "of_rollout", WARN, "learner.total_steps: schedule is", "settings", {"learner.total_steps": 9}
    ),
    "the warm-up never ends": of_reward(
        "of_rollout", WARN, "10 steps end within 50", "settings", {"learner.warmup_steps": 50}
    ),
    "tasks are copies": of_reward(
        "of_rollout",
        WARN,
        "3 of 4 training tasks .* and 'same-1' has another answer",
        "tasks",
        {
            "tasks.train": f"{HERE}:all_alike",
        },
    ),
}
LEARNING_FAULTS = {
    "the learning rate is 0": Fault(
        check="learning", verdict=FAIL, said=r"\+0 nats", settings={"learner.learning_rate": 0.0}
    ),
    "the learning rate is far too small": Fault(
        check="learning",
        verdict=WARN,
        said=r"nats each in the direction asked for: in \d+ steps? that is [\d.e-]+ % of the way to where it leads",
        settings={"learner.learning_rate": 1e-6, "loop.steps": 2},
    ),
    "the loss has the wrong sign": Fault(
        check="learning",
        verdict=FAIL,
        said=r"moved their tokens by -\d",
        settings={"learner.loss": f"{HERE}:upside_down"},
    ),
    "the learner raises": Fault(
        check="learning",
        verdict=FAIL,
        said=r"the learner failed on \d+ rows: .*no \\x1b\[2J tokens",
        settings={"learner.loss": f"{HERE}:broken"},
    ),
    "the learner has too little memory": Fault(
        check="memory",
        verdict=FAIL,
        said=r"a step of the learner ran out of memory: .*allocate",
        settings={"learner.loss": f"{HERE}:greedy"},
        also=frozenset({"learning"}),
    ),
}
REFUSED = {
    "a group of one": Fault(
        check="recipe", verdict=FAIL, said="needs 'group'; set loop.group_size above 1", settings={"loop.group_size": 1}
    ),
    "no worker": Fault(check="recipe", verdict=FAIL, said="runtime.workers is 0", settings={"runtime.workers": 0}),
    "no such agent": Fault(check="recipe", verdict=FAIL, said="has no 'anwser'", settings={"agent": f"{HERE}:anwser"}),
}
WHOLE = {
    "it never ends": Fault(
        agent="never_ends",
        check="time",
        verdict=FAIL,
        said=r"\d+ of \d+ rollouts ran longer",
        settings={"runtime.timeout_s": 5.0},
    ),
}
EVERY = {**AGENT_FAULTS, **REWARD_FAULTS, **LEARNING_FAULTS, **REFUSED, **WHOLE}


RECIPE = f"""
agent = "{HERE}:answer"
tasks = {{ train = "{HERE}:tasks", validation = "{HERE}:held_out" }}
policy.model = "{ROOT}/examples/text_to_sql/starter"
rewards.given.use = "{HERE}:of_rollout"
credit.use = "grpo"
sampling = {{ max_tokens = 400, temperature = 1.4 }}
validation.every = 1
runtime = {{ workers = 1, concurrency = 4 }}
loop = {{ steps = 10, tasks_per_step = 2, group_size = 4 }}
learner.learning_rate = 1e-3
"""


def make_recipe(folder: Path, **settings: Any) -> Recipe:
    (folder / "recipe.toml").write_text(RECIPE, encoding="utf-8")
    return load_recipe(folder, settings)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Observation:
    """One run with the healthy agent and all of its faults, a task each."""
    folder = tmp_path_factory.mktemp("doctor")
    agents = ("converse", *(fault.agent for fault in AGENT_FAULTS.values()))
    recipe = make_recipe(folder, **{"tasks.options.faults": agents, "loop.tasks_per_step": len(agents)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(examination, "ENOUGH_S", 0.0)
        patch.setattr(examination, "REPEATS", len(agents))
        tried = asyncio.run(observe(recipe, build_checked(recipe, load_plugins()), folder / "scratch", folder))
    assert tried.attack is not None
    assert tried.attack.is_bad  # it pays by the rollout's number, whatever the output
    return replace(tried, attack=None)


def only(seen: Observation, agent: str) -> Observation:
    """As if the run had had this agent's tasks alone."""
    kept = [index for index, group in enumerate(seen.groups) if group.trajectories[0].task.input["fault"] == agent]
    part = replace(
        seen,
        groups=tuple(seen.groups[index] for index in kept),
        signals=tuple(seen.signals[index] for index in kept),
        repeats=tuple(repeat for repeat in seen.repeats if repeat.recorded.task.input["fault"] == agent),
        overridden=seen.overridden if agent == "asks_for_no_chance" else {},
        sampled_tokens=None,
        first=(),
    )
    return replace(part, attempts=len(part.every))


def complaints(found: Diagnosis) -> dict[str, tuple[Verdict, str]]:
    return {check: (finding.verdict, finding.evidence) for check, finding in found.complaints().items()}


def row_of(found: Diagnosis, check: str) -> str:
    """What was seen."""
    return next(row.finding.evidence for row in found.rows if row.check == check)


def assert_found(fault: Fault, found: Diagnosis) -> None:
    """By its check, with a remedy, and by no other check."""
    said = complaints(found)
    assert said.keys() - fault.also == {fault.check}, said
    verdict, evidence = said[fault.check]
    assert verdict is fault.verdict and re.search(fault.said, evidence), evidence
    assert all(finding.remedy for finding in found.complaints().values())


def test_an_agent_that_is_well_is_left_in_peace(seen: Observation) -> None:
    found = diagnose(only(seen, "converse"))
    assert complaints(found) == {}
    assert found.verdict is Verdict.PASS


@pytest.mark.parametrize("name", AGENT_FAULTS)
def test_a_fault_of_the_agent_is_found(name: str, seen: Observation) -> None:
    fault = AGENT_FAULTS[name]
    assert_found(fault, diagnose(changed(only(seen, fault.agent), fault.settings)))


@pytest.mark.parametrize("name", REWARD_FAULTS)
def test_a_fault_of_rewards_or_recipe_is_found(name: str, seen: Observation) -> None:
    assert_found(REWARD_FAULTS[name], diagnose(changed(only(seen, "converse"), REWARD_FAULTS[name].settings)))


def changed(seen: Observation, settings: Mapping[str, Any]) -> Observation:
    """The same rollouts, rewarded and credited by the recipe with these settings."""
    recipe = with_settings(seen.recipe, settings)
    evaluator, scorer = build_credit(recipe, load_plugins())
    (rewarded, error) = asyncio.run(reward(evaluator, seen.rollouts))
    (checked, _) = asyncio.run(reward(evaluator, seen.validation))
    credited = scorer.credit(rewarded)
    return replace(
        seen,
        recipe=recipe,
        tasks=seen.tasks
        if not any(key.startswith("tasks.") for key in settings)
        else TaskSets.load(recipe, lambda source: resolve(source, Path())),
        groups=tuple(one.group for one in credited),
        signals=tuple(one.has_signal for one in credited),
        validation=tuple(checked),
        reward_error=error,
        missing_roles=scorer.missing_roles(rewarded),
        unread_rewards=unread_rewards(recipe, scorer, credited),
    )


@pytest.mark.parametrize("name", LEARNING_FAULTS)
def test_a_fault_of_learning_is_found(name: str, seen: Observation, tmp_path: Path) -> None:
    fault = LEARNING_FAULTS[name]
    recipe = make_recipe(tmp_path, **fault.settings)
    backend = build_backends(recipe, load_plugins(), {"policy": recipe.policy.model})["policy"]()
    healthy = only(seen, "converse")
    _, scorer = build_credit(recipe, load_plugins())
    scored = scorer.build(scorer.credit(healthy.rollouts))

    async def learn(rows: Any) -> LearnReport:
        return backend.learn(rows)

    try:
        lesson = asyncio.run(teach(backend, scored.samples, learn))
    finally:
        backend.close()
    assert_found(fault, diagnose(replace(healthy, recipe=recipe, lessons={"policy": lesson})))


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_started_is_a_finding(name: str, tmp_path: Path) -> None:
    found = asyncio.run(examine(make_recipe(tmp_path, **REFUSED[name].settings)))
    assert_found(REFUSED[name], found)
    assert found.bill is None


# ------------------------------------------------------------------ what needs no run of its own


def test_fields_that_nobody_reads_and_a_policy_without_tools_are_said(seen: Observation) -> None:
    well = only(seen, "converse")
    assert well.ignored == {} and well.without_tools == ()
    said = complaints(diagnose(replace(well, ignored={"verbosity": 3})))
    assert said == {"settings": (Verdict.WARN, "verbosity in 3 calls of the agent")}
    toolless = replace(well, groups=(), signals=(), without_tools=("policy 'p' has none",))
    assert tools_work(toolless).evidence == "no tool was seen; policy 'p' has none"


def test_tool_calls_that_cannot_be_read_are_counted_and_one_is_shown(seen: Observation) -> None:
    well = only(seen, "converse")
    group = well.groups[0]
    first, *others = group.trajectories
    sentence = "'<tool_call>{' is no tool call: the call has no end; expected …"
    bad = replace(first, transitions=tuple(replace(call, malformed=(sentence,)) for call in first.transitions))
    found = markup_readable(replace(well, groups=(replace(group, trajectories=(bad, *others)),)))
    assert found.verdict is WARN and found.evidence.endswith(f"one: {sentence}")
    assert found.evidence.startswith("2 of 2 answers that were offered tools begin a tool call that cannot be read")
    assert markup_readable(well).evidence == "no call offered tools"


def test_a_warm_start_is_said_to_be_still_to_come(seen: Observation) -> None:
    warm = replace(seen, recipe=with_settings(seen.recipe, {"warm_start.teacher": "m@https://x.test/v1"}))
    assert row_of(diagnose(warm), "recipe").endswith(", of the policy before its warm start")
    assert "warm start" not in row_of(diagnose(seen), "recipe")


def test_a_run_that_fills_the_machine_is_found(seen: Observation) -> None:
    healthy = only(seen, "converse")
    full = replace(healthy, machine=Machine(memory=10**9, memory_used=9 * 10**8, disk_free=10**6))
    found = diagnose(full).complaints()
    assert (found["memory"].verdict, found["disk"].verdict, len(found)) == (WARN, FAIL, 2)
    assert "at most 0.90 GB of 1.00 GB" in found["memory"].evidence


def test_a_gpu_that_nobody_looked_at_has_not_passed(seen: Observation) -> None:
    healthy = only(seen, "converse")
    machine = Machine(memory=10**11, memory_used=10**9, disk_free=10**12, gpus=1)
    (lesson,) = healthy.lessons.values()
    looked_at = replace(lesson, gpu=GpuMemory(before=2 * 10**10, peak=3 * 10**10, total=8 * 10**10))
    tight = replace(lesson, gpu=GpuMemory(before=2 * 10**10, peak=7 * 10**10, total=8 * 10**10))
    found = [diagnose(replace(healthy, machine=machine, lessons={"policy": one})) for one in (lesson, looked_at, tight)]
    assert [complaints(one).keys() for one in found] == [{"memory"}, set(), {"memory"}]
    said = [row_of(one, "memory") for one in found]
    assert "of whose memory the backend says nothing" in said[0]
    assert "30.00 GB of 80.00 GB, 10.00 GB beyond" in said[1] and "70.00 GB of 80.00 GB" in said[2]


def test_what_is_left_to_gain_is_said(seen: Observation) -> None:
    said = row_of(diagnose(seen), "gain")
    assert re.search(
        r"mean reward \d\.\d\d of 0 to 1; best of \d+ \d\.\d\d, and \d+ of \d+ groups reach 1 \(pass@", said
    )

    def earn(*rewards: float) -> Observation:
        groups = (
            replace(
                group,
                trajectories=tuple(
                    replace(one, reward=reward) for one, reward in zip(group.trajectories, rewards, strict=False)
                ),
            )
            for group in seen.groups
        )
        return replace(seen, groups=tuple(groups))

    size = len(seen.groups[0].trajectories)
    solved = rewards_to_gain(earn(*[1.0] * size))
    assert solved.verdict is WARN and solved.remedy.startswith("harder tasks")
    assert "the likeliest rollouts earn 1.00" in solved.evidence
    likeliest = max(seen.groups[0].trajectories, key=_likelihood)
    where = [one is likeliest for one in seen.groups[0].trajectories]
    alone = replace(earn(*map(float, where)), groups=earn(*map(float, where)).groups[:1])
    found = rewards_to_gain(alone)
    assert f"mean reward {1 / size:.2f} of 0 to 1; best of" in found.evidence
    assert "1 of 1 groups reach 1" in found.evidence and "likeliest rollouts earn 1.00" in found.evidence
    assert rewards_to_gain(replace(alone, reward_error="it fails")).evidence == "no rollout was rewarded"


def _likelihood(rollout: Trajectory) -> float:
    return sum(float(call.logprobs.sum()) for call in rollout.transitions if call.trainable)


def test_a_step_of_the_learner_is_told_apart_from_what_engine_and_server_have(seen: Observation) -> None:
    """Where the system says so."""
    (lesson,) = seen.lessons.values()
    assert lesson.gpu is None and (lesson.grown is None or lesson.grown >= 0)
    said = next(
        row.finding.evidence
        for row in diagnose(replace(seen, lessons={"policy": replace(lesson, grown=5 * 10**8)})).rows
        if row.check == "memory"
    )
    assert "0.50 GB of them by a step of the learner alone" in said


def test_what_a_large_policy_s_memory_goes_to_is_said(seen: Observation) -> None:
    """Where no backend plans it: by the policy's size."""
    speed = Speed(parameters=135 * 10**6, trained=135 * 10**6, read=1.0, sampled=1.0, calls=8, learned=1.0)
    machine = Machine(memory=10**11, memory_used=6 * 10**9, disk_free=10**12)
    seen = replace(seen, speed=speed, machine=machine, plans={})
    said = row_of(diagnose(seen), "memory")
    assert "0.54 GB are weights, 0.54 GB their gradient, 1.08 GB Adam's moments, 3.84 GB activations" in said
    few = replace(speed, weight_bytes=270 * 10**6, moment_bytes=2.0)
    said = row_of(diagnose(replace(seen, speed=few)), "memory")
    assert "0.27 GB are weights, 0.54 GB their gradient, 0.27 GB Adam's moments, 4.92 GB activations" in said


PLAN = MemoryPlan(
    parameters=10**8,
    trained=10**8,
    weights=4 * 10**8,
    gradient=4 * 10**8,
    optimizer=8 * 10**8,
    copies=0,
    token=10**6,
    microbatch=10,
    vocabulary=1,
    key_values=10**5,
    remembered=0,
    max_batch=128,
)


def test_what_the_run_s_memory_goes_to_is_said_and_billed(seen: Observation) -> None:
    """From a plan of the policy, and from what was measured here of processes and of keys and values."""
    planned = replace(seen, plans={"policy": PLAN}, memory_idle=10**9, memory_rollouts=15 * 10**8)
    machine = Machine(memory=10**11, memory_used=10**9, disk_free=10**12)
    found = diagnose(replace(planned, machine=machine))
    assert found.bill is not None and found.bill.memory is not None
    memory = found.bill.memory
    assert (memory.processes, memory.weights, memory.optimizer) == (6 * 10**8, 4 * 10**8, 8 * 10**8)
    assert memory.key_values >= 5 * 10**8, "at least what was measured"
    assert memory.step == 18 * 10**8 + 4 * 10**8 + 10**7 + memory.logits, "keys and values are given back before it"
    assert found.bill.memory_bytes == memory.peak == max(memory.rollouts, memory.step)
    (row,) = (line for line in found.bill.lines if line.what == "memory")
    assert "0.40 GB weights + 0.80 GB Adam's moments + 0.60 GB Python, libraries, server" in row.how
    assert f"in rollouts and {memory.step / 1e9:.2f} GB in a step" in row_of(found, "memory")
    tight = diagnose(replace(planned, machine=replace(machine, memory=2 * 10**9))).complaints()
    assert tight["memory"].verdict is WARN, "the run will fill it, though what was tried did not"


def test_prompts_that_a_policy_comes_to_ask_are_remembered_beside_those_measured(seen: Observation) -> None:
    """SmolLM2's word problems: what was measured was of equal first prompts, and the bill 0.83 of the run's memory."""
    plan = replace(PLAN, key_values=100, remembered=10**9, max_batch=1)
    planned = replace(seen, plans={"policy": plan}, memory_idle=10**6, memory_rollouts=3 * 10**6)
    loop, held_out = seen.recipe.loop, len(seen.tasks.validation) if seen.recipe.validation.every else 0
    rollouts = loop.tasks_per_step * loop.group_size + held_out
    prompts = sum(len(call.prompt_ids) for one in seen.tried for call in one.transitions) / len(seen.tried)
    now, then = plan_run(planned), plan_run(planned, longer=1.5)
    assert now is not None and then is not None and now.key_values >= 2 * 10**6
    assert then.key_values - now.key_values == pytest.approx(100 * 0.5 * prompts * rollouts, rel=0.01)


def test_a_silent_group_takes_no_memory_of_a_step(seen: Observation) -> None:
    """Tokens of the largest step, by the share of groups with an advantage; logits of completions alone."""
    calls = [call for rollout in seen.rollouts for call in rollout.transitions]
    recipe = with_settings(seen.recipe, {"loop.tasks_per_step": 8, "loop.steps": 5, "loop.dynamic_sampling": 0})
    each = recipe.loop.tasks_per_step * recipe.loop.group_size / len(seen.rollouts)
    every, half, none = (
        step_tokens(replace(seen, recipe=recipe, rehearsed=(), signals=signals))
        for signals in ((True, True), (True, False), (False,))
    )
    assert every[1] == pytest.approx(each * sum(len(call.completion_ids) for call in calls))
    assert every[0] == pytest.approx(each * sum(len(call.prompt_ids) for call in calls) / recipe.loop.group_size)
    # the most of five binomial draws of 8 and 1/2 is 5.6 in the mean
    assert half[1] / every[1] == pytest.approx(5.6 / 8, abs=0.01) and 1 / 8 < none[1] / every[1] < 5.6 / 8


def test_each_step_that_is_tried_finds_the_engine_as_new_weights_leave_it() -> None:
    """A run reads its prompts anew after each step of the learner, so its bill does."""
    said: list[str] = []

    class RememberingEngine(ScriptedEngine):
        @contextmanager
        def held(self) -> Iterator[None]:
            said.append("held")
            yield
            said.append("released")

        def set_version(self, version: int) -> None:
            said.append(f"version {version}")

    forget_prompts(RememberingEngine(tiny_tokenizer()))
    assert said == ["held", "version 0", "released"]
    assert issubclass(TorchEngine, WeightHolder)


def test_the_examination_measures_what_is_there_before_the_first_rollout(seen: Observation) -> None:
    if seen.memory_idle is None:
        pytest.skip("this system does not say")
    assert seen.memory_rollouts is not None and seen.memory_rollouts >= 0.9 * seen.memory_idle > 10**7
    (plan,) = seen.plans.values()
    assert plan.weights > 0 and diagnose(seen).bill is not None


def test_too_little_memory_is_a_finding_before_anything_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = FreeMemory(free=10**6, total=10**9, where="the container's 1.00 GB")
    monkeypatch.setattr(memory_check, "free_memory", lambda: there)
    monkeypatch.setattr(examination, "observe", None)
    found = asyncio.run(examine(make_recipe(tmp_path)))
    ((check, finding),) = found.complaints().items()
    assert (check, finding.verdict, found.bill) == ("recipe", FAIL, None)
    assert re.search(
        r"policy 'policy' needs at least .* 1\.00 MB are free \(the container's 1\.00 GB\)", finding.evidence
    )
    with pytest.raises(ConfigError, match="needs at least"):
        lightningrl.train(tmp_path, run=tmp_path / "run")
    assert not (tmp_path / "run").exists(), "train says it before it makes a folder"


def test_memory_that_was_given_back_has_been_seen() -> None:
    growth = MemoryGrowth()
    if growth.most() is None:
        pytest.skip("this system does not say")
    size = 1 << 26
    np.ones(size, np.uint8)
    assert (growth.most() or 0) > 0.9 * size
    assert (MemoryGrowth().most() or 0) < 0.5 * size, "it counts from its own beginning"


def test_a_learner_that_fails_costs_no_finding_of_the_rollouts(seen: Observation) -> None:
    failed = {"policy": Lesson(rows=4, error="RuntimeError: no luck")}
    found = diagnose(replace(seen, lessons=failed))
    before = complaints(diagnose(seen))
    assert complaints(found) == {**before, "learning": (FAIL, "the learner failed on 4 rows: RuntimeError: no luck")}
    assert found.bill is not None
    (minutes,) = (line.how for line in found.bill.lines if line.what == "minutes")
    assert "s learning, until it failed)" in minutes


def test_a_time_limit_near_the_agents_own_time_is_found(seen: Observation) -> None:
    healthy = only(seen, "converse")
    slowest = max(one.duration_s for one in healthy.every)
    tight = replace(healthy, recipe=with_settings(healthy.recipe, {"runtime.timeout_s": 1.5 * slowest}))
    assert complaints(diagnose(tight)).keys() == {"time"}


def test_tokens_that_no_call_has_are_found(seen: Observation) -> None:
    healthy = only(seen, "converse")
    recorded = sum(len(call.completion_ids) for one in healthy.every for call in one.transitions)
    assert complaints(diagnose(replace(healthy, sampled_tokens=recorded))) == {}
    assert complaints(diagnose(replace(healthy, sampled_tokens=2 * recorded))).keys() == {"captured"}


def test_the_whole_observation_counts_every_token_once(seen: Observation) -> None:
    """But for the streams that were left: what was sampled of them and not sent is in no call."""
    recorded = sum(len(call.completion_ids) for one in seen.every for call in one.transitions)
    assert seen.sampled_tokens is not None
    left = [call for call in seen.calls if call.finish_reason is FinishReason.BROKEN_OFF]
    assert recorded <= seen.sampled_tokens <= recorded + 48 * len(left)
    assert seen.attempts == len(seen.every)


def test_a_step_that_asks_for_more_tasks_than_there_are_is_warned_of(seen: Observation) -> None:
    few = with_loop(only(seen, "converse"), steps=10, tasks_per_step=99, validation=0)
    few = replace(few, tasks=replace(few.tasks, train=few.tasks.train[:1], validation=()))
    finding = tasks_differ(few)
    assert finding.verdict == WARN
    assert (
        finding.evidence
        == "loop.tasks_per_step is 99, but there is 1 training task: each step asks for some more than once"
    )
    assert "set loop.tasks_per_step=1" in str(finding.remedy)


# ------------------------------------------------------------------ the bill


def test_what_an_agent_imports_for_its_first_rollout_is_billed_once(tmp_path: Path) -> None:
    recipe = make_recipe(
        tmp_path, **{"tasks.options.faults": ["is_slow_at_first"], "loop.tasks_per_step": 1, "validation.every": 0}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(examination, "ENOUGH_S", 0.0)
        seen = asyncio.run(observe(recipe, build_checked(recipe, load_plugins()), tmp_path / "scratch", tmp_path))
    assert seen.costs.start.seconds > faulty_agent.IMPORT_S > 2 * seen.costs.collect.seconds
    assert {one.rollout_id for one in seen.first} == {"g000000-000-first", "g000000-001-first"}
    assert seen.attempts == len(seen.every) and not complaints(diagnose(replace(seen, attack=None)))


def test_a_step_moves_no_group_without_an_advantage(seen: Observation) -> None:
    """GEM's games: one group of eight had one, and the bill had 3.4 times the run's prompt tokens."""
    groups = (mixed_group(seen, 1, 0), mixed_group(seen, 0, 0), mixed_group(seen, 0, 0), mixed_group(seen, 0, 0))
    short = replace(groups[0].trajectories[1], transitions=groups[0].trajectories[1].transitions[:1])
    first = replace(groups[0], trajectories=(groups[0].trajectories[0], short))
    healthy = replace(only(seen, "converse"), costs=COSTS, validation=(), groups=(first, *groups[1:]))
    tried = with_loop(healthy, steps=3, tasks_per_step=4, validation=0)
    (few, all_of_them) = (
        next(line.how for line in make_bill(replace(tried, signals=signals)).lines if line.what == "prompt tokens")
        for signals in ((True, False, False, False), (True, True, True, True))
    )
    nats = moved(tried)
    assert f"{100 * way_gone(nats / 4, 2):.0f} % of the way in 2 steps" in few
    assert f"{100 * way_gone(nats, 2):.0f} % of the way in 2 steps" in all_of_them


def test_the_bill_multiplies_what_was_tried(seen: Observation) -> None:
    healthy = replace(only(seen, "converse"), costs=COSTS, lessons={})  # nobody says that anything is learned
    calls = healthy.calls
    checked = [call for one in healthy.validation for call in one.transitions]
    bill = make_bill(with_loop(healthy, steps=10, tasks_per_step=3, validation=4))
    assert (bill.steps, bill.rollouts) == (10, 10 * 3 * 4 + 4)  # before the first step, after 4, 8 and the last
    prompts = 30 * sum(len(call.prompt_ids) for call in calls) + 4 * sum(len(call.prompt_ids) for call in checked)
    assert bill.prompt_tokens == pytest.approx(prompts)
    assert bill.trained_tokens == pytest.approx(30 * COSTS.trained_tokens)
    # start 6, a group 2, learning 1 for each group, a validation 3, a checkpoint 0.5 before the first step and after
    # the last
    assert 60 * bill.minutes == pytest.approx(6 + 30 * (2 + 1) + 4 * 3 + 2 * 0.5)
    assert bill.cpu_minutes is None, "nobody said what learning took"
    assert bill.disk_bytes == pytest.approx(124 * 500 / 5 + 2 * 1000)


def test_where_no_group_teaches_learning_is_billed_as_if_half_of_them_did(seen: Observation) -> None:
    """SmolLM2's word problems: none of 16 groups had an advantage; at half a group the bill had 0.6 times the CPU minutes
    of a run that came to learn."""
    healthy = replace(only(seen, "converse"), lessons={}, validation=())
    two = replace(healthy, groups=healthy.groups * 2, signals=(True, True))
    tried = with_loop(two, steps=10, tasks_per_step=3, validation=0)
    costs = replace(COSTS, learned_groups=2)
    planted = replace(costs, learn=Cost(), planted=costs.learn)
    learning, silent = (
        next(line for line in make_bill(one).lines if line.what == "minutes")
        for one in (replace(tried, costs=costs), replace(tried, costs=planted, signals=(False, False)))
    )
    assert 60 * (learning.amount - silent.amount) == pytest.approx(15 * 1.0 * 0.5)
    assert learning.low is not None and silent.low is not None
    assert 60 * (learning.low - silent.low) > 5.0 and silent.high == learning.high
    assert "0.8 s learning" in silent.how


def test_where_no_group_shows_the_way_validation_does(seen: Observation) -> None:
    """SmolLM2's word problems: what it solved of validation took two calls, and the run came to make two."""
    long = only(seen, "converse").rollouts[0]
    short = replace(long, transitions=long.transitions[:1])
    tokens = [prompt_tokens(one) for one in (long, short)]
    alike = tuple(replace(short, reward=0.0) for _ in range(2))
    step = TriedStep(groups=(replace(mixed_group(seen, 0), trajectories=alike),), signals=(False,))
    solved = (replace(long, reward=1.0), replace(short, reward=0.0))
    to_come = ToCome(steps=10, groups=10, nats=1e9)
    assert forecast([step], prompt_tokens, to_come, solved).learned == pytest.approx(tokens[0] / tokens[1])
    assert (
        forecast([step], prompt_tokens, to_come).learned == forecast([step], prompt_tokens, to_come, ()).learned == 1.0
    )
    # of a planted lesson half counts
    healthy = replace(only(seen, "converse"), costs=COSTS, validation=solved, groups=step.groups, signals=(False,))
    tried = with_loop(healthy, steps=3, tasks_per_step=1, validation=1)
    lesson = Lesson(rows=2, is_planted=True, gain=0.1)
    how = next(
        line.how for line in make_bill(replace(tried, lessons={"policy": lesson})).lines if line.what == "prompt tokens"
    )
    nats = 0.1 * sum(len(call.completion_ids) for call in short.transitions)
    assert f"{100 * way_gone(nats / 2, 2):.0f} % of the way in 2 steps" in how


def mixed_group(seen: Observation, *rewards: float) -> TrajectoryGroup:
    """A group of equal rollouts that earned these rewards."""
    one = only(seen, "converse").rollouts[0]
    members = tuple(replace(one, reward=reward) for reward in rewards)
    return replace(only(seen, "converse").groups[0], trajectories=members, branches=())


def test_learning_is_billed_less_as_groups_fall_silent(seen: Observation) -> None:
    """SmolLM2's sums: 8 of 8 groups had an advantage in step 2 and 1 of 8 in step 10, and the bill had 1.13 to 1.27
    times the run's CPU minutes."""
    healthy = replace(
        only(seen, "converse"), costs=COSTS, validation=(), signals=(True,), groups=(mixed_group(seen, 1, 0, 1, 0),)
    )
    pace = math.log(2) * moved(healthy) / HALF_WAY_NATS
    assert pace > 0
    tried = with_loop(healthy, steps=10, tasks_per_step=1, validation=0)
    as_before = make_bill(replace(tried, falls_silent=False))
    # of two rollouts that earned less
    signals = [1 - pace * n / (pace * n + 1) * 2 * pace * n / (2 * pace * n + 1) for n in range(1, 10)]
    fewer = sum(1 - signal for signal in signals)
    bill = make_bill(replace(tried, falls_silent=True))
    assert 60 * (as_before.minutes - bill.minutes) == pytest.approx(fewer * COSTS.learn.seconds)
    assert bill.trained_tokens == pytest.approx((10 - fewer) * COSTS.trained_tokens)
    (minutes, trained) = (line for line in bill.lines if line.what in ("minutes", "trained tokens"))
    for line in (minutes, trained):
        assert line.low is not None and line.high is not None and line.low < line.amount < line.high
    assert f"{100 * sum(signals) / 9:.0f} % of those to come" in (minutes.how + trained.how)
    chosen = replace(tried, recipe=with_settings(tried.recipe, {"loop.dynamic_sampling": 2}))
    assert make_bill(replace(chosen, falls_silent=True)).minutes == make_bill(chosen).minutes, "others stand in"


def test_groups_fall_silent_as_fast_as_what_is_left_to_earn_fell_in_a_rehearsal(seen: Observation) -> None:
    first, later = (
        TriedStep(groups=(mixed_group(seen, *rewards),), signals=(True,)) for rewards in ((1, 0, 0, 0), (1, 1, 1, 0))
    )
    to_come = ToCome(steps=1, groups=1, nats=1e9, falls_silent=True)
    far = (replace(to_come, nats=nats) for nats in (1e9, math.inf))
    assert all(0.0 < signals_to_come([first, later], one) < 0.1 for one in far), "a step moves it so far"
    assert signals_to_come([first, later], replace(to_come, nats=math.nan)) == 1.0, "a learner that fell apart"
    # from 0.75 to 0.25 in 2.5 steps, and one rollout is left; steps of the last four are 4, 3, 2 and 1 steps away
    pace = math.log(3) / 2.5
    left = sum(1 - n * pace / (n * pace + 1) for n in (1, 2, 3, 4)) / 4
    assert signals_to_come([first, *[later] * 4], to_come) == pytest.approx(left)
    assert signals_to_come([first] * 5, to_come) == 1.0, "it does not learn"
    assert signals_to_come([first, *[later] * 4], replace(to_come, falls_silent=False)) == 1.0


def test_it_is_tried_whether_a_group_of_equal_rewards_is_silent(seen: Observation) -> None:
    """Its own rewards of calls differ still, and `turns` reads them."""
    group = mixed_group(seen, 1.0, 0.0)
    trajectories = tuple(
        replace(one, transitions=tuple(replace(call, rewards={"each": one.reward or 0.0}) for call in one.transitions))
        for one in group.trajectories
    )
    for method, is_silent in (("grpo", True), ("turns", False)):
        settings = {"credit.use": method, "intermediate_rewards.each.use": f"{HERE}:of_calls"}
        _, scorer = build_credit(with_settings(seen.recipe, settings), load_plugins())
        credited = scorer.credit(trajectories)
        assert [one.has_signal for one in credited] == [True]
        assert falls_silent(scorer, [one.group for one in credited]) is is_silent
        assert not falls_silent(scorer, [])
    assert seen.falls_silent, "the examination asks"


def test_curves_that_are_drawn_beside_the_work_are_in_cpu_minutes_alone(seen: Observation) -> None:
    tried = with_loop(only(seen, "converse"), steps=10, tasks_per_step=3, validation=4)

    def bill_of(draw: float) -> Bill:
        costs = replace(COSTS, learn=Cost(seconds=1.0, cpu_seconds=1.0), draw=Cost(cpu_seconds=draw))
        return make_bill(replace(tried, costs=costs))

    none, some = bill_of(0.0), bill_of(0.5)
    assert none.minutes == some.minutes
    assert 60 * ((some.cpu_minutes or 0.0) - (none.cpu_minutes or 0.0)) == pytest.approx((10 + 4) * 0.5)


def test_the_bill_ends_with_the_recipes_minutes(seen: Observation) -> None:
    healthy = replace(only(seen, "converse"), costs=COSTS)
    learning = with_loop(healthy, steps=1000, tasks_per_step=1, validation=0, minutes=1.0)
    bill = make_bill(replace(learning, lessons={}))
    assert bill.steps == 20  # of 3 s each
    assert bill.steps < make_bill(learning).steps < 30, "more steps of less learning; each takes 2 s to collect"
    assert "loop.minutes = 1 ends it" in bill.lines[0].how
    assert 60 * bill.minutes == pytest.approx(60 + 6, abs=4)


def test_the_bill_says_from_where_to_where_learning_may_lead(seen: Observation) -> None:
    """Two rollouts of one task: one of two calls, and the same rollout stopped after its first call; whichever earns
    more is the end."""
    healthy = only(seen, "converse")
    whole = healthy.rollouts[0]
    first = replace(whole, transitions=whole.transitions[:1])
    tokens = [sum(len(call.prompt_ids) for call in one.transitions) for one in (whole, first)]
    mean = sum(tokens) / 2
    for rewards, best in (((1.0, 0.0), tokens[0]), ((0.0, 1.0), tokens[1]), ((0.5, 0.5), mean)):
        beyond = mean + BEYOND * (best - mean)
        pair = tuple(replace(one, reward=reward) for one, reward in zip((whole, first), rewards, strict=True))
        tried = replace(healthy, groups=(replace(healthy.groups[0], trajectories=pair),), validation=(), lessons={})
        line, moved = (
            next(line for line in make_bill(replace(tried, lessons=lessons)).lines if line.what == "prompt tokens")
            for lessons in ({}, {"policy": Lesson(rows=1, gain=1e9)})
        )
        assert (line.low, line.high) == pytest.approx(
            (min(beyond, mean) / mean * line.amount, max(beyond, mean) / mean * line.amount)
        )
        assert f"leads to {100 * best / mean:.0f} % of that; 0 % of the way in 9 steps" in line.how, (
            "nobody says how far a step goes"
        )
        assert moved.amount == pytest.approx((1 + 9 * best / mean) / 10 * line.amount), "the first step is as it was"
        assert (moved.low, moved.high) == pytest.approx((line.low, line.high))
    nothing = make_bill(replace(healthy, groups=(), signals=()))
    assert all(line.low is None or line.low == pytest.approx(line.amount) for line in nothing.lines)


def test_a_rehearsal_is_billed_as_it_was_and_what_comes_after_it_as_it_ended(seen: Observation) -> None:
    """Four steps of rollouts of one call, where the policy as it is makes two: nothing else is left of its length in
    the run."""
    healthy = replace(only(seen, "converse"), costs=COSTS, lessons={})
    whole = healthy.rollouts[0]
    assert len(whole.transitions) == 2

    def step(calls: int, signal: bool = True) -> TriedStep:
        one = replace(whole, transitions=whole.transitions[:calls], reward=None)
        return TriedStep(groups=(replace(healthy.groups[0], trajectories=(one, one), branches=()),), signals=(signal,))

    long, short = step(2), step(1)
    share = prompt_tokens(short.groups[0].trajectories[0]) / prompt_tokens(long.groups[0].trajectories[0])
    tried = with_loop(
        replace(healthy, groups=long.groups, signals=(True,), validation=()), steps=12, tasks_per_step=1, validation=0
    )
    as_it_is = make_bill(tried)
    bill = make_bill(replace(tried, rehearsed=(long, long, short, short, short, short)))
    assert bill.prompt_tokens == pytest.approx(as_it_is.prompt_tokens * (3 + 9 * share) / 12), "the first step is long"
    (line,) = (line for line in bill.lines if line.what == "prompt tokens")
    assert (
        f"{100 * share:.0f} % of that after 6 rehearsed steps; learning leads to {100 * share:.0f} % of that; 0 % of the way in 5"
        in line.how
    )
    assert line.low == pytest.approx(as_it_is.prompt_tokens * (2 + 10 * share) / 12), "its rollouts will be others"
    assert line.high == pytest.approx(as_it_is.prompt_tokens * (2 + 4 * share + 6) / 12), "and they may be long again"
    # groups that fell silent
    silent = make_bill(replace(tried, rehearsed=(long, *[step(2, signal=False)] * 5)))
    assert silent.trained_tokens == pytest.approx(as_it_is.trained_tokens * 2 / 12)
    # what collecting and learning took is of seven steps, of which four were short
    both = [distinct_tokens(one) for one in (whole, short.groups[0].trajectories[0])]
    shorter = both[1] / both[0]
    assert 60 * bill.minutes == pytest.approx(6 + 3 * 0.5 + (2 + 1) * (3 + 9 * shorter) / (3 + 4 * shorter))


def test_a_history_that_the_next_call_goes_on_from_takes_no_time_again() -> None:
    """SmolLM2's word problems: a second call made the bill 1.36 times the run's CPU minutes."""
    first = make_transition("a", prompt=[1, 2, 3], completion=[4, 5])
    further = make_transition("b", prompt=[1, 2, 3, 4, 5, 6], completion=[7, 8])
    other = make_transition("c", prompt=[9, 2], completion=[3])
    again = make_transition("d", prompt=[1, 2, 8], completion=[3])
    counts = [distinct_tokens(make_trajectory("r", calls)) for calls in ([first], [first, further])]
    assert counts == [5, 8]
    assert distinct_tokens(make_trajectory("r", [further, other, first, again])) == 8 + 3 + 2


def test_a_validation_after_the_last_step_is_billed_as_long_as_rollouts_are_then(seen: Observation) -> None:
    """A policy that makes one call, and after the one step that was rehearsed two."""
    healthy = replace(only(seen, "converse"), costs=replace(COSTS, validate=Cost(seconds=300.0)), lessons={})
    long = healthy.rollouts[0]
    short = replace(long, transitions=long.transitions[:1])
    groups = [replace(healthy.groups[0], trajectories=(one, one), branches=()) for one in (short, long)]
    tried = replace(
        healthy,
        groups=(groups[0],),
        validation=(short,),
        signals=(True,),
        rehearsed=(TriedStep(groups=(groups[1],), signals=(True,)),),
    )
    lengths = [distinct_tokens(one) for one in (short, long)]
    longer = lengths[1] / lengths[0]
    bill = make_bill(with_loop(tried, steps=2, tasks_per_step=1, validation=1))
    steps = (2 + 1) * 2 / (1 + longer) * (1 + longer) / 2  # of the two that were tried, as they were
    count = len(healthy.tasks.validation)
    # before the first step, after it, and at the end, when it is as the steps that were tried
    validations = 300 * count * (1 + longer + (1 + longer) / 2)
    assert 60 * bill.minutes == pytest.approx(6 + steps + validations + 2 * 0.5)


def test_groups_in_which_nobody_earns_lead_to_where_the_earners_of_the_others_are(seen: Observation) -> None:
    """Two rollouts of two tasks: of the first the longer one earns, of the second, two short ones, none."""
    long = only(seen, "converse").rollouts[0]
    short = replace(long, transitions=long.transitions[:1])
    pairs = [((long, 1.0), (short, 0.0)), ((short, 0.0), (short, 0.0))]
    groups = tuple(
        replace(
            seen.groups[0],
            trajectories=tuple(replace(one, reward=reward) for one, reward in pair),
            branches=(),
        )
        for pair in pairs
    )
    step, to_come = TriedStep(groups=groups, signals=(True, False)), ToCome(steps=10, groups=20, nats=1e9)
    ahead = forecast([step], prompt_tokens, to_come)
    tokens = [prompt_tokens(one) for one in (long, short)]
    assert ahead.learned == pytest.approx(tokens[0] / ((tokens[0] + 3 * tokens[1]) / 4))
    solved = tuple(
        replace(group, trajectories=tuple(replace(one, reward=1.0) for one in group.trajectories)) for group in groups
    )
    assert forecast([replace(step, groups=solved)], prompt_tokens, to_come).learned == pytest.approx(1.0)


def test_a_run_of_two_steps_has_its_second_rehearsed(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, **{"tasks.options.faults": ["converse"], "loop.steps": 2, "validation.every": 0})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(examination, "ENOUGH_S", 0.0)
        seen = asyncio.run(
            observe(recipe, build_checked(recipe, load_plugins()), tmp_path / "scratch", tmp_path, rehearse=1e9)
        )
    assert len(seen.rehearsed) == 1


def test_a_rehearsal_takes_steps_with_the_weights_of_those_before(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, **{"tasks.options.faults": ["converse"], "loop.steps": 7, "validation.every": 0})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(examination, "ENOUGH_S", 0.0)
        seen = asyncio.run(
            observe(recipe, build_checked(recipe, load_plugins()), tmp_path / "scratch", tmp_path, rehearse=1e9)
        )
    versions = [
        {call.policy_version for group in step.groups for one in group.trajectories for call in one.transitions}
        for step in seen.steps
    ]
    assert versions == [{0}, {1}, {2}], "a third of seven steps, and each by the newest weights"
    assert [group.trajectories[0].group_id for step in seen.steps for group in step.groups] == [
        f"g{number:06d}" for number in range(6)
    ]
    assert re.search(r"; mean reward [\d.]+, in 2 more steps [\d.]+$", row_of(diagnose(seen), "learning"))
    assert "after 2 rehearsed steps" in next(line.how for line in make_bill(seen).lines if line.what == "prompt tokens")


def test_a_learner_that_fails_in_a_rehearsal_is_found(tmp_path: Path) -> None:
    settings = {
        "tasks.options.faults": ["converse"],
        "loop.steps": 30,
        "validation.every": 0,
        "learner.loss": f"{HERE}:fails_at_the_third",
    }
    recipe = make_recipe(tmp_path, **settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(examination, "ENOUGH_S", 0.0)
        seen = asyncio.run(
            observe(recipe, build_checked(recipe, load_plugins()), tmp_path / "scratch", tmp_path, rehearse=1e9)
        )
    assert len(seen.rehearsed) == 1
    verdict, evidence = complaints(diagnose(seen))["learning"]
    assert verdict is FAIL and "ValueError: no third step" in evidence
    assert seen.costs.learn.seconds > 0.0, "what two steps took is in it"
    (minutes,) = (line.how for line in make_bill(seen).lines if line.what == "minutes")
    assert "s learning, until it failed" in minutes


def test_the_command_and_python_rehearse_as_long() -> None:
    in_command, in_python = (
        inspect.signature(function).parameters["rehearse"].default for function in (doctor_command, run.doctor)
    )
    assert in_command == in_python > 0


def test_a_step_that_moves_rollouts_far_takes_a_run_where_learning_leads_and_none_leaves_it_where_it_is() -> None:
    assert way_gone(0.0, 50) == way_gone(1.0, 0) == way_gone(-1.0, 50) == 0.0
    assert way_gone(HALF_WAY_NATS, 2) == pytest.approx((1 / 2 + 3 / 4) / 2)
    assert way_gone(HALF_WAY_NATS / 3, 3) == pytest.approx(np.mean([1 - 2 ** -(step / 3) for step in (1, 2, 3)]))
    assert way_gone(1e-7, 1) < 1e-6
    assert way_gone(1e9, 1) == pytest.approx(1.0)
    assert way_gone(math.inf, 1) < 1.0 and way_gone(math.nan, 1) == 0.0, "what is billed is never divided by nothing"


def test_a_range_of_the_bill_holds_the_mean_of_other_samples_in_95_of_100(seen: Observation) -> None:
    """Of so many groups, where nothing is learned: rollouts are drawn from the same few."""
    rng = np.random.default_rng(0)
    whole = only(seen, "converse").rollouts[0]
    lengths = {calls: replace(whole, transitions=whole.transitions[:calls], reward=None) for calls in (0, 1, 2)}
    tokens = {calls: prompt_tokens(one) for calls, one in lengths.items()}
    held, trials = 0, 400
    for _ in range(trials):
        tried, real = rng.integers(0, 3, (8, 4)), rng.integers(0, 3, (40, 4))
        groups = [
            replace(seen.groups[0], trajectories=tuple(lengths[int(calls)] for calls in row), branches=())
            for row in tried
        ]
        step = TriedStep(groups=tuple(groups), signals=())
        ahead = forecast([step], prompt_tokens, ToCome(steps=10, groups=len(real), nats=0.0))
        mean, truth = (np.mean([[tokens[int(calls)] for calls in row] for row in rows]) for rows in (tried, real))
        held += bool(ahead.low * mean <= truth <= ahead.high * mean)
    assert 0.92 * trials < held < 0.98 * trials, held


def test_the_bill_has_the_groups_that_dynamic_sampling_leaves_out(seen: Observation) -> None:
    healthy = replace(only(seen, "converse"), costs=COSTS)
    half = replace(healthy, groups=healthy.groups * 4, signals=(True, False, True, False))
    plain, dynamic, capped = (
        make_bill(with_loop(half, steps=10, tasks_per_step=2, validation=0, dynamic_sampling=extra)).rollouts
        for extra in (0, 3, 0)
    )
    assert (plain, dynamic, capped) == (80, 160, 80)


COSTS = Costs(
    start=Cost(seconds=6.0, cpu_seconds=6.0),
    collect=Cost(seconds=2.0, cpu_seconds=2.0),
    learn=Cost(seconds=1.0),
    validate=Cost(seconds=3.0, cpu_seconds=3.0),
    save=Cost(seconds=0.5, cpu_seconds=0.5),
    checkpoint_bytes=1000,
    store_bytes=500,
    trained_tokens=7,
    learned_groups=1,
)
"""Of one group and one validation rollout."""


def with_loop(seen: Observation, *, steps: int, tasks_per_step: int, validation: int, **loop: Any) -> Observation:
    settings = {"loop.steps": steps, "loop.tasks_per_step": tasks_per_step, "validation.every": validation}
    return replace(
        seen, recipe=with_settings(seen.recipe, {**settings, **{f"loop.{name}": value for name, value in loop.items()}})
    )


# ------------------------------------------------------------------ the command


def test_the_findings_are_json(seen: Observation) -> None:
    found = json.loads(json.dumps(diagnose(seen).as_json()))
    assert found["verdict"] == "fail"
    assert [row["check"] for row in found["checks"]][:3] == ["recipe", "calls", "errors"]
    assert {line["what"] for line in found["bill"]["lines"]} >= {"steps", "prompt tokens", "minutes", "disk"}


def test_the_terminal_is_shown_hostile_text_and_obeys_none(seen: Observation) -> None:
    said = io.StringIO()
    show(diagnose(only(seen, "raises")), Console(file=said, width=200))
    assert r"ValueError: no \x1b[2J table \u202e named singers" in said.getvalue()
    assert "\x1b" not in said.getvalue() and "\u202e" not in said.getvalue()
    assert re.search(r"^errors +fail ", said.getvalue(), re.MULTILINE)
    assert re.search(r"^minutes +[\d.,]+ +[\d.,]+ – [\d.,]+ +start \d+ s \+ 10 ×", said.getvalue(), re.MULTILINE)


def test_a_page_that_is_piped_breaks_no_line_and_in_brief_says_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "7 of 16 tasks are in both sets, and so on " * 4 + "END"
    findings = (passed(said), warned(said, "take them out of one"), passed("fine"))
    rows = tuple(Row(check=f"check{number}", asks="?", finding=finding) for number, finding in enumerate(findings))
    diagnosis = Diagnosis(rows=rows, bill=None)
    for columns in (None, "80"):
        monkeypatch.setenv("COLUMNS", columns) if columns else monkeypatch.delenv("COLUMNS", raising=False)
        show(diagnosis, console_for_tables())
        lines = capsys.readouterr().out.splitlines()
        assert all(line == line.rstrip() for line in lines)
        assert (max(map(len, lines)) <= 80) == bool(columns)
        assert len([line for line in lines if line.startswith("check0") and line.endswith("END")]) == (not columns)
    show(diagnosis, console_for_tables(), is_brief=True)
    assert re.findall(r"^check\d", capsys.readouterr().out, re.MULTILINE) == ["check1"]
    show(Diagnosis(rows=rows[::2], bill=None), console_for_tables(), is_brief=True)
    assert capsys.readouterr().out == "all 2 checks pass\n"


@pytest.mark.slow
def test_a_library_that_sets_up_logging_prints_no_line_for_each_of_our_requests(
    tmp_path: Path, warm: WarmCommand
) -> None:
    """`gem` does, as it is imported: a doctor of GEM's games printed 224 of them."""
    own = f"import logging, sys\nlogging.basicConfig(level=logging.INFO)\nsys.path.append({str(HERE.parent)!r})\n"
    (tmp_path / "loud.py").write_text(f"{own}from faulty_agent import of_rollout\n", encoding="utf-8")
    (tmp_path / "recipe.toml").write_text(RECIPE.replace(f"{HERE}:of_rollout", "loud.py:of_rollout"), encoding="utf-8")
    ran = warm.run("lightningrl", "try", ".", cwd=tmp_path)
    assert "1 rollout" in ran.stdout or "reward" in ran.stdout
    assert "HTTP Request" not in ran.stdout + ran.stderr


def test_a_failed_check_is_the_exit_status(tmp_path: Path, warm: WarmCommand) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE, encoding="utf-8")
    ran = warm.run(
        "lightningrl",
        "doctor",
        ".",
        "--json",
        "--set",
        "loop.group_size=1",
        "--set",
        "policy.model=nowhere",
        cwd=tmp_path,
    )
    assert ran.returncode == 1
    found = json.loads(ran.stdout)
    assert [row["verdict"] for row in found["checks"]] == ["fail", "fail"], "all that is wrong, not the first"
    assert found["bill"] is None
    bad = warm.run("lightningrl", "doctor", "nowhere", cwd=tmp_path)
    assert bad.returncode in (1, 2) and "no recipe at 'nowhere'" in " ".join(bad.stderr.split())


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_every_fault_is_found_by_the_whole_command(name: str, tmp_path: Path, warm: WarmCommand) -> None:
    fault = EVERY[name]
    (tmp_path / "recipe.toml").write_text(RECIPE, encoding="utf-8")
    settings = {"tasks.options.faults": [fault.agent], "tasks.options.each": 4, **fault.settings}
    given = [
        word
        for key, value in settings.items()
        for word in ("--set", f"{key}={json.dumps(value) if value != {} else '{}'}")
    ]
    ran = warm.run("lightningrl", "doctor", ".", "--json", *given, cwd=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.toml"], "nothing is left behind"
    rows = json.loads(ran.stdout)["checks"]
    said = {row["check"]: row for row in rows if row["verdict"] != "pass"}
    assert ran.returncode == int(any(row["verdict"] == "fail" for row in rows))
    assert said[fault.check]["verdict"] == fault.verdict and re.search(fault.said, said[fault.check]["evidence"]), said
    # where nothing can be learned, that is said as well; and so is it where one-call rollouts happen to be equal
    assert said.keys() <= {fault.check, "learning", "sampling", *fault.also}, said
