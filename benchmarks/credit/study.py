"""Which credit is right, and does it matter? Methods of turn-level credit against the truth, and against each other as
they learn.

    python benchmarks/credit/study.py tau       agreement of each method's credit with the true advantage
    python benchmarks/credit/study.py learn     rollouts and tokens until the target: games × methods × seeds × rates
    python benchmarks/credit/study.py picture   what is there: docs/explanation/credit/study.{md,json,png}
    python benchmarks/credit/study.py           all three, one after the other (`make bench-credit`)

    --quick                                        one game, four methods, two seeds, few rollouts: minutes, for a test
    --games, --methods, --seeds, --rates           some of them; --first-seed: others than the published ones

Runs are kept in runs/credit; one that is there is not made again. Delete the folder to begin anew.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # small forwards: more threads wait for each other

import argparse
import asyncio
import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from agreement import agree
from games import GAMES
from harness import Study
from learning import GROUP_SIZE, LEARNER, PLANS, learn
from methods import METHODS, Method
from report import write_report
from starter import build_starter
from tasks import train_tasks

from lightningrl.plugins import PluginManager, load_plugins
from lightningrl_torch.backend import TorchBackend

ROOT: Final = Path(__file__).resolve().parents[2]
POLICIES: Final = {"random": 0.0, "half-trained": 0.5}
"""Of the agreement: the skill of those whose play is judged."""
GROUPS: Final = 24
"""Of rollouts that agreement is measured on."""
CRITIC_STEPS: Final = 30
"""That a critic learns the policy's values before its credit is measured."""
RATES: Final = (2e-3,)
"""Learning rates, the same for all."""
FIRST_SEED: Final = 300
"""First seed of the published tables. Games, targets and rate were chosen with others, and so were earlier tables."""
CONTROL: Final = "control: learning rate 0"


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What is to be done."""

    folder: Path
    games: Sequence[str]
    methods: Sequence[Method]
    seeds: Sequence[int]
    rates: Sequence[float]
    groups: int
    budget: int | None
    """Rollouts of a run; None = the game's own."""
    shown: int
    """Words that a starter is shown."""

    def of(self, game: str) -> list[Method]:
        """The methods that can be used in a game."""
        return [method for method in self.methods if method.games is None or game in method.games]

    def starter(self, game: str, skill: float) -> Path:
        """Made when it is first asked for."""
        folder = self.folder / "starters" / f"{game}-{skill:g}"
        if not (folder / "config.json").is_file():
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):  # noqa: PTH123  progress bars
                build_starter(folder, GAMES[game], skill=skill, shown=self.shown)
        return folder


def main(arguments: Sequence[str] | None = None) -> None:
    torch.set_num_threads(1)
    options = _parse(arguments)
    plugins = load_plugins()
    plan = _plan(options, METHODS)
    if options.what in ("tau", "all"):
        measure_agreement(plugins, plan)
    if options.what in ("learn", "all"):
        measure_learning(plugins, plan)
    if options.what in ("picture", "all"):
        write_report(plan.folder, options.docs)


def measure_agreement(plugins: PluginManager, plan: Plan) -> None:
    """A line in tau.jsonl for each game, policy and method that has none."""
    file = plan.folder / "tau.jsonl"
    done = {(line["game"], line["policy"], line["method"]) for line in read_lines(file)}
    for game in plan.games:
        for policy, skill in POLICIES.items():
            for method in plan.of(game):
                if (game, policy, method.name) in done:
                    continue
                started = time.process_time()
                agreement = asyncio.run(_agreement(plugins, plan, game, skill, method))
                line = {"game": game, "policy": policy, "method": method.name, **agreement}
                _keep(file, {**line, "cpu_s": time.process_time() - started})
                print(
                    f"{game}, {policy}, {method.name}: τ = {agreement['tau']:.2f}, "
                    f"{agreement['right']:.0%} of signs right",
                    flush=True,
                )


def measure_learning(plugins: PluginManager, plan: Plan) -> None:
    """A line in learn.jsonl for each run that has none: all methods with one seed, then with the next."""
    file = plan.folder / "learn.jsonl"
    done = {(line["game"], line["method"], line["rate"], line["seed"]) for line in read_lines(file)}
    for seed in plan.seeds:
        for rate in plan.rates:
            for game in plan.games:
                for method in plan.of(game):
                    if not method.learns or (game, method.name, rate, seed) in done:
                        continue
                    starter = plan.starter(game, PLANS[game].skill)
                    run = learn(plugins, starter, game, method, rate=rate, seed=seed, budget=plan.budget)
                    _keep(file, asdict(run))
                    end = "reached the target" if run.reached else "did not reach it"
                    end += f", {run.rollouts} rollouts, {run.cpu_s:.0f} s"
                    print(f"{game}, {method.name}, rate {rate:g}, seed {seed}: {end}", flush=True)
    for game in plan.games:
        if (game, CONTROL, 0.0, plan.seeds[0]) not in done:
            grpo = next(method for method in METHODS if method.name == "grpo")
            budget = (plan.budget or PLANS[game].rollouts) // 8
            starter = plan.starter(game, PLANS[game].skill)
            run = learn(plugins, starter, game, grpo, rate=0.0, seed=plan.seeds[0], budget=budget)
            _keep(file, {**asdict(run), "method": CONTROL})


async def _agreement(plugins: PluginManager, plan: Plan, game: str, skill: float, method: Method) -> dict[str, Any]:
    critic: dict[str, Any] = {"critic": {}} if method.has_critic else {}
    backend = TorchBackend(policy=str(plan.starter(game, skill)), learning_rate=0.0, **LEARNER, **critic)
    try:
        study = Study(backend, method, plugins, group_size=GROUP_SIZE, seed=0)
        rng, tasks = np.random.default_rng(0), list(train_tasks(game))
        if method.has_critic:  # the policy stays as it is: its learning rate is 0
            for _ in range(CRITIC_STEPS):
                scored = await study.credit([tasks[number] for number in rng.choice(len(tasks), 8, replace=False)])
                backend.learn(scored.samples)
        credit: list[float] = []
        true: list[float] = []
        groups: list[int] = []
        scored = await study.credit([tasks[number] for number in rng.choice(len(tasks), plan.groups)])
        for number, (group, advantages) in enumerate(zip(scored.groups, scored.advantages, strict=True)):
            # branches come last, and are not judged
            for trajectory, calls in zip(group.trajectories, advantages, strict=False):
                credit += [0.0 if tokens is None else float(tokens[0]) for tokens in calls]
                true += study.advantages(trajectory)
                groups += [number] * len(calls)
        return asdict(agree(credit, true, groups))
    finally:
        backend.close()


def read_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []


def _keep(file: Path, line: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(line) + "\n")


def _plan(options: argparse.Namespace, there: Sequence[Method]) -> Plan:
    quick = options.quick
    wanted = options.methods or (["grpo", "states: GiGPO", "branches: 4", "air: tool_status"] if quick else None)
    return Plan(
        folder=options.runs,
        games=options.games or (["sql"] if quick else list(GAMES)),
        methods=[method for method in there if wanted is None or method.name in wanted],
        seeds=range(options.first_seed, options.first_seed + (options.seeds or (2 if quick else 10))),
        rates=options.rates or RATES,
        groups=8 if quick else GROUPS,
        budget=256 if quick else None,
        shown=1500 if quick else 12_000,
    )


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="all", choices=("tau", "learn", "picture", "all"))
    parser.add_argument("--quick", action="store_true", help="a small study, for a test")
    parser.add_argument("--games", nargs="+", choices=GAMES)
    parser.add_argument("--methods", nargs="+", choices=[method.name for method in METHODS])
    parser.add_argument("--seeds", type=int, help="how many")
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED, help="where they begin")
    parser.add_argument("--rates", nargs="+", type=float, help="learning rates")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "credit", help="where runs are kept")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs" / "explanation" / "credit", help="where the page is")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
