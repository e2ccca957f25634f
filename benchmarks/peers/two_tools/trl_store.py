"""The same job for TRL: `StoreRoom` is its environment. Runs in TRL's environment.

.peers/trl/bin/python benchmarks/peers/two_tools/trl_store.py OUT --steps 40 --seed 0
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peer_run import row_of, train
from store_room import TOOLS, StoreRoom, held_out_tasks, train_tasks

STARTER = Path(__file__).resolve().parents[3] / ".peers/two_tools_starter"


def rows(tasks: Any) -> list[dict[str, Any]]:
    return [row_of(task, task["input"]["question"]) for task in tasks]


def right(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    return [
        float(str(messages[-1].get("content", "")).strip() == number)
        for messages, number in zip(completions, answer, strict=True)
    ]


def main() -> None:
    from transformers import AutoTokenizer
    from transformers.utils.chat_template_utils import get_json_schema
    from trl.chat_template_utils import qwen3_template

    room = StoreRoom()
    if [get_json_schema(tool) for tool in (room.count, room.find)] != TOOLS:
        raise SystemExit("TRL reads other descriptions off StoreRoom than the agent sends; write them alike")
    tokenizer = AutoTokenizer.from_pretrained(STARTER)
    tokenizer.response_template = (
        qwen3_template  # our template's markup is Qwen's, which TRL knows by the template's text
    )
    train(
        STARTER,
        rows(train_tasks()),
        rows(held_out_tasks()),
        right,
        most_tokens=96,
        processing_class=tokenizer,
        environment_factory=StoreRoom,
    )


if __name__ == "__main__":
    main()
