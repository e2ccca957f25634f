"""Samples as a learner takes them: refused where they cannot be trained on, counted where they teach a critic."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from lightningrl.errors import BackendError
from lightningrl.types import Sample

__all__ = ["check_samples", "count_targets", "deal", "some_rows"]


def count_targets(sample: Sample) -> int:
    """Count the tokens of a sample that teach a critic."""
    return 0 if sample.value_targets is None else int(np.isfinite(sample.value_targets[sample.mask]).sum())


def check_samples(samples: Sequence[Sample], vocabulary: int) -> None:
    """Raise BackendError for samples that cannot be trained on."""
    if not any(sample.mask.any() for sample in samples):
        raise BackendError(f"none of {len(samples)} samples has a trained token; skip the step")
    for sample in samples:
        if not len(sample.token_ids):
            raise BackendError(f"a sample of rollout {sample.rollout_id!r} has no tokens; leave it out")
        if sample.mask[0]:
            raise BackendError(
                f"a sample of rollout {sample.rollout_id!r} trains its first token, which nothing predicts; start "
                "with a prompt"
            )
        if sample.token_ids.min() < 0 or sample.token_ids.max() >= vocabulary:
            raise BackendError(
                f"a sample of rollout {sample.rollout_id!r} has token ids outside 0..{vocabulary - 1}; another "
                "policy sampled it"
            )
        for name in ("logprobs", "advantages", "weights", "temperatures"):
            if not np.isfinite(getattr(sample, name)).all():
                raise BackendError(
                    f"a sample of rollout {sample.rollout_id!r} has {name} that are not finite; check rewards and "
                    "credit"
                )


def deal(samples: Sequence[Sample], minibatches: int, generator: random.Random) -> list[list[Sample]]:
    """Rollouts at random to minibatches of about the same size; a rollout's rows stay together."""
    if minibatches == 1:
        return [list(samples)]
    by_rollout: dict[str, list[Sample]] = {}
    for sample in samples:
        by_rollout.setdefault(sample.rollout_id, []).append(sample)
    rollouts = list(by_rollout.values())
    generator.shuffle(rollouts)
    count = min(minibatches, len(rollouts))
    return [[sample for rollout in rollouts[start::count] for sample in rollout] for start in range(count)]


def some_rows(samples: Sequence[Sample], tokens: int) -> list[Sample]:
    """Rows with a trained token, evenly from all of them, of about so many tokens together; at least one."""
    rows = [sample for sample in samples if sample.mask.any()]
    mean = sum(len(row.token_ids) for row in rows) / len(rows)
    count = max(1, min(len(rows), int(tokens / mean)))
    return [rows[number * len(rows) // count] for number in range(count)]
