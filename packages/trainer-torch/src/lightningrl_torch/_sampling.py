"""Sampling: logits of many rows to one token each; a request's draws depend on its seed and position, not on its batch-mates."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["SamplingBatch", "draw_uniforms", "sample_tokens"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SamplingBatch:
    """Sampling settings of the rows, one entry per row."""

    temperatures: NDArray[np.float32]
    """0.0 = greedy."""
    top_ps: NDArray[np.float32]
    top_ks: NDArray[np.int64]
    """0 = no limit."""
    seeds: NDArray[np.uint64]
    positions: NDArray[np.uint64]
    """Completion tokens sampled so far."""


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    # SplitMix64's finalizer (Steele, Lea, Flood 2014)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def draw_uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position), the same ever after: a counter-based generator."""
    counters = _mix(seeds + np.uint64(0x632BE59BD9B4E019)) + (positions + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    return np.asarray((_mix(counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def _truncate(probs: Tensor, top_ks: Tensor, top_ps: Tensor) -> Tensor:
    """Zero what top-k, then top-p (of what top-k leaves), takes away; at least the most likely token stays."""
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(probs.shape[-1], device=probs.device)
    limits = torch.where(top_ks > 0, top_ks, probs.shape[-1])
    ordered = ordered.masked_fill(ranks >= limits[:, None], 0.0)
    before = ordered.cumsum(-1) - ordered
    outside = before >= top_ps[:, None] * ordered.sum(-1, keepdim=True)
    outside &= (top_ps < 1.0)[:, None]
    outside[:, 0] = False
    return torch.zeros_like(probs).scatter(-1, order, ordered.masked_fill(outside, 0.0))


def sample_tokens(logits: Tensor, batch: SamplingBatch) -> tuple[list[int], list[float]]:
    """Sample a token for each row of `logits` (rows, vocabulary) and return ids and logprobs.

    The logprob is the untruncated softmax's at the row's temperature (at 1.0 for greedy rows), in float32.
    """
    device = logits.device
    logits = logits.float()
    greedy = batch.temperatures == 0.0
    temperatures = np.where(greedy, np.float32(1.0), batch.temperatures)
    if (temperatures != 1.0).any():
        logits = logits / torch.from_numpy(temperatures).to(device)[:, None]
    logprobs = logits.log_softmax(-1)
    if greedy.all():
        tokens = logprobs.argmax(-1, keepdim=True)
    else:
        probs = logprobs.exp()
        cut = np.flatnonzero(((batch.top_ks > 0) | (batch.top_ps < 1.0)) & ~greedy)
        if len(cut):
            rows = torch.from_numpy(cut).to(device)
            top_ks, top_ps = (torch.from_numpy(values[cut]).to(device) for values in (batch.top_ks, batch.top_ps))
            probs[rows] = _truncate(probs[rows], top_ks, top_ps)
        heights = probs.cumsum(-1)
        total = heights[:, -1:]
        uniforms = torch.from_numpy(draw_uniforms(batch.seeds, batch.positions)).to(device)[:, None]
        # the first token whose cumulated probability exceeds u * total; below `total`, so its own probability is positive
        marks = torch.minimum((uniforms * total.double()).float(), torch.nextafter(total, torch.zeros_like(total)))
        tokens = torch.searchsorted(heights, marks, right=True).clamp_(max=logits.shape[-1] - 1)
        if greedy.any():
            tokens = torch.where(torch.from_numpy(greedy).to(device)[:, None], logprobs.argmax(-1, keepdim=True), tokens)
    return tokens[:, 0].tolist(), logprobs.gather(-1, tokens)[:, 0].tolist()
