"""Word problems of one or two steps. Half of the validation's have sentences that no problem of the training has."""

import random
from collections.abc import Collection, Sequence

__all__ = ["test", "train", "validation"]

NAMES = ("Tom", "Ana", "Lee", "Mia", "Sam", "Zoe", "Max", "Eva")
THINGS = ("pens", "eggs", "books", "apples", "coins", "cards", "stamps", "shells")
Sentences = Sequence[tuple[str, str]]
SENTENCES: Sentences = (
    ("{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?", "{a} + {b}"),
    ("{name} had {c} {things} and gave {b} away. How many {things} are left?", "{c} - {b}"),
    ("There are {d} boxes with {a} {things} each. How many {things} are there?", "{d} * {a}"),
    ("{name} finds {d} bags of {e} {things} and {b} single {things}. How many {things} is that?", "{d} * {e} + {b}"),
    ("A shop has {c} {things}. It sells {d} a day for {e} days. How many {things} are left?", "{c} - {d} * {e}"),
    ("{name} earns {a} coins a day. How many coins does {name} earn in {d} days?", "{a} * {d}"),
)
UNSEEN: Sentences = (
    ("{name} packs {d} rows of {a} {things}. How many {things} does {name} pack?", "{d} * {a}"),
    ("{name} lost {b} of {c} {things}. How many {things} does {name} still have?", "{c} - {b}"),
    (
        "{name} buys {d} packs of {e} {things} and gets {b} for free. How many {things} does {name} get?",
        "{d} * {e} + {b}",
    ),
)


def train() -> list[dict[str, object]]:
    """400 tasks of `SENTENCES`."""
    return _draw(SENTENCES, "seen", 400, seed=1, taken={task["input"] for task in validation()})


def validation() -> list[dict[str, object]]:
    """40 tasks of `SENTENCES` and 40 of `UNSEEN`."""
    return _draw(SENTENCES, "seen", 40, seed=2) + _draw(UNSEEN, "unseen", 40, seed=3)


def test() -> list[dict[str, object]]:
    """80 tasks of `SENTENCES` and 80 of `UNSEEN` that choose nothing, to be run once, at the end."""
    taken = {task["input"] for task in (*train(), *validation())}
    return _draw(SENTENCES, "seen", 80, seed=4, taken=taken) + _draw(UNSEEN, "unseen", 80, seed=5, taken=taken)


def _draw(
    sentences: Sentences, kind: str, count: int, *, seed: int, taken: Collection[object] = ()
) -> list[dict[str, object]]:
    rng = random.Random(seed)
    drawn: dict[str, dict[str, object]] = {}
    while len(drawn) < count:
        text, formula = rng.choice(sentences)
        ranges = {"a": (11, 99), "b": (11, 49), "c": (90, 199), "d": (3, 9), "e": (3, 9)}
        numbers = {name: rng.randint(*limits) for name, limits in ranges.items()}
        question = text.format(name=rng.choice(NAMES), things=rng.choice(THINGS), **numbers)
        if question not in taken:
            calculation = formula.format(**numbers)
            drawn[question] = {
                "id": question,
                "input": question,
                "answer": str(eval(calculation)),
                "metadata": {"sentences": kind, "calculation": calculation},
            }
    return list(drawn.values())
