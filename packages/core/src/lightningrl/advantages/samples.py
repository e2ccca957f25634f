"""Rows for the learner as a trainer backend takes them: which of them teach, and what they share."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from lightningrl.types import Sample, common_tokens

__all__ = ["count_distinct", "sort_by_tokens", "teaching_rows"]


def teaching_rows(samples: Iterable[Sample]) -> list[Sample]:
    """Select rows in which some token has an advantage.

    For learners whose loss has no other term (KL, entropy bonus, critic).
    Weights were fixed when the rows were built, so the rows that stay weigh what they weighed.
    """
    return [sample for sample in samples if sample.advantages.any()]


def count_distinct(samples: Iterable[Sample]) -> int:
    """Count the tokens of the rows, those of a shared prefix once: the work of a learner that shares all prefixes."""
    order, shared = sort_by_tokens(samples)
    return sum(len(sample.token_ids) for sample in order) - sum(shared)


def sort_by_tokens(samples: Iterable[Sample]) -> tuple[list[Sample], list[int]]:
    """Order the rows so that neighbours share the longest prefixes; also how many tokens each shares with the last."""
    # big-endian bytes compare like the token ids themselves
    order = sorted(samples, key=lambda sample: sample.token_ids.astype(">u4").tobytes())
    shared = [common_tokens(row.token_ids, following.token_ids) for row, following in pairwise(order)]
    return order, [0, *shared][: len(order)]
