"""Trains and rehearses the runs of forecast_runs.py: engine, credit and learner of a run in this process.

Run ─► Trial ─► train      evidence of its first step, and its gain on tasks held out     runs.jsonl
            └─► rehearse   evidence with a rehearsal                                      rehearsals.jsonl

Of SmolLM2's runs the first of each generator is rehearsed.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from forecast_runs import PRETRAINED, PRETRAINED_POLICY, Run, make_family, make_policy, make_tasks, plan
from transformers import AutoTokenizer

from lightningrl.backends import GenerateRequest
from lightningrl.plugins import load_plugins
from lightningrl.types import Outcome as RolloutOutcome
from lightningrl.types import Sample, SamplingSettings, Task, Trajectory, Transition
from lightningrl_client.recipe_file import load_recipe
from lightningrl_training.build import build_backends, build_credit
from lightningrl_training.forecast.evidence import GreedyAnswers, gather, judge
from lightningrl_training.forecast.movement import measure_movement
from lightningrl_training.forecast.record import measure_outcome
from lightningrl_training.forecast.rehearsal import SAMPLES, STEPS_OF_ROLLOUTS, rehearse

__all__ = ["REHEARSALS", "RUNS", "make_runs"]

RUNS, REHEARSALS = "runs.jsonl", "rehearsals.jsonl"
TASKS = 600
HELD_OUT, OF_PRETRAINED, HELD_OUT_SAMPLES = 1024, 128, 2
"""Tasks that a run has not, and answers to each, by which its gain is measured: a step's 8 tasks are a small sample."""
VALIDATION = 64
"""Further tasks, that are answered before the first step and in a rehearsal, as validation tasks are."""


def make_runs(folder: Path) -> None:
    """Make what is not made yet."""
    folder.mkdir(parents=True, exist_ok=True)
    runs = list(plan())
    _make(folder, RUNS, _train, runs)
    pretrained = [run for run in runs if run.policy == PRETRAINED_POLICY]
    _make(folder, REHEARSALS, _rehearse, [run for run in runs if run not in pretrained[len(PRETRAINED) :]])


def _make(
    folder: Path, name: str, make: Callable[[Run, Trial], Coroutine[Any, Any, dict[str, Any]]], runs: Sequence[Run]
) -> None:
    """Write a line of `name` for each run that has none."""
    lines = folder / name
    done = {json.loads(line)["name"] for line in lines.read_text().splitlines()} if lines.exists() else set()
    pause = os.environ.get("CALIBRATE_PAUSE_FILE")  # on a machine that others measure on, at times
    for run in runs:
        if run.name in done:
            continue
        while pause and Path(pause).exists():
            time.sleep(3)
        began, error = time.monotonic(), ""
        row: dict[str, Any] = {"evidence": None, "outcome": None}
        try:
            trial = Trial(run, folder)
            row = asyncio.run(make(run, trial))
            trial.backend.close()
        except Exception as raised:  # noqa: BLE001  one run of many
            error = f"{type(raised).__name__}: {raised}"[:300]
        seconds = round(time.monotonic() - began, 1)
        with lines.open("a") as file:
            file.write(json.dumps({**asdict(run), "seconds": seconds, "error": error, **row}) + "\n")
        print(name, run.name, run.policy, run.settings, seconds, error or row.get("gain", ""), flush=True)


class Trial:
    """A policy of one call with its tasks, without server and workers."""

    def __init__(self, run: Run, folder: Path) -> None:
        place, policy = make_family(run.family, folder), make_policy(run, folder)
        self.recipe = load_recipe(place / "recipe.toml", {**run.settings, "policy.model": policy})
        plugins, models = load_plugins(), {"policy": policy}
        self.backend: Any = build_backends(self.recipe, plugins, models, will_run=False)["policy"]()
        _, self.scorer = build_credit(self.recipe, plugins, models)
        self._tokenizer = AutoTokenizer.from_pretrained(policy)
        self._tasks, self.validation = make_tasks(run, TASKS, seed=1), make_tasks(run, VALIDATION, seed=4)
        self._order = random.Random(self.recipe.loop.seed).sample(range(TASKS), TASKS)

    async def step(self, number: int) -> list[Trajectory]:
        """The rollouts of a training step, counted from 0."""
        loop = self.recipe.loop
        places = range(number * loop.tasks_per_step, (number + 1) * loop.tasks_per_step)
        chosen = [self._tasks[self._order[place % TASKS]] for place in places]
        return await self.roll_out(chosen, number, loop.group_size)

    async def roll_out(self, tasks: Sequence[Task], step: int, members: int, **sampling: Any) -> list[Trajectory]:
        settings = self.recipe.sampling.model_copy(update=sampling).settings()
        asked = (self._ask(task, f"{step}-{task.id}", n, step, settings) for task in tasks for n in range(members))
        return list(await asyncio.gather(*asked))

    async def greedy(self, step: int) -> list[Trajectory]:
        return await self.roll_out(self.validation, step, 1, temperature=0.0)

    async def _ask(self, task: Task, group: str, member: int, step: int, sampling: SamplingSettings) -> Trajectory:
        name = f"{group}-{member}"
        text = self._tokenizer.apply_chat_template(task.input, tokenize=False, add_generation_prompt=True)
        prompt = self._tokenizer.encode(text, add_special_tokens=False)
        request = GenerateRequest(id=name, prompt_ids=tuple(prompt), sampling=sampling, session=name)
        chunks = [chunk async for chunk in self.backend.engine.generate(request)]
        ids = [token for chunk in chunks for token in chunk.token_ids]
        call = Transition(
            id=name,
            policy="policy",
            policy_version=chunks[-1].policy_version,
            prompt_ids=np.asarray(prompt, np.int32),
            completion_ids=np.asarray(ids, np.int32),
            logprobs=np.asarray([value for chunk in chunks for value in chunk.logprobs], np.float32),
            finish_reason=chunks[-1].finish_reason,
            sampling=sampling,
        )
        output = str(self._tokenizer.decode(ids, skip_special_tokens=True)).strip()
        reward = float(output == task.answer)
        return Trajectory(
            rollout_id=name,
            attempt=1,
            task=task,
            group_id=group,
            outcome=RolloutOutcome.SUCCEEDED,
            transitions=(call,),
            output=output,
            rewards={"right": reward},
            reward=reward,
            step=step,
        )


async def _train(run: Run, trial: Trial) -> dict[str, Any]:
    recipe, scorer = trial.recipe, trial.scorer
    held_out = make_tasks(run, OF_PRETRAINED if run.policy == PRETRAINED_POLICY else HELD_OUT, seed=3)
    before = _reward(await trial.roll_out(held_out, -1, HELD_OUT_SAMPLES))
    greedy = GreedyAnswers.measure(judge(await trial.greedy(-2), *recipe.reward_bounds))
    rewards: list[float] = []
    first, movement = [], None
    for step in range(recipe.loop.steps):
        rollouts = await trial.step(step)
        credited = scorer.credit(rollouts)
        trial.backend.learn(scorer.build(credited).samples)
        rewards.append(_reward(rollouts))
        if step == 0:
            first, movement = credited, measure_movement({"policy": trial.backend}, credited, recipe)
    gain = _reward(await trial.roll_out(held_out, recipe.loop.steps, HELD_OUT_SAMPLES)) - before
    evidence = gather(recipe, first, movement=movement, greedy=greedy)
    assert evidence is not None
    rows = [{"step": float(step + 1), "reward": reward} for step, reward in enumerate(rewards)]
    outcome = measure_outcome(rows, evidence.reward, recipe.reward_bounds)
    return {
        "evidence": evidence.model_dump(),
        "outcome": outcome.model_dump() if outcome else None,
        "gain": gain,
        "rewards": rewards,
    }


async def _rehearse(run: Run, trial: Trial) -> dict[str, Any]:
    recipe, scorer, backends = trial.recipe, trial.scorer, {"policy": trial.backend}
    greedy = GreedyAnswers.measure(judge(await trial.greedy(-2), *recipe.reward_bounds))
    steps = [scorer.credit(await trial.step(number)) for number in range(STEPS_OF_ROLLOUTS)]
    rows = [scorer.build(step).samples for step in steps]
    movement = None
    if rows[0]:
        trial.backend.learn(rows[0])
        movement = measure_movement(backends, steps[0], recipe)

    async def look(number: int) -> tuple[float, float]:
        step = 1000 + number
        return _reward(await trial.greedy(step)), _reward(await trial.roll_out(trial.validation, step, SAMPLES))

    async def learn(rows: Sequence[Sample]) -> None:
        trial.backend.learn(rows)

    credited = [group for step in steps for group in step]
    shown = await rehearse(rows, credited, backends, most=recipe.loop.steps, learn=learn, look=look)
    evidence = gather(recipe, credited, movement=movement, greedy=greedy, rehearsed=shown)
    assert evidence is not None
    return {"evidence": evidence.model_dump()}


def _reward(rollouts: Sequence[Trajectory]) -> float:
    return fmean(rollout.reward or 0.0 for rollout in rollouts)
