"""Are the values that replay branching measures the true ones? The real way: agent, worker, server, engine, `credit.use
= "branches"`.

    python benchmarks/credit/branched.py         guess and sql, every state of 80 rollouts branched 32 times

Rollouts of each game are branched at every state between two calls. Of each state that was reached, the mean return of
its branches is held against its value as it is counted out under the same weights (`values.py`): V̂ - V in standard
errors √(V(1 - V)/K) of K branches, as a game pays 1 or 0. Of states with few expected wins or losses (K·V·(1 - V) < 2)
such an error is not near normal: they are counted apart, by whether their wins are within what 95 % of binomial draws
are.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import asyncio
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from games import GAMES
from rich.console import Console
from rich.table import Table
from starter import build_starter
from tasks import states, true_values

import lightningrl
from lightningrl.recipe import Recipe
from lightningrl.records import RolloutFilter
from lightningrl.types import Outcome, RolloutMode, Trajectory
from lightningrl_server.store import SqlStore
from lightningrl_torch.backend import TorchBackend

__all__ = ["BranchValues", "measure"]

HERE = Path(__file__).resolve().parent
NORMAL_FROM = 2.0
"""K·V·(1 - V) from which the error of a mean is taken for normal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BranchValues:
    """The values that branches of one game measured, beside the true ones."""

    branches: int
    diverged: int
    deviations: tuple[float, ...]
    """(V̂ - V) / SE of each state whose error is near normal."""
    rare: int
    """Other states."""
    rare_within: int
    """Of them, whose number of wins lies within the middle 95 % of a binomial draw."""

    @property
    def within(self) -> float:
        """Share of states within two standard errors; 0.954 of exact values of a normal error."""
        return float(np.mean(np.abs(self.deviations) <= 2.0))


def measure(game: str, policy: Path, run: Path, *, samples: int, groups: int, seed: int = 0) -> BranchValues:
    """`run` takes the run folder."""
    recipe = Recipe.model_validate(
        {
            "name": game,
            "folder": HERE,
            "agent": "tasks.py:play",
            "tasks": {"train": "tasks.py:train_tasks", "options": {"game": game}},
            "policy": {"model": str(policy)},
            "rewards": {"won": {"use": "tasks.py:won"}},
            "credit": {"use": "branches", "options": {"samples": samples, "equal": True}},
            "sampling": {"max_tokens": 1},
            "validation": {"every": 0},
            "loop": {"steps": 1, "tasks_per_step": groups, "group_size": 2, "seed": seed},
            "runtime": {"concurrency": 16, "workers": 1},
        }
    )
    lightningrl.train(recipe, run=run)
    trajectories = asyncio.run(_read(run))
    backend = TorchBackend(policy=str(policy), device="cpu", threads=1)
    try:
        return compare(trajectories, lambda task: true_values(backend, task))
    finally:
        backend.close()


def compare(trajectories: list[Trajectory], values_of: Any) -> BranchValues:
    by_name = {one.rollout_id: one for one in trajectories}
    branches = [one for one in trajectories if one.branch is not None]
    returns: dict[tuple[str, Any], list[float]] = {}
    truth: dict[str, Any] = {}
    for branch in branches:
        assert branch.branch is not None
        source = by_name[branch.branch.rollout_id]
        if branch.outcome is not Outcome.SUCCEEDED:
            continue
        state = states(source.task, source.output)[branch.branch.calls]
        truth.setdefault(source.task.id, values_of(source.task))
        returns.setdefault((source.task.id, state), []).append(float(branch.output["outcome"]))
    deviations, rare, within = [], 0, 0
    for (task, state), outcomes in returns.items():
        value, count = truth[task].v[state], len(outcomes)
        if count * value * (1.0 - value) >= NORMAL_FROM:
            deviations.append((float(np.mean(outcomes)) - value) / math.sqrt(value * (1.0 - value) / count))
        else:
            rare += 1
            within += _is_usual(round(sum(outcomes)), count, value)
    diverged = sum(one.outcome is Outcome.DIVERGED for one in branches)
    return BranchValues(
        branches=len(branches), diverged=diverged, deviations=tuple(deviations), rare=rare, rare_within=within
    )


def _is_usual(wins: int, count: int, value: float) -> bool:
    """Whether neither as many wins or more, nor as few or fewer, are rarer than 1 in 40."""
    chances = [math.comb(count, k) * value**k * (1.0 - value) ** (count - k) for k in range(count + 1)]
    return sum(chances[wins:]) > 0.025 and sum(chances[: wins + 1]) > 0.025


async def _read(run: Path) -> list[Trajectory]:
    store = await SqlStore.open(f"sqlite:///{run / 'store.sqlite'}", read_only=True)
    try:
        names = [
            record.spec.id
            for mode in (RolloutMode.TRAIN, RolloutMode.BRANCH)
            for record in await store.list_rollouts(RolloutFilter(mode=mode, limit=1_000_000))
        ]
        return list(await store.trajectories(names))
    finally:
        await store.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--games", nargs="*", choices=GAMES, default=["guess", "sql"])
    parser.add_argument("--samples", type=int, default=32, help="branches at each state of a rollout")
    parser.add_argument("--groups", type=int, default=20, help="tasks")
    options = parser.parse_args()
    table = Table("game", "branches", "diverged", "states", "within 2 SE", "mean z²", "rare states", "as usual")
    for game in options.games:
        with tempfile.TemporaryDirectory() as scratch:
            policy, run = Path(scratch) / "starter", Path(scratch) / "run"
            build_starter(policy, GAMES[game], skill=0.5)
            values = measure(game, policy, run, samples=options.samples, groups=options.groups)
        counts = (values.branches, values.diverged, len(values.deviations))
        squares = np.mean(np.square(values.deviations))
        table.add_row(
            game,
            *map(str, counts),
            f"{values.within:.1%}",
            f"{squares:.2f}",
            str(values.rare),
            str(values.rare_within),
        )
    Console().print(table)


if __name__ == "__main__":
    main()
