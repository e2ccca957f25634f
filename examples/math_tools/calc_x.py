"""Calc-X, as it is published, as tasks of the same form as the generated ones.

    PATH           a file, or a folder with one file or several for a split:
    PATH/train.jsonl          data/train-00000-of-00001.parquet          train/ (datasets.save_to_disk)

A record has `question`, `result`, and where it is known a `chain`: the steps, as
`<gadget id="calculator">48/2</gadget> <output>24</output> ... <result>72</result>`.
Calc-X and Calcformers, EMNLP 2023, arXiv 2305.15017; on the hub MU-NLPC/Calc-gsm8k, Calc-ape210k and others.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

__all__ = ["calc_x_train_tasks", "calc_x_validation_tasks", "gadget_calls", "load_calc_x"]


def calc_x_train_tasks(path: str | Path) -> Iterator[dict[str, Any]]:
    """The problems of the split train."""
    yield from load_calc_x(path, "train")


def calc_x_validation_tasks(path: str | Path) -> Iterator[dict[str, Any]]:
    """The problems of the split validation."""
    yield from load_calc_x(path, "validation")


def load_calc_x(path: str | Path, split: str) -> Iterator[dict[str, Any]]:
    """The problems of a split, or of `path` itself if it is a file. Raises `FileNotFoundError` or `ValueError` naming
    what is missing."""
    files = _files(Path(path).expanduser().resolve(), split)
    for number, (file, record) in enumerate((one, record) for one in files for record in _read(one)):
        question, result = record.get("question"), record.get("result")
        if not question or result in (None, ""):
            raise ValueError(
                f"record {number} of {str(file)!r} lacks a question or a result; its fields are {', '.join(record)}"
            )
        yield {
            "id": str(record.get("id") or f"calc_x/{split}/{number}"),
            "input": str(question),
            "answer": str(result),
            "metadata": {"depth": len(gadget_calls(str(record.get("chain") or ""))), "source": file.name},
        }


def gadget_calls(chain: str) -> list[tuple[str, str]]:
    """The calculator's expressions and outputs in a chain, in order."""
    pairs = re.findall(r'<gadget id="calculator">(.*?)</gadget>\s*<output>(.*?)</output>', chain, re.DOTALL)
    return [(expression.strip(), output.strip()) for expression, output in pairs]


def _files(path: Path, split: str) -> list[Path]:
    if path.is_file():
        return [path]
    found = [path / split] if (path / split / "dataset_info.json").is_file() else []
    for pattern in ("{split}*.jsonl", "data/{split}*.jsonl", "{split}*.parquet", "data/{split}*.parquet"):
        found = found or sorted(path.glob(pattern.format(split=split)))
    if not found:
        raise FileNotFoundError(
            f"no file of the split {split!r} in {str(path)!r}; "
            f"give a .jsonl or .parquet file, or a folder with {split}*"
        )
    return found


def _read(path: Path) -> Iterable[Mapping[str, Any]]:
    if path.suffix in (".jsonl", ".json"):
        lines = path.read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines if line.strip()]
    try:
        import datasets
    except ImportError:
        raise ValueError(
            f"{str(path)!r} needs the package `datasets` (pip install datasets); or save it as .jsonl"
        ) from None
    if path.is_dir():
        return list(datasets.load_from_disk(str(path)))
    return list(datasets.Dataset.from_parquet(str(path)))
