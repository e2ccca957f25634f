"""The tasks: questions of two and three hops over a generated corpus, with a fixed seed, split by names.

    starter      worlds the starter policy is cold-started on     (made in memory, see generator/starter.py)
    train        questions reinforcement learning sees
    validation   questions about names that occur nowhere else; starter, settings and checkpoints were chosen on them
    test         questions about further names that occur nowhere else, which chose nothing

Train and validation share one index, so each search meets the passages of both; test has one with train's passages.
`python data.py` builds both and prints a few tasks.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).with_name("generator")))
sys.path.insert(0, str(Path(__file__).parent))

from corpus import Question, World, build_questions, build_world
from retriever import PASSAGES, Bm25Retriever, Passage, build_index

__all__ = [
    "build_splits",
    "build_worlds",
    "cache_directory",
    "index_folder",
    "test_tasks",
    "train_tasks",
    "validation_tasks",
]

SEED = 20250806
SOURCES = ("data.py", "retriever.py", "generator/corpus.py")
COUNTS = {
    "train": {"person": 300, "work": 240, "company": 80, "city": 80, "school": 50},
    "validation": {"person": 100, "work": 60, "company": 28, "city": 24, "school": 14},
    "test": {"person": 200, "work": 100, "company": 56, "city": 48, "school": 28},
}
QUESTIONS = {"train": {2: 1800, 3: 600}, "validation": {2: 120, 3: 40}, "test": {2: 240, 3: 80}}
"""Split -> hops -> questions."""


def train_tasks(cache: str | Path | None = None, encoder: str | None = None) -> Iterator[dict[str, Any]]:
    """Tasks to learn from: `{"id", "input": {"question", "index"}, "answer", "metadata": {"hops"}}`.

    `index` is a folder for `open_retriever`; with `encoder` (a folder or hub name) the retriever is dense, else BM25.
    """
    yield from _tasks("train", cache, encoder)


def validation_tasks(cache: str | Path | None = None, encoder: str | None = None) -> Iterator[dict[str, Any]]:
    """Tasks about people, works, companies and places that no other split knows. As `train_tasks`."""
    yield from _tasks("validation", cache, encoder)


def test_tasks(cache: str | Path | None = None, encoder: str | None = None) -> Iterator[dict[str, Any]]:
    """Tasks about people, works, companies and places that no other split knows, to be run once, at the end. As
    `train_tasks`."""
    yield from _tasks("test", cache, encoder)


def cache_directory(cache: str | Path | None = None) -> Path:
    """Where files are kept: the argument, else LIGHTNINGRL_CACHE, else ~/.cache/lightningrl; below it, rag."""
    if cache is not None:
        return Path(cache)
    return Path(os.environ.get("LIGHTNINGRL_CACHE", Path.home() / ".cache" / "lightningrl")) / "rag"


@functools.cache
def build_worlds() -> dict[str, World]:
    """Worlds by split. Test has names of train's share that training does not use."""
    worlds: dict[str, World] = {}
    for split, counts in COUNTS.items():
        rng = random.Random(f"{SEED} {split}")
        if split == "test":
            worlds[split] = build_world("train", counts, rng, taken=worlds["train"].names)
        else:
            worlds[split] = build_world(split, counts, rng)
    return worlds


def indexed_passages(split: str) -> list[Passage]:
    """Passages that the tasks of a split search in: training's, and those of the held-out world."""
    worlds = build_worlds()
    return [*worlds["train"].passages, *worlds["test" if split == "test" else "validation"].passages]


@functools.cache
def build_splits() -> dict[str, list[Question]]:
    splits: dict[str, list[Question]] = {}
    retriever = Bm25Retriever(indexed_passages("train"))
    for split, world in build_worlds().items():
        retriever = Bm25Retriever(indexed_passages(split)) if split == "test" else retriever
        rng = random.Random(f"{SEED} {split} questions")
        questions = [
            one
            for hops, count in QUESTIONS[split].items()
            for one in build_questions(world, hops, count, rng, retriever, PASSAGES)
        ]
        rng.shuffle(questions)
        splits[split] = questions
    return splits


def index_folder(passages: Iterable[Passage], version: str, cache: str | Path | None, encoder: str | None) -> str:
    """The folder with the index over `passages`, built where there is none of this `version` yet; it appears whole or
    not at all."""
    place = cache_directory(cache).resolve()
    digest = hashlib.sha256(f"{version} {encoder}".encode()).hexdigest()[:12]
    target = place / f"{'dense' if encoder else 'bm25'}-{digest}"
    if target.is_dir():
        return str(target)
    place.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix="building-", dir=place))
    build_index(passages, building, encoder)
    try:
        building.rename(target)
    except OSError:  # another process was first
        shutil.rmtree(building, ignore_errors=True)
        if not target.is_dir():
            raise
    return str(target)


def _version() -> str:
    """A digest of the code that makes the data: a changed generator never reads an older generator's files."""
    return hashlib.sha256(b"".join((Path(__file__).parent / name).read_bytes() for name in SOURCES)).hexdigest()


def _tasks(split: str, cache: str | Path | None, encoder: str | None) -> Iterator[dict[str, Any]]:
    version = f"{_version()} test" if split == "test" else _version()
    index = index_folder(indexed_passages(split), version, cache, encoder)
    for number, question in enumerate(build_splits()[split]):
        yield {
            "id": f"{split}/{number}",
            "input": {"question": question.text, "index": index},
            "answer": question.answer,
            "metadata": {"hops": len(question.hops)},
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", default=None, help="folder for the index")
    arguments = parser.parse_args()
    print(f"{sum(len(world.facts) for world in build_worlds().values())} passages")
    for split, tasks in (("train", train_tasks), ("validation", validation_tasks), ("test", test_tasks)):
        listed = list(tasks(arguments.cache))
        print(f"{split}: {len(listed)} tasks")
        for question in build_splits()[split][:3]:
            print(f"\n{question.text}  {question.answer}")
            for fact in question.hops:
                print(f"  {fact.query}: {fact.passage.title}: {fact.passage.text}")


if __name__ == "__main__":
    main()
