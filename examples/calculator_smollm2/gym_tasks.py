"""Makes gym/train.jsonl and gym/validation.jsonl from three generators of reasoning-gym. The files are kept, so that
the tasks stay as they are.

    pip install reasoning-gym==0.1.25          its dependency pycosat is compiled
    python examples/calculator_smollm2/gym_tasks.py
"""

import json
import random
from collections.abc import Collection
from pathlib import Path

__all__ = ["draw"]

GENERATORS = {
    "letter_counting": {"min_words": 1, "max_words": 3},
    "products": {"min_digits": 1, "max_digits": 1},
    "chain_sum": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
}
COUNTS = {"validation": (25, 25, 25), "train": (150, 70, 150)}
"""Split -> tasks of each generator. There are 100 products of one digit."""
SEEDS = {"validation": 2, "train": 1_000_001}
FOLDER = Path(__file__).with_name("gym")


def draw(split: str, taken: Collection[str]) -> list[dict[str, object]]:
    """Tasks of `split` in a fixed order; no question is among `taken`, none is there twice."""
    import reasoning_gym

    tasks: dict[str, dict[str, object]] = {}
    for (name, options), count in zip(GENERATORS.items(), COUNTS[split], strict=True):
        rows = reasoning_gym.create_dataset(name, seed=SEEDS[split], size=100_000, **options)
        wanted, number = len(tasks) + count, 0
        while len(tasks) < wanted:
            question, answer = str(rows[number]["question"]), str(rows[number]["answer"])
            number += 1
            if question not in taken:
                tasks.setdefault(question, {"input": question, "answer": answer, "generator": name})
    listed = list(tasks.values())
    random.Random(SEEDS[split]).shuffle(listed)
    return listed


def main() -> None:
    """Write both files."""
    FOLDER.mkdir(exist_ok=True)
    taken: set[str] = set()
    for split in COUNTS:
        tasks = draw(split, taken)
        taken |= {str(task["input"]) for task in tasks}
        lines = [json.dumps({"id": f"{split}/{number}", **task}) for number, task in enumerate(tasks)]
        (FOLDER / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
