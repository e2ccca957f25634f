"""Losses where they differ: several updates of one step, and tokens of older weights.

    python benchmarks/losses.py                  what is missing of 50 runs, then the table; an hour on two idle cores
    python benchmarks/losses.py --seeds 3        30 of them
    python benchmarks/losses.py --report         only the table of the runs that are there

With one update a step on rollouts of the same weights every ratio is 1 and the four losses are one. So:

The plan, fixed before the runs
- The agent, tasks and tiny policy of `lightningrl init`: one call, 64 rollouts a step, 24 steps, 100 held-out tasks,
  greedy, every second step. Nothing is tuned: one learning rate for all, the recipe's.
- Arms: each loss with `minibatches = 4`, and with `max_staleness = 1`; beside them one update on fresh rollouts, and a
  control with learning rate 0. Seeds 0 to 4, the same for all arms.
- Measured: rollouts until the held-out reward is first 0.9 (later than the run = never), the reward at the end.
- Tested: in each setting `ppo_clip`, `gspo` and `cispo` against `reinforce`, by the exact rank test of rollouts to the
  target, Holm over the six. With five seeds the least p of the six is 0.048: anything short of five against five in
  another order is "not shown".

Runs lie in runs/losses; those that have ended are not run again, those that were cut off go on.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parent))

from measuring import ENVIRONMENT, ROOT, lightningrl, metrics_of

from lightningrl.figures import holm, mean_interval, rank_sum_p

RUNS: Final = ROOT / "runs" / "losses"
STEPS: Final = 24
EVERY: Final = 2
ROLLOUTS: Final = 64
"""Rollouts of a step, the recipe's."""
TARGET: Final = 0.9
SEEDS: Final = 5
LOSSES: Final = ("ppo_clip", "gspo", "cispo", "reinforce")
SETTINGS: Final = {"four updates": "learner.minibatches=4", "one step old": "loop.max_staleness=1"}
PLAIN: Final = "reinforce"
"""The loss that the others are tested against: no ratio, no clip."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """A row of the table."""

    loss: str
    setting: str
    settings: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.setting}-{self.loss}".replace(" ", "-")


ARMS: Final = (
    Arm(loss=PLAIN, setting="one update", settings=()),
    *(Arm(loss=loss, setting=setting, settings=(key,)) for setting, key in SETTINGS.items() for loss in LOSSES),
    Arm(loss=PLAIN, setting="control", settings=("learner.learning_rate=0",)),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What one seed of an arm came to."""

    rollouts: float
    """Rollouts until the target; infinite = it was never reached."""
    end: float
    """Held-out reward after the last step."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many, from 0 on")
    parser.add_argument("--report", action="store_true", help="run nothing")
    options = parser.parse_args()
    if not options.report:
        os.nice(10)
        project = RUNS / "first"
        if not (project / "starter" / "config.json").is_file():
            subprocess.run(lightningrl("init", str(project)), check=True, env=ENVIRONMENT)
        for seed in range(options.seeds):
            for arm in ARMS:
                train(arm, seed, project)
    print(as_markdown(options.seeds))


def train(arm: Arm, seed: int, project: Path) -> None:
    """Run one seed of an arm, or the rest of it."""
    folder = folder_of(arm, seed)
    if read(folder) is not None:
        return
    command = lightningrl("train", "--resume", "--run", str(folder))
    if not (folder / "run.json").is_file():
        command = lightningrl("train", str(project), "--run", str(folder), "--seed", str(seed))
        length = (f"loop.steps={STEPS}", f"validation.every={EVERY}")
        for setting in (*length, f"learner.loss={arm.loss}", *arm.settings):
            command += ["--set", setting]
    print(f"{arm.name}, seed {seed}", flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".log").open("ab") as log:
        subprocess.run(command, check=True, env={**ENVIRONMENT, "OMP_NUM_THREADS": "1"}, stdout=log, stderr=log)


def folder_of(arm: Arm, seed: int) -> Path:
    return RUNS / f"{arm.name}-{seed}"


def read(folder: Path) -> Run | None:
    """Read a run that has ended; None = it has not."""
    curve = [(line["step"], line["validation/reward"]) for line in metrics_of(folder) if "validation/reward" in line]
    if not curve or curve[-1][0] < STEPS:
        return None
    arrived = next((step * ROLLOUTS for step, reward in curve if reward >= TARGET), math.inf)
    return Run(rollouts=arrived, end=curve[-1][1])


def as_markdown(seeds: int) -> str:
    """The table of the runs that have ended."""
    ended = {arm: [run for seed in range(seeds) if (run := read(folder_of(arm, seed))) is not None] for arm in ARMS}
    lines = [
        f"| setting | loss | rollouts to {TARGET} | median | reward at the end | p against `{PLAIN}`, Holm |",
        "|---|---|---|---|---|---|",
    ]
    p_values = test(ended)
    for arm, runs in ended.items():
        if not runs:
            continue
        each = ", ".join("never" if math.isinf(run.rollouts) else f"{run.rollouts:.0f}" for run in runs)
        middle = median(run.rollouts for run in runs)
        end = mean_interval([run.end for run in runs], bounds=(0.0, 1.0))
        p = f"{p_values[arm.name]:.3f}" if arm.name in p_values else ""
        cells = (arm.setting, f"`{arm.loss}`", each, "never" if math.isinf(middle) else f"{middle:.0f}")
        lines.append(f"| {' | '.join(cells)} | {end:.3f} | {p} |")
    return "\n".join(lines)


def test(ended: dict[Arm, list[Run]]) -> dict[str, float]:
    """P-values of each loss against the plain one in its setting, by the arm's name; corrected for their number."""

    def rollouts(runs: Sequence[Run]) -> list[float]:
        return [run.rollouts for run in runs]

    plain = {arm.setting: rollouts(runs) for arm, runs in ended.items() if arm.loss == PLAIN}
    return holm(
        {
            arm.name: rank_sum_p(rollouts(runs), plain[arm.setting])
            for arm, runs in ended.items()
            if arm.setting in SETTINGS and arm.loss != PLAIN and len(runs) > 1 and len(plain[arm.setting]) > 1
        }
    )


if __name__ == "__main__":
    main()
