"""Sums and products of two or three numbers, in words; no question is in two of the sets."""

import random
from collections.abc import Collection

__all__ = ["test", "train", "validation"]

SIGNS = {"plus": "+", "times": "*"}


def train() -> list[dict[str, str]]:
    """400 tasks."""
    return _draw(400, seed=1, taken={task["input"] for task in validation()})


def validation() -> list[dict[str, str]]:
    """80 tasks."""
    return _draw(80, seed=2, taken=())


def test() -> list[dict[str, str]]:
    """160 tasks that choose nothing, to be run once, at the end."""
    return _draw(160, seed=3, taken={task["input"] for task in (*train(), *validation())})


def _draw(count: int, *, seed: int, taken: Collection[str]) -> list[dict[str, str]]:
    rng = random.Random(seed)
    drawn: dict[str, dict[str, str]] = {}
    while len(drawn) < count:
        words = [str(rng.randint(2, 99))]
        for _ in range(rng.choice((1, 1, 2))):
            words += [rng.choice(list(SIGNS)), str(rng.randint(2, 99))]
        question = f"What is {' '.join(words)}?"
        if question not in taken:
            value = eval(" ".join(SIGNS.get(word, word) for word in words))
            drawn[question] = {"id": question, "input": question, "answer": str(value)}
    return list(drawn.values())
