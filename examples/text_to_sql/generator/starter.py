"""Build the starter policy: a small transformer with its own tokenizer, cold-started on imperfect demonstrations.

    python generator/starter.py --out starter

The result is an ordinary transformers folder. The policy has seen other databases than reinforcement learning and
validation use, and demonstrators who are wrong more often than right (mistakes.py, demonstrations.py): it knows the
right queries, but gives them less probability than the wrong ones. Reinforcement learning lifts what is already there.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from data import SPLITS, build_splits
from demonstrations import build_demonstrations

from lightningrl_torch.cold_start import build_command, build_model, build_tokenizer, cold_start, write_policy

__all__ = ["build_starter"]

SEED = 7
RIGHT_DATABASES, FAULTY_DATABASES, QUESTIONS = 900, 500, 16
"""First demonstrations that are right, then imperfect ones, which decide what the policy prefers."""


def build_starter(
    out: Path, *, right_databases: int = RIGHT_DATABASES, faulty_databases: int = FAULTY_DATABASES, seed: int = SEED
) -> None:
    """Train the starter policy and write its folder."""
    taken = {database.signature() for split in SPLITS for database, _ in build_splits()[split]}
    right = list(build_demonstrations(right_databases, QUESTIONS, seed, taken, is_faulty=False))
    faulty = list(build_demonstrations(faulty_databases, QUESTIONS, seed, taken, is_faulty=True))
    tokenizer = build_tokenizer([*right, *faulty])
    model = build_model(tokenizer, seed=seed)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens")
    print(f"{len(right):,} right and {len(faulty):,} imperfect demonstrations")
    cold_start(model, tokenizer, [right, faulty], seed=seed)
    write_policy(out, model, tokenizer)


if __name__ == "__main__":
    build_command(build_starter, Path(__file__).parents[1] / "starter", description=__doc__)
