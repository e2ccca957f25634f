"""A run's folder as a run leaves it, in a second: real store, real scorer, real ledger; only the agent is made up.

each step: rollouts of two roles with tools ─► store ─► Scorer (rewards, branches, credit, rows) ─► scores, ledger,
metrics
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import lightningrl
from lightningrl.plugins import load_plugins
from lightningrl.types import (
    BranchPoint,
    FinishReason,
    Outcome,
    RolloutSpec,
    Task,
    ToolCall,
    ToolStatus,
    Trajectory,
    Transition,
)
from lightningrl_client.recipe_file import with_settings
from lightningrl_credit.scoring import Scorer, score_of
from lightningrl_runs.origin import RunOrigin
from lightningrl_server.records import CallRecord, ToolCallRecord
from lightningrl_server.store import SqlStore
from lightningrl_training.build import build_credit
from lightningrl_training.evaluator import Evaluator
from lightningrl_training.run_folder import RunFolder
from lightningrl_training.tasks import plan_branches, plan_group

__all__ = ["branch_by_hand", "coin", "make_recipe", "record_run", "turn_coin"]

ROLES = ("search", "answer")
LEASE_S = 3600.0


def coin(task: Task, output: int, trajectory: Trajectory) -> float:
    """A reward: 0.0 or 1.0, as the agent's output says."""
    return float(output % 2)


def turn_coin(trajectory: Trajectory) -> list[float]:
    """An intermediate reward: some calls earn."""
    return [float(call.completion_ids[0] % 3) for call in trajectory.transitions]


def make_recipe(folder: Path, settings: Mapping[str, Any] | None = None) -> lightningrl.Recipe:
    """Two tasks a step, four rollouts each, a reward that is a coin; `settings` by dotted key go before it."""
    recipe = lightningrl.Recipe(
        agent="agent.py:answer",
        tasks=lightningrl.TasksConfig(train="tasks.py:train"),
        policy=lightningrl.PolicyConfig(model="org/model"),
        rewards={"right": lightningrl.RewardConfig(use=f"{__file__}:coin")},
        adapters=("langchain",),
        folder=folder,
    )
    return with_settings(recipe, {"loop.tasks_per_step": 2, "loop.group_size": 4, **(settings or {})})


async def record_run(
    folder: Path, recipe: lightningrl.Recipe, *, steps: int = 2, calls: int = 3, seed: int = 0
) -> None:
    """Fill `folder` with a run of so many steps, trained as the recipe's credit says."""
    RunFolder.create(folder, recipe, None, {}, models={}).close()
    random = np.random.default_rng(seed)
    evaluator, scorer = build_credit(recipe, load_plugins())
    tasks = [Task(id=f"task-{number}", input={"number": number}) for number in range(20)]
    store = await SqlStore.open(f"sqlite:///{folder / 'store.sqlite'}")
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as metrics:
        for step in range(steps):
            per_step = recipe.loop.tasks_per_step
            specs = [spec for n in range(per_step) for spec in plan_group(tasks, recipe, step * per_step + n)]
            named = await _train(store, evaluator, scorer, recipe, specs, step + 1, random, calls)
            metrics.write(json.dumps({"step": step + 1, **named}) + "\n")
    await store.close()


async def branch_by_hand(folder: Path, rollout_id: str, *, step: int, samples: int = 2) -> None:
    """What `lightningrl branch` leaves in the run's folder: the rollout and its branches, sampled by the weights after
    `step`."""
    own = folder / "branches" / f"step-{step:06d}" / rollout_id
    own.mkdir(parents=True)
    recipe = RunOrigin.read(folder).recipe
    store = await SqlStore.open(f"sqlite:///{folder / 'store.sqlite'}", read_only=True)
    spec, (recorded,) = (await store.rollout(rollout_id)).spec, await store.trajectories([rollout_id])
    calls = await store.calls(rollout_id, recorded.attempt)
    await store.close()
    store = await SqlStore.open(f"sqlite:///{own / 'store.sqlite'}")
    await store.create_rollouts([spec])
    await store.lease("copy", LEASE_S)
    for call in calls:
        await store.append_call(replace(call, attempt=1))
    await store.finish_attempt(rollout_id, 1, recorded.outcome, recorded.output)
    points = [BranchPoint(rollout_id=rollout_id, attempt=1, calls=calls) for calls in range(len(recorded.transitions))]
    orders = [order for point in points for order in plan_branches(recipe, recorded, point, samples)]
    await _run(store, orders, np.random.default_rng(0), len(calls), {rollout_id: recorded})
    evaluator, _ = build_credit(recipe, load_plugins())
    await store.set_scores(
        [score_of(one) for one in await evaluator.evaluate(await store.trajectories([order.id for order in orders]))]
    )
    await store.close()


async def _train(
    store: SqlStore,
    evaluator: Evaluator,
    scorer: Scorer,
    recipe: lightningrl.Recipe,
    specs: Sequence[RolloutSpec],
    step: int,
    random: np.random.Generator,
    calls: int,
) -> Mapping[str, float]:
    await _run(store, specs, random, calls)
    rewarded = await evaluator.evaluate(await store.trajectories([spec.id for spec in specs]), store.set_scores)
    await store.set_scores([score_of(one) for one in rewarded])  # as a collector's batches keep it
    groups: dict[str, list[Trajectory]] = {}
    for one in rewarded:
        groups.setdefault(one.group_id, []).append(one)
    credited = []
    for members in groups.values():
        points = scorer.branch_points(members)
        sources = {one.rollout_id: one for one in members}
        orders = [order for at, n in points.items() for order in plan_branches(recipe, sources[at.rollout_id], at, n)]
        await _run(store, orders, random, calls, sources)
        branches = await evaluator.evaluate(await store.trajectories([order.id for order in orders]), store.set_scores)
        credited += scorer.credit(members, branches)
    scored = scorer.build(credited)
    await store.set_scores(scored.scores)
    await store.mark_trained(step, scored.rollout_ids, scored.metrics)
    return scored.metrics


async def _run(
    store: SqlStore,
    specs: Sequence[RolloutSpec],
    random: np.random.Generator,
    calls: int,
    sources: Mapping[str, Trajectory] | None = None,
) -> None:
    await store.create_rollouts(specs)
    for spec in specs:
        lease = await store.lease("recorder", LEASE_S)
        assert lease is not None and lease.rollout_id == spec.id
        source = (sources or {}).get(spec.branch.rollout_id) if spec.branch else None
        repeated = source.transitions[: spec.branch.calls] if source is not None and spec.branch is not None else ()
        made: list[Transition] = []
        for number in range(max(calls - int(random.integers(0, 2)), len(repeated))):
            call = _call(
                spec, number, made[-1] if made else None, repeated[number] if number < len(repeated) else None, random
            )
            made.append(call)
        await store.append_calls(
            [CallRecord(rollout_id=spec.id, attempt=1, call_key=call.id, transition=call) for call in made]
        )
        tools = [_tool(call, random) for call in made]
        await store.append_tool_calls(spec.id, 1, [ToolCallRecord(tool_call=tool) for tool in tools])
        failed = random.integers(0, 12) == 0
        outcome = Outcome.AGENT_ERROR if failed else Outcome.SUCCEEDED
        await store.finish_attempt(
            spec.id, 1, outcome, int(random.integers(0, 2)), "RuntimeError: on fire" if failed else None
        )


def _call(
    spec: RolloutSpec, number: int, parent: Transition | None, repeated: Transition | None, random: np.random.Generator
) -> Transition:
    """Two rollouts of a task are in one state where the tool said the same to both."""
    seen = [] if parent is None else [*parent.prompt_ids, *parent.completion_ids, 900 + int(random.integers(0, 2))]
    prompt = np.array(seen or [7, int(spec.id[1:7]), 8], np.int32)
    completion = random.integers(10, 14, int(random.integers(2, 6))).astype(np.int32)
    if repeated is not None:
        prompt, completion = repeated.prompt_ids, repeated.completion_ids
    return Transition(
        id=f"{spec.id}/1/{number}",
        policy="policy",
        policy_version=spec.step,
        prompt_ids=prompt,
        completion_ids=completion,
        logprobs=-random.random(len(completion)).astype(np.float32),
        finish_reason=FinishReason.STOP,
        agent=ROLES[number % 2],
        parent_id=None if parent is None else parent.id,
        tool_call_ids=(f"call_{spec.id}_{number}",),
        replayed_from=None if repeated is None else repeated.id,
        started_at=float(number),
    )


def _tool(call: Transition, random: np.random.Generator) -> ToolCall:
    is_fine = bool(random.integers(0, 4))
    return ToolCall(
        id=call.tool_call_ids[0],
        name="look_up",
        arguments='{"page": 1}',
        result=f"page {int(random.integers(0, 2))}",
        status=ToolStatus.OK if is_fine else ToolStatus.ERROR,
        transition_id=call.id,
        agent=call.agent,
    )
