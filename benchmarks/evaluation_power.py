"""How many tasks and samples does a comparison want? Shares of simulated comparisons that `lightningrl eval --against`
decides.

    python benchmarks/evaluation_power.py                 300 comparisons a cell: two minutes
    python benchmarks/evaluation_power.py --fresh 0.3     policies that agree less

Success rates of tasks are Beta(0.6, 0.4): most are nearly always or nearly never solved, 0.6 on average. A share of
tasks, `fresh`, has a rate under the one policy that says nothing of that under the other (0.1: rates correlate by 0.9);
the gain goes to what is not solved.
"""

from __future__ import annotations

import argparse
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightningrl.figures import bet, mean_interval

GAINS: Final = ((0.0, 400), (0.05, 200), (0.05, 400), (0.1, 100))
"""Gain of the first policy, and tasks."""
SAMPLES: Final = (1, 4, 8, 16)


def make_differences(
    chance: np.random.Generator, *, tasks: int, samples: int, gain: float, fresh: float
) -> NDArray[np.float64]:
    """Differences of two policies' means, by task."""
    second = chance.beta(0.6, 0.4, tasks)
    first = np.where(chance.random(tasks) < fresh, chance.beta(0.6, 0.4, tasks), second)
    first += gain / 0.4 * (1 - first)
    return np.asarray((chance.binomial(samples, first) - chance.binomial(samples, second)) / samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=300, help="comparisons of a cell")
    parser.add_argument("--fresh", type=float, default=0.1, help="share of tasks that the policies do not agree on")
    options = parser.parse_args()
    print("| gain | tasks | samples | decided | after tasks, the median | t, one look |\n|---|---|---|---|---|---|")
    for gain, tasks in GAINS:
        for samples in SAMPLES:
            chance = np.random.default_rng((tasks, samples))
            after: list[int] = []
            shown = 0
            for _ in range(options.pairs):
                differences = make_differences(chance, tasks=tasks, samples=samples, gain=gain, fresh=options.fresh)
                decided = bet(differences, bounds=(-1.0, 1.0), horizon=tasks).decided_after
                after += [] if decided is None else [decided]
                shown += mean_interval(differences).is_shown
            middle = f"{np.median(after):.0f}" if after else "-"
            shares = f"{len(after) / options.pairs:.2f} | {middle} | {shown / options.pairs:.2f}"
            print(f"| {gain:g} | {tasks} | {samples} | {shares} |", flush=True)


if __name__ == "__main__":
    main()
