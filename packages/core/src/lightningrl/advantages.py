"""Arithmetic of advantages: exact means, and rows of the learner that teach or share their tokens."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightningrl.types import Sample, common_tokens

__all__ = ["FloatArray", "are_equal", "center", "count_distinct", "mean", "sort_by_tokens", "teaching_rows"]

FloatArray = NDArray[np.float64]

_ROUNDING = 1e-12
"""Values that differ by less than this share of the largest are equal: 0.1 + 0.2 is not 0.3."""


def mean(values: Iterable[float]) -> float:
    """The mean; 0.0 of no values. Equal values give exactly that value: `sum(values) / len(values)` may be rounded."""
    array = np.fromiter(values, dtype=np.float64)
    if not array.size:
        return 0.0
    low = array.min()
    return float(low + (array - low).mean())


def center(values: ArrayLike) -> FloatArray:
    """The values less their mean: R - μ. Values that are equal but for rounding give exact zeros."""
    array = np.asarray(values, dtype=np.float64)
    return np.zeros_like(array) if are_equal(array) else array - mean(array)


def are_equal(values: FloatArray) -> bool:
    """True if the values are the same but for rounding, or if there are none."""
    return not values.size or bool(np.ptp(values) <= _ROUNDING * np.abs(values).max())


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
