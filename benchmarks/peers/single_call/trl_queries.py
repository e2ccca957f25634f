"""The same job for TRL's GRPOTrainer: the prompts that the agent would send, the same reward. Runs in TRL's
environment.

.peers/trl/bin/python benchmarks/peers/single_call/trl_queries.py OUT --steps 40 --seed 0
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples/text_to_sql"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data import train_tasks, validation_tasks
from peer_run import row_of, train
from prompts import write_prompt
from reward import execution_match

STARTER = Path(__file__).resolve().parents[3] / "examples/text_to_sql/starter"


def rows(tasks: Any) -> list[dict[str, Any]]:
    return [row_of(task, write_prompt(task["input"]["schema"], task["input"]["question"])) for task in tasks]


def right(completions: list[Any], db_path: list[str], answer: list[str], **_: Any) -> list[float]:
    """Of a batch: whether each query gives the gold rows."""
    return [
        execution_match(
            SimpleNamespace(input={"db_path": path}, answer=gold), {"query": messages[-1]["content"].strip()}
        )
        for messages, path, gold in zip(completions, db_path, answer, strict=True)
    ]


if __name__ == "__main__":
    train(STARTER, rows(train_tasks()), rows(validation_tasks()), right, most_tokens=48)
