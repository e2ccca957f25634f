"""The gap between the probability that a token was sampled with and the one that the trainer gives it.

calls and the trainer's logprobs ─► TokenGaps ─► Gap (all, by version, by call, by position) ─► judge_gaps ─► Check
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lightningrl.recipe import Recipe
from lightningrl.types import Transition

__all__ = ["ROUNDING", "Check", "Gap", "TokenGaps", "judge_gaps", "number_format"]

FEWEST = 32
"""Tokens of a part from which its mean is judged by itself."""
FAR = math.log(1.2)
"""Log-ratio beyond which PPO's clip, 0.2, takes a token for one that has been learned already."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One line of a certificate."""

    name: str
    is_passed: bool | None
    """None = it could not be looked at."""
    evidence: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """|log p(trainer) - log p(rollout)| of some tokens."""

    part: str
    """Name of the part: `all`, `version 3`, `call 2`, `position 128-255`."""
    tokens: int
    mean: float
    p99: float
    largest: float
    far: float
    """Share of tokens whose ratio PPO would clip before anything is learned."""


@dataclass(kw_only=True, slots=True)
class TokenGaps:
    """Gaps of one policy's tokens."""

    tokens: list[NDArray[np.float64]] = field(default_factory=list[NDArray[np.float64]])
    """Gap, policy version, index of the call and position in the row, by call: `[call][4][token]`."""

    def add(self, call: Transition, trainer: NDArray[np.float32]) -> None:
        chosen = np.flatnonzero(call.chosen)
        version, index = (np.full(len(chosen), number) for number in (call.policy_version, call.index))
        gap = np.abs(trainer - call.logprobs)[chosen]
        self.tokens.append(np.stack([gap, version, index, len(call.prompt_ids) + chosen]))

    def gaps(self) -> tuple[Gap, ...]:
        """Gaps of all tokens and of the parts of them; empty where there are none."""
        if not self.tokens:
            return ()
        gap, version, call, position = np.concatenate(self.tokens, axis=1)
        begin = 2 ** np.floor(np.log2(np.maximum(position, 1)))
        columns = ("version {}", version), ("call {}", call), ("position {}-{}", begin)
        parts = (
            _gap(name.format(number, 2 * number - 1), gap[column == number])
            for name, column in columns
            for number in np.unique(column).astype(int)
        )
        return _gap("all", gap), *parts


def _gap(part: str, values: NDArray[np.float64]) -> Gap:
    return Gap(
        part=part,
        tokens=len(values),
        mean=float(values.mean()),
        p99=float(np.quantile(values, 0.99)),
        largest=float(values.max()),
        far=float((values > FAR).mean()),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounding:
    """Differences that one number format makes of the same weights in another order of summation."""

    mean: float
    """Mean of |log p(trainer) - log p(rollout)|."""
    far: float
    """Share of tokens beyond `FAR`."""
    largest: float | None
    """Largest difference of a token; None = a few are large without a fault."""


ROUNDING = {
    # 24 bits: clean runs of the examples have means of some 1e-7 and a largest of 1e-5; ten times that is no rounding
    # any more
    "float32": Rounding(mean=1e-5, far=0.0, largest=1e-3),
    # 8 bits: 0.2 % of each logit, so some hundredths where engine and learner sum in another order, and a few tokens
    # far off
    "bfloat16": Rounding(mean=0.03, far=0.01, largest=None),
}


def number_format(recipe: Recipe, policy: str) -> str:
    """Number format of engine and learner: float32 where both are torch's and nothing else is set."""
    dtype = recipe.options_of(recipe.all_policies[policy]).get(
        "dtype", "float32" if recipe.backend == "torch" else "bfloat16"
    )
    return dtype if dtype in ROUNDING else "bfloat16"


def judge_gaps(gaps: Mapping[str, Sequence[Gap]], recipe: Recipe) -> Iterator[Check]:
    for policy, parts in gaps.items():
        name = f"probabilities of {policy!r}"
        if not parts:
            why = "no weights of the versions that sampled are at hand, or the backend does not score"
            yield Check(name=name, is_passed=None, evidence=why)
            continue
        kind = number_format(recipe, policy)
        may = ROUNDING[kind]
        bad = [part for part in parts if not _is_rounding(part, may)]
        whole = parts[0]
        evidence = (
            f"{whole.tokens} tokens recomputed: gap {whole.mean:.1e} on average, {whole.largest:.1e} at most ({kind})"
        )
        if bad:
            worst = max(bad, key=lambda part: math.inf if math.isnan(part.mean) else part.mean)
            evidence += f"; the trainer does not see what was sampled, most in {worst.part}: {worst.mean:.1e}"
            evidence += f"; {_explain(parts, may)}"
        yield Check(name=name, is_passed=not bad, evidence=evidence)


def _is_rounding(part: Gap, may: Rounding) -> bool:
    """Tell whether a gap is mere rounding. One that is no number is not."""
    is_near = part.tokens < FEWEST or (part.mean <= may.mean and part.far <= may.far)
    return math.isfinite(part.mean) and is_near and (may.largest is None or part.largest <= may.largest)


def _explain(parts: Sequence[Gap], may: Rounding) -> str:
    """Explain a gap by where it begins."""
    versions, calls = ([part for part in parts if part.part.startswith(kind)] for kind in ("version ", "call "))
    if len(versions) > 1 and _is_rounding(versions[0], may):
        return "the first version is clean: look for weights that did not reach the engine"
    if len(calls) > 1 and _is_rounding(calls[0], may):
        return "first calls are clean: look for a history that was tokenised anew"
    return (
        "from the first call of the first version on: look for another chat template, other sampling settings, or "
        "other numerics"
    )
