"""Metrics of a step, from the sums that its updates added up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from lightningrl.types import Sample

__all__ = ["CRITIC", "mean_metrics", "staleness"]

CRITIC = "critic "
"""Prefix of the names of the critic's sums."""
_NO_SPREAD = 1e-9


def mean_metrics(totals: Mapping[str, float], epochs: int) -> dict[str, float]:
    """Metrics of a step: `loss`, `grad_norm` before clipping by update, and everything else by trained token.

    `trie_efficiency` = distinct tokens ÷ those computed.
    """
    apart = ("loss", "grad_norm", "updates", "tokens", "distinct", "computed")
    metrics = {
        name: value / totals["tokens"]
        for name, value in totals.items()
        if name not in apart and not name.startswith(CRITIC)
    }
    metrics["loss"] = totals["loss"] / epochs
    metrics["grad_norm"] = totals["grad_norm"] / totals["updates"]
    metrics["trie_efficiency"] = totals["distinct"] / totals["computed"]
    sums = {name.removeprefix(CRITIC): value for name, value in totals.items() if name.startswith(CRITIC)}
    return metrics | _critic_metrics(sums, totals)


def _critic_metrics(sums: Mapping[str, float], totals: Mapping[str, float]) -> dict[str, float]:
    """Metrics of a critic: `value_loss` by target, its gradient's norm, and the share of the targets' variance that the
    values explain: 1 = all of it, 0 = no more than their mean would, below 0 = less."""
    if not (n := sums.get("n", 0.0)):
        return {}
    spread, missed = (sums[f"{name}²"] / n - (sums[name] / n) ** 2 for name in ("target", "miss"))
    metrics = {"value_loss": sums["loss"] / n, "value_grad_norm": sums["grad_norm"] / totals["updates"]}
    return metrics | ({"value_explained": 1.0 - missed / spread} if spread > _NO_SPREAD else {})


def staleness(samples: Sequence[Sample], version: int) -> dict[str, float]:
    """Age of the trained tokens, in versions."""
    ages = version - np.concatenate([sample.versions[sample.mask] for sample in samples])
    return {"staleness_mean": float(ages.mean()), "staleness_max": float(ages.max())}
