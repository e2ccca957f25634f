"""How many tasks and samples a comparison wants: the share of simulated comparisons that `lightningrl eval --against` decides.

python benchmarks/evaluation_power.py          three minutes

Success rates of tasks are Beta(0.6, 0.4): most are nearly always or nearly never solved, 0.6 on average. A share of tasks has a rate
under the one policy that says nothing of that under the other (0.1: rates correlate by 0.9); the gain goes to what is not solved.
"""

from __future__ import annotations

import argparse

import numpy as np

from lightningrl_training.evaluation.statistics import Verdict, bet, mean_interval


def make_differences(chance: np.random.Generator, *, tasks: int, samples: int, gain: float, fresh: float) -> np.ndarray:
    second = chance.beta(0.6, 0.4, tasks)
    first = np.where(chance.random(tasks) < fresh, chance.beta(0.6, 0.4, tasks), second)
    first += gain / 0.4 * (1 - first)
    return np.asarray((chance.binomial(samples, first) - chance.binomial(samples, second)) / samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=500)
    pairs = parser.parse_args().pairs
    print(f"{'correlation':>11} {'gain':>5} {'tasks':>6} {'samples':>8} {'sequential':>11} {'decided after':>14} {'t, one look':>12}")
    for fresh in (0.0, 0.1, 0.3):
        for gain in (0.0, 0.05, 0.1):
            for tasks in (100, 200, 400):
                for samples in (1, 4, 8, 16):
                    chance = np.random.default_rng((tasks, samples))
                    after, wrong, t = [], 0, 0
                    for _ in range(pairs):
                        found = make_differences(chance, tasks=tasks, samples=samples, gain=gain, fresh=fresh)
                        bets, interval = bet(found, bounds=(-1.0, 1.0), horizon=tasks), mean_interval(found)
                        if bets.decided_after is not None:
                            after.append(bets.decided_after)
                            wrong += bets.verdict is Verdict.WORSE
                        t += interval.low is not None and interval.high is not None and not interval.low <= 0.0 <= interval.high
                    decided = f"{np.median(after):.0f}" if after else "-"
                    shares = f"{len(after) / pairs:>11.2f} {decided:>14} {t / pairs:>12.2f}"
                    print(f"{1 - fresh:>11.1f} {gain:>5.2f} {tasks:>6} {samples:>8} {shares}", flush=True)


if __name__ == "__main__":
    main()
