"""The MuSiQue data set (Trivedi et al., 2022), as it is unpacked from its own archive, as tasks of the same form as the
generated ones.

    PATH/musique_ans_v1.0_train.jsonl  PATH/musique_ans_v1.0_dev.jsonl

The corpus is what both files bring along: every paragraph once, those of one question are the others' distractors.
https://github.com/StonyBrookNLP/musique
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from data import index_folder
from retriever import Passage

__all__ = ["FILES", "load_musique", "musique_train_tasks", "musique_validation_tasks"]

FILES = {"train": "musique_ans_v1.0_train.jsonl", "dev": "musique_ans_v1.0_dev.jsonl"}


def musique_train_tasks(
    path: str | Path, cache: str | Path | None = None, encoder: str | None = None
) -> Iterator[dict[str, Any]]:
    """The questions of the train file; `cache` and `encoder` as in data.py."""
    yield from load_musique(path, "train", cache, encoder)


def musique_validation_tasks(
    path: str | Path, cache: str | Path | None = None, encoder: str | None = None
) -> Iterator[dict[str, Any]]:
    """The questions of the dev file."""
    yield from load_musique(path, "dev", cache, encoder)


def load_musique(
    path: str | Path, split: str, cache: str | Path | None = None, encoder: str | None = None
) -> Iterator[dict[str, Any]]:
    """Tasks of one file over the index of both. Raises `FileNotFoundError` or `ValueError` naming what is missing,
    before any task."""
    root = Path(path).expanduser().resolve()
    records = {name: _read(root / file) for name, file in FILES.items()}
    passages = dict.fromkeys(
        Passage(title=paragraph["title"], text=paragraph["paragraph_text"])
        for split_records in records.values()
        for record in split_records
        for paragraph in record["paragraphs"]
    )
    version = " ".join(
        f"{file} {(root / file).stat().st_size} {(root / file).stat().st_mtime_ns}" for file in FILES.values()
    )
    index = index_folder(passages, f"{root} {version}", cache, encoder)
    return (
        {
            "id": f"musique/{record['id']}",
            "input": {"question": record["question"], "index": index},
            "answer": [record["answer"], *record["answer_aliases"]],
            "metadata": {"hops": len(record["question_decomposition"])},
        }
        for record in records[split]
        if record.get("answerable", True)
    )


@functools.cache
def _read(file: Path) -> list[dict[str, Any]]:
    if not file.is_file():
        raise FileNotFoundError(f"no file {str(file)!r}; give the folder that MuSiQue's archive unpacks to")
    records: list[dict[str, Any]] = []
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            record = json.loads(line)
            missing = {"id", "question", "answer", "answer_aliases", "paragraphs", "question_decomposition"} - set(
                record
            )
            if missing:
                raise ValueError(
                    f"{file.name}, line {number}: no {min(missing)!r}; "
                    "the files with answers are musique_ans_v1.0_*.jsonl"
                )
            records.append(record)
    return records
