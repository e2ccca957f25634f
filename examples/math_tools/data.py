"""The tasks: generated word problems with a fixed seed, split by structure.

    starter       structures the starter policy is cold-started on    (see generator/starter.py)
    train         structures reinforcement learning sees
    development   structures the starter and the recipe were chosen on
    validation    structures that checkpoints are chosen on
    test          structures that nothing was trained or chosen on

No structure, that is no order of steps, occurs in two of them. `python data.py` prints a few tasks of each.
"""

from __future__ import annotations

import functools
import itertools
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).with_name("generator")))
sys.path.insert(0, str(Path(__file__).parent))

from problems import KINDS, Problem, build_problem

__all__ = ["build_problems", "development_tasks", "split_structures", "test_tasks", "train_tasks", "validation_tasks"]

SEED = 20250806
SHARES = {"starter": 0.5, "train": 0.2, "development": 0.1, "validation": 0.1, "test": 0.1}
DEPTHS = {
    "starter": {1: 0.25, 2: 0.40, 3: 0.35},
    "train": {2: 0.5, 3: 0.5},
    "development": {2: 0.5, 3: 0.5},
    "validation": {2: 0.5, 3: 0.5},
    "test": {2: 0.5, 3: 0.5},
}
"""Split -> steps of a problem -> how often. All problems of one step are the starter's, which learns from them what
each step is."""
TASKS = {"train": 2400, "development": 160, "validation": 160, "test": 320}

Structure = tuple[str, ...]


def train_tasks() -> Iterator[dict[str, Any]]:
    """Tasks to learn from: `{"id", "input": the problem's text, "answer", "metadata": {"depth", "structure"}}`."""
    yield from _tasks("train")


def development_tasks() -> Iterator[dict[str, Any]]:
    """Tasks to choose settings on. As `train_tasks`."""
    yield from _tasks("development")


def validation_tasks() -> Iterator[dict[str, Any]]:
    """Tasks of structures that occur nowhere else. As `train_tasks`."""
    yield from _tasks("validation")


def test_tasks() -> Iterator[dict[str, Any]]:
    """Tasks of further structures that occur nowhere else, to be run once, at the end. As `train_tasks`."""
    yield from _tasks("test")


@functools.cache
def split_structures() -> dict[str, dict[int, list[Structure]]]:
    """Split -> depth -> structures. All orders of up to three kinds of steps that have problems, dealt out at
    random."""
    rng = random.Random(f"{SEED} structures")
    dealt: dict[str, dict[int, list[Structure]]] = {name: {} for name in SHARES}
    for depth in DEPTHS["starter"]:
        structures = [one for one in itertools.product(KINDS, repeat=depth) if build_problem(one, rng) is not None]
        rng.shuffle(structures)
        total = len(structures)
        for name in SHARES:
            share = SHARES[name] if depth > 1 else float(name == "starter")
            dealt[name][depth] = [structures.pop() for _ in range(int(share * total))]
    return dealt


def build_problems(split: str, count: int, seed: int | str) -> Iterator[Problem]:
    """Different problems of a split."""
    rng = random.Random(f"{seed} {split}")
    structures = split_structures()[split]
    seen: set[str] = set()
    while len(seen) < count:
        depth = rng.choices(list(DEPTHS[split]), list(DEPTHS[split].values()))[0]
        problem = build_problem(rng.choice(structures[depth]), rng)
        if problem is not None and problem.text not in seen:
            seen.add(problem.text)
            yield problem


def _tasks(split: str) -> Iterator[dict[str, Any]]:
    for number, problem in enumerate(build_problems(split, TASKS[split], SEED)):
        yield {
            "id": f"{split}/{number}",
            "input": problem.text,
            "answer": problem.answer,
            "metadata": {"depth": len(problem.steps), "structure": ", ".join(problem.structure)},
        }


def main() -> None:
    for split in TASKS:
        for task in itertools.islice(_tasks(split), 5):
            print(f"{split}, {task['metadata']['structure']}:\n  {task['input']}\n  {task['answer']}")


if __name__ == "__main__":
    main()
