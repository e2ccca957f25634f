"""Does credit by call pay with a pretrained policy? SmolLM2-135M in conversations of six calculator calls.

    python benchmarks/credit/pretrained.py                           every arm with every seed, then the report
    python benchmarks/credit/pretrained.py --jobs 2                  two runs at a time, a core each
    python benchmarks/credit/pretrained.py --only D T0 --seeds 0     some of them
    python benchmarks/credit/pretrained.py --report --out FOLDER     only read the runs that are there
    python benchmarks/credit/pretrained.py --steps 2 --only D        shorter runs, in a folder of their own

Each run is a plain `lightningrl train benchmarks/credit/desk` with the arm's settings, in runs/table/desk; one that has
ended is not made again, one that was killed goes on. The report is pretrained.json, pretrained.svg and the tables of
pretrained.md; runs that `--out` has from before, of another machine perhaps, are kept in it, and are not made again.
What is compared, and how, was written before the first run: pretrained_plan.md.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the runs: two side by side on two cores

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent / "desk"))

from desk_rewards import rights, valid
from desk_tasks import validation
from learning_table import has_ended
from measuring import ENVIRONMENT, ROOT, fill_page, lightningrl, metrics_of

from lightningrl.figures import Interval, holm, mean_interval, rank_sum_p, sign_flip_p
from lightningrl.records import RolloutFilter
from lightningrl.types import RolloutMode
from lightningrl_server.store import SqlStore

__all__ = ["ARMS", "PAIRS", "STAGES", "Arm", "Pair", "Run", "Validation", "compare", "main", "report"]

Numbers = NDArray[np.float64]
DESK: Final = Path(__file__).resolve().parent / "desk"

# ---------------------------------------------------------------------- the plan

SEEDS: Final = (0, 1, 2)
TARGET: Final = 0.7
"""Share of the held-out calls that are right: `rollouts to the target` are counted to the first such validation."""
ROLLOUTS_PER_STEP: Final = 24
TURNS: Final = {
    "credit.use": "turns",
    "credit.options.baseline": "dr_grpo",
    "credit.options.turn_baseline": "dr_grpo",
    "credit.options.outcome_gamma": 1.0,
}
"""The outcome is broadcast, turn rewards keep their size; nothing hangs on a default."""
IDENTICAL: Final = {"credit.use": "dr_grpo"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """An arm: its rewards, and how they are spread over the calls."""

    name: str
    label: str
    settings: Mapping[str, Any]
    colour: str


ARMS: Final = (
    Arm(name="S", label="all six right, broadcast", settings=IDENTICAL, colour="#8a8f98"),
    Arm(
        name="D",
        label="all six + share right, broadcast",
        settings={**IDENTICAL, "rewards.share.weight": 1.0},
        colour="#1f5fa8",
    ),
    Arm(
        name="T0",
        label="the same, each call its own",
        settings={
            **TURNS,
            "credit.options.gamma": 0.0,
            "intermediate_rewards.right.use": "desk_rewards.py:TurnRight",
        },
        colour="#1b7837",
    ),
    Arm(
        name="T1",
        label="the same, each call what follows",
        settings={
            **TURNS,
            "credit.options.gamma": 1.0,
            "intermediate_rewards.right.use": "desk_rewards.py:TurnRight",
        },
        colour="#7fbf7b",
    ),
    Arm(
        name="A",
        label="all six + ±0.1 by call for readable input (AIR)",
        settings={**TURNS, "credit.options.gamma": 1.0, "intermediate_rewards.tools.use": "desk_rewards.py:ToolOk"},
        colour="#b35806",
    ),
    Arm(
        name="B",
        label="the same, broadcast",
        settings={**IDENTICAL, "rewards.valid.weight": 1.2},  # Σ ±0.1 over six calls = 1.2·valid - 0.6
        colour="#e08a2c",
    ),
    Arm(
        name="N",
        label="control: noise, broadcast",
        settings={**IDENTICAL, "rewards.all.weight": 0.0, "rewards.noise.weight": 1.0},
        colour="#c51b7d",
    ),
)
PAIRS: Final = (("T0", "D"), ("T1", "D"), ("A", "S"), ("A", "B"))
"""Pairs that are compared: for credit, twice; for intermediate rewards; for the credit of these."""
STAGES: Final = (("D", "T0"), ("S", "A"), ("T1", "B", "N"))
"""Order of the runs: all seeds of a question before the next question."""


# ---------------------------------------------------------------------- runs


def train(arm: Arm, seed: int, folder: Path, steps: int | None) -> None:
    """Make what is missing of a run. `steps`: None = the plan's."""
    if has_ended(folder):
        print(f"{folder.name}: done before; delete {folder} to run it again", flush=True)
        return
    settings = {**arm.settings, **({} if steps is None else {"loop.steps": steps})}
    command = lightningrl("train", str(DESK), "--run", str(folder), "--seed", str(seed))
    for key, value in settings.items():
        command += ["--set", f"{key}={json.dumps(value)}"]
    if (folder / "run.json").is_file():
        command = lightningrl("train", "--resume", "--run", str(folder))
    print(f"{folder.name}: {' '.join(command[1:])}", flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".log").open("ab") as log:
        status = subprocess.run(command, check=False, cwd=ROOT, env=ENVIRONMENT, stdout=log, stderr=log).returncode
    if not has_ended(folder):  # all steps without a signal are a status of 1, too
        raise SystemExit(f"{folder.name} stopped with status {status}; see {folder.with_suffix('.log')}")


# ---------------------------------------------------------------------- what came of a run


@dataclass(frozen=True, kw_only=True, slots=True)
class Validation:
    """Greedy answers to the held-out conversations after some steps; values by conversation, in the tasks' order."""

    step: int
    rollouts: int
    """Trained on so far."""
    share: tuple[float, ...]
    """Share of the calls that are right; 0.0 of a rollout that failed."""
    all: tuple[float, ...]
    """1.0 where every call is right."""
    valid: tuple[float, ...]
    """Share of the calls that the calculator could read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One arm with one seed."""

    arm: str
    seed: int
    validations: tuple[Validation, ...]
    trained: tuple[float, ...]
    """Share right in the sampled rollouts of each step."""
    minutes: float

    def by_task(self, measure: str) -> Numbers:
        """Mean over the validations after the first step: how high the curve is, with speed and end in one number."""
        later = [getattr(validation, measure) for validation in self.validations if validation.step]
        return np.asarray(np.mean(later, axis=0))

    def height(self, measure: str) -> float:
        return float(self.by_task(measure).mean())

    def curve(self, measure: str) -> list[float]:
        return [float(np.mean(getattr(validation, measure))) for validation in self.validations]

    @property
    def to_target(self) -> int | None:
        """Rollouts until the first validation at the target; None = it was not reached."""
        points = zip(self.validations, self.curve("share"), strict=True)
        return next((validation.rollouts for validation, share in points if share >= TARGET), None)


async def read(folder: Path, arm: str, seed: int) -> Run:
    """A run from its store; right and valid are counted from the outputs, whatever the run was rewarded for."""
    lines = metrics_of(folder)
    store = await SqlStore.open(f"sqlite:///{(folder / 'store.sqlite').resolve()}", read_only=True)
    try:
        validations = []
        for step in sorted({int(line["step"]) for line in lines if "validation/reward" in line}):
            records = await store.list_rollouts(RolloutFilter(mode=RolloutMode.VALIDATION, step=step, limit=100_000))
            by_task = {record.task.id: record for record in records}
            own = [by_task[task["id"]] for task in validation()]
            right = [rights(record.task, record.output) for record in own]
            validations.append(
                Validation(
                    step=step,
                    rollouts=step * ROLLOUTS_PER_STEP,
                    share=tuple(round(float(np.mean(calls)), 4) for calls in right),
                    all=tuple(min(calls) for calls in right),
                    valid=tuple(round(valid(one.task, one.output), 4) for one in own),
                )
            )
    finally:
        await store.close()
    trained = tuple(float(line["reward/share"]) for line in lines if "reward/share" in line)
    minutes = float(lines[-1]["minutes"])
    return Run(arm=arm, seed=seed, validations=tuple(validations), trained=trained, minutes=minutes)


def read_kept(file: Path) -> dict[tuple[str, int], Run]:
    """Read the runs of an earlier report, by arm and seed; none where there is none."""
    if not file.exists():
        return {}
    rows = json.loads(file.read_text(encoding="utf-8"))["runs"]
    runs = [
        Run(
            arm=row["arm"],
            seed=row["seed"],
            validations=tuple(
                Validation(
                    step=each["step"],
                    rollouts=each["rollouts"],
                    share=tuple(each["share"]),
                    all=tuple(each["all"]),
                    valid=tuple(each["valid"]),
                )
                for each in row["validations"]
            ),
            trained=tuple(row["trained"]),
            minutes=row["minutes"],
        )
        for row in rows
    ]
    return {(one.arm, one.seed): one for one in runs}


# ---------------------------------------------------------------------- the comparison


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Two arms on the same seeds and tasks; a difference above 0 is in favour of the first."""

    first: str
    second: str
    measure: str
    seeds: tuple[int, ...]
    by_seed: Interval
    """Difference of the curves' heights, over seeds."""
    p_by_seed: float
    """P-value of the exact rank test of the heights; of three runs each at least 0.1, of five 0.008."""
    by_task: Interval
    """Difference of the curves' heights, over tasks, each the mean of the seeds: holds for these runs alone."""
    p_by_task: float


def compare(runs: Sequence[Run], measure: str) -> list[Pair]:
    """The planned pairs of which there are runs with all seeds; p values corrected by Holm over them."""
    by_name = {(one.arm, one.seed): one for one in runs}
    pairs = []
    for first, second in PAIRS:
        seeds = tuple(seed for seed in SEEDS if (first, seed) in by_name and (second, seed) in by_name)
        if seeds != SEEDS:  # the plan: a stage without all of its seeds is not tested
            continue
        ours, theirs = ([by_name[arm, seed] for seed in seeds] for arm in (first, second))
        heights = [[one.height(measure) for one in side] for side in (ours, theirs)]
        of_tasks = np.mean([a.by_task(measure) - b.by_task(measure) for a, b in zip(ours, theirs, strict=True)], axis=0)
        pairs.append(
            Pair(
                first=first,
                second=second,
                measure=measure,
                seeds=seeds,
                by_seed=mean_interval([a - b for a, b in zip(*heights, strict=True)]),
                p_by_seed=rank_sum_p(*heights),
                by_task=mean_interval(of_tasks),
                p_by_task=sign_flip_p(of_tasks),
            )
        )
    by_seed = holm({(pair.first, pair.second): pair.p_by_seed for pair in pairs})
    by_task = holm({(pair.first, pair.second): pair.p_by_task for pair in pairs})
    return [
        replace(pair, p_by_seed=by_seed[pair.first, pair.second], p_by_task=by_task[pair.first, pair.second])
        for pair in pairs
    ]


# ---------------------------------------------------------------------- the report


def report(runs: Sequence[Run], out: Path) -> None:
    """Write pretrained.json, pretrained.md and pretrained.svg."""
    out.mkdir(parents=True, exist_ok=True)
    pairs = [pair for measure in ("share", "all") for pair in compare(runs, measure)]
    numbers = {
        "plan": {
            "seeds": SEEDS,
            "target": TARGET,
            "pairs": PAIRS,
            "arms": {arm.name: dict(arm.settings) for arm in ARMS},
        },
        "runs": [
            {
                **asdict(one),
                "rollouts_to_target": one.to_target,
                "curves": {measure: one.curve(measure) for measure in ("share", "all", "valid")},
            }
            for one in runs
        ],
        "pairs": [asdict(pair) for pair in pairs],
    }
    (out / "pretrained.json").write_text(json.dumps(numbers) + "\n", encoding="utf-8")
    if not (page := out / "pretrained.md").is_file():
        page.write_text("<!-- arms: -->\n<!-- end -->\n\n<!-- pairs: -->\n<!-- end -->\n", encoding="utf-8")
    fill_page(page, {"arms": arms_table(runs), "pairs": pairs_table(compare(runs, "share"))})
    draw(runs, out / "pretrained.svg")


def arms_table(runs: Sequence[Run]) -> str:
    """A line for each arm: means over seeds at the first and the last validation, with the last one's interval."""
    lines = ["| arm | seeds | share right | all six right | rollouts to the target |", "|---|---|---|---|---|"]
    for arm in ARMS:
        own = [one for one in runs if one.arm == arm.name]
        if own:
            changes = [_change(own, measure) for measure in ("share", "all")]
            lines.append(f"| {' | '.join([f'{arm.name}: {arm.label}', str(len(own)), *changes, _to_target(own)])} |")
    return "\n".join(lines)


def _change(own: Sequence[Run], measure: str) -> str:
    curves = [one.curve(measure) for one in own]
    ends = [curve[-1] for curve in curves]
    last = f"{ends[0]:.3f}" if len(set(ends)) == 1 else f"{mean_interval(ends, bounds=(0.0, 1.0)):.3f}"
    return f"{np.mean([curve[0] for curve in curves]):.3f} → {last}"


def _to_target(own: Sequence[Run]) -> str:
    return ", ".join("never" if one.to_target is None else str(one.to_target) for one in own)


def pairs_table(pairs: Sequence[Pair]) -> str:
    """Differences of the share right; pretrained.json has the rest."""
    lines = ["| compared | over seeds | p, exact, Holm | over tasks | p, Holm |", "|---|---|---|---|---|"]
    for pair in pairs:
        cells = [f"{pair.first} - {pair.second}", f"{pair.by_seed:.3f}", f"{pair.p_by_seed:.2f}"]
        cells += [f"{pair.by_task:.3f}", f"{pair.p_by_task:.4f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(runs: Sequence[Run], file: Path) -> None:
    """Held-out share and all-right over rollouts: a thin line for each run, a thick one for each arm's mean."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "pretrained"  # the same runs, the same file
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    FigureCanvasSVG(figure)
    panels = figure.subplots(1, 2)
    titles = {"share": "Calls that are right", "all": "Conversations with all six right"}
    for axes, (measure, title) in zip(panels, titles.items(), strict=True):
        for arm in ARMS:
            own = [one for one in runs if one.arm == arm.name]
            for one in own:
                rollouts = [validation.rollouts for validation in one.validations]
                axes.plot(rollouts, one.curve(measure), color=arm.colour, linewidth=0.7, alpha=0.45)
            if own:
                mean = np.mean([one.curve(measure) for one in own], axis=0)
                rollouts = [validation.rollouts for validation in own[0].validations]
                axes.plot(rollouts, mean, color=arm.colour, linewidth=2.2, label=f"{arm.name}: {arm.label}")
        axes.set(xlabel="rollouts", ylim=(0, 1))
        axes.set_title(f"{title}, greedy, held out", loc="left", fontsize=11, fontweight="bold")
        axes.grid(color="#e3e5e8", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].axhline(TARGET, color="#b2182b", linewidth=1.0, linestyle="--")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    figure.savefig(file, format="svg", metadata={"Date": None})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[arm.name for arm in ARMS], help="some arms")
    parser.add_argument("--seeds", nargs="+", type=int, choices=SEEDS, default=SEEDS)
    parser.add_argument("--steps", type=int, help="of each run, instead of the plan's")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--out", type=Path, help="where the report goes; by default beside the runs")
    options = parser.parse_args(arguments)
    runs = ROOT / "runs" / "table" / ("desk" if options.steps is None else f"desk-{options.steps}")
    folders = {(arm.name, seed): runs / f"{arm.name}-{seed}" for seed in SEEDS for arm in ARMS}
    out = options.out or runs
    kept = read_kept(out / "pretrained.json")
    if not options.report:
        arms = {arm.name: arm for arm in ARMS if not options.only or arm.name in options.only}
        planned = [(arms[name], seed) for stage in STAGES for seed in options.seeds for name in stage if name in arms]
        orders = [(arm, seed) for arm, seed in planned if (arm.name, seed) not in kept]
        with ThreadPoolExecutor(options.jobs) as pool:
            waiting = [pool.submit(train, arm, seed, folders[arm.name, seed], options.steps) for arm, seed in orders]
            for order in waiting:
                order.result()
    made = kept | {name: asyncio.run(read(folder, *name)) for name, folder in folders.items() if has_ended(folder)}
    report([made[name] for name in folders if name in made], out)


if __name__ == "__main__":
    main()
