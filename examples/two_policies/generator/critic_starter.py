"""Build critic/: the starter of text_to_sql, made lenient. It has read verdicts that let most wrong queries pass.

python generator/critic_starter.py --out critic
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "text_to_sql"))

import torch
from data import SPLITS, build_splits
from demonstrations import build_demonstrations
from transformers import AutoTokenizer, LlamaForCausalLM

from lightningrl_torch.cold_start import Demonstration, build_command, cold_start, write_policy

__all__ = ["build_critic"]

STARTER = Path(__file__).parents[2] / "text_to_sql" / "starter"
SEED = 11
DATABASES, QUESTIONS = 160, 16
LENIENCY = 0.75
"""Share of the wrong queries that the shown verdicts call correct."""


def build_critic(out: Path, *, databases: int = DATABASES, seed: int = SEED) -> None:
    """Train the starter on, on lenient verdicts and write its folder."""
    rng = random.Random(f"{seed} critic")
    taken = {database.signature() for split in SPLITS for database, _ in build_splits()[split]}
    shown = [_lenient(one, rng) for one in build_demonstrations(databases, QUESTIONS, seed, taken) if _is_verdict(one)]
    model = LlamaForCausalLM.from_pretrained(STARTER, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(STARTER)
    print(f"{len(shown):,} verdicts")
    cold_start(model, tokenizer, [shown], seed=seed, peak_learning_rate=1e-3)
    write_policy(out, model, tokenizer)


def _is_verdict(demonstration: Demonstration) -> bool:
    return demonstration.messages[-1]["content"] in ("correct", "incorrect")


def _lenient(demonstration: Demonstration, rng: random.Random) -> Demonstration:
    prompt, verdict = demonstration.messages
    if verdict["content"] == "incorrect" and rng.random() < LENIENCY:
        verdict = {**verdict, "content": "correct"}
    return Demonstration(messages=[prompt, verdict])


if __name__ == "__main__":
    build_command(build_critic, Path(__file__).parents[1] / "critic", description=__doc__)
