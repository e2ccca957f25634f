"""Sampling: logits of many rows to one token each; a request's draws depend on its seed and position, not on its
batch-mates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["AllowedTokens", "SamplingBatch", "draw_noise", "gumbel_of", "sample_tokens"]


IN_CACHE: Final = 2**17
"""Numbers of several arrays that stay in a core's cache."""
_CERTAIN = -1e-30
"""Logprob of a certain token among others: 0.0 says that there was no other."""


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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AllowedTokens:
    """Tokens that grammars leave to some of the rows."""

    rows: NDArray[np.int64]
    """Which rows are bound."""
    tokens: NDArray[np.bool_]
    """(bound rows, vocabulary): True where the token may come."""
    free: NDArray[np.bool_]
    """For each bound row True where there is a choice."""


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    # SplitMix64's finalizer (Steele, Lea, Flood 2014)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def draw_noise(
    seeds: NDArray[np.uint64], positions: NDArray[np.uint64], vocabulary: int, device: torch.device
) -> Tensor:
    """Gumbel noise (rows, vocabulary) from a counter: the same for one (seed, position) ever after."""
    counters = _mix(seeds + np.uint64(0x632BE59BD9B4E019)) + (positions + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    keys = torch.from_numpy(_mix(counters).view(np.int32).reshape(-1, 2)).to(device)
    tokens = torch.arange(vocabulary, dtype=torch.int32, device=device) * -1640531527  # 2^32 / golden ratio
    bits = tokens ^ keys[:, :1]
    # MurmurHash3's finalizer on 32 bits; the second key enters in its middle
    bits ^= (bits >> 16) & 0xFFFF
    bits *= -2048144789
    bits += keys[:, 1:]
    bits ^= (bits >> 13) & 0x7FFFF
    bits *= -1028477387
    bits ^= (bits >> 16) & 0xFFFF
    return gumbel_of((bits >> 8) & 0xFFFFFF)


def gumbel_of(numbers: Tensor) -> Tensor:
    """Gumbel noise of numbers in [0, 2^24): -log(-log(u)) at the middle of each one's share of [0, 1)."""
    uniforms = numbers.float().add_(0.5).mul_(2.0**-24)
    # the last middle, 1 - 2^-25, is 1.0 in float32; its -log is 2^-25, and no other's is below 2^-23
    return uniforms.log_().neg_().clamp_(min=2.0**-25).log_().neg_()


def _truncate(probs: Tensor, top_ks: Tensor, top_ps: Tensor) -> Tensor:
    """Zero what top-k, then top-p (of what top-k leaves), takes away; at least the most likely token stays. Equal ones
    stay in the order of their ids."""
    least = _least_probs(probs, top_ks, top_ps)
    is_candidate = (probs >= least[:, None]) & (probs > 0.0)
    rows, tokens = is_candidate.nonzero(as_tuple=True)
    counts = is_candidate.sum(-1)
    places = torch.arange(len(rows), device=probs.device) - (counts.cumsum(0) - counts)[rows]
    few = probs.new_zeros((len(probs), max(1, int(counts.max()))))
    few[rows, places] = probs[rows, tokens]
    ordered, order = few.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(few.shape[-1], device=probs.device)
    has_limit = top_ks > 0
    ordered = ordered.masked_fill((ranks >= top_ks[:, None]) & has_limit[:, None], 0.0)
    total = torch.where(has_limit, ordered.sum(-1), probs.sum(-1))[:, None]
    outside = ordered.cumsum(-1) - ordered >= top_ps[:, None] * total
    outside &= (top_ps < 1.0)[:, None]
    outside[:, 0] = False
    few = few.scatter(-1, order, ordered.masked_fill(outside, 0.0))
    truncated = torch.zeros_like(probs)
    truncated[rows, tokens] = few[rows, places]
    return truncated


def _least_probs(probs: Tensor, top_ks: Tensor, top_ps: Tensor) -> Tensor:
    """For each row a probability below which no token stays, so that few are sorted of a large vocabulary."""
    vocabulary = probs.shape[-1]
    # all tokens below (1 - p) / V have less than 1 - p together: what top-p keeps is among the others (half: rounding)
    least = (1.0 - top_ps) * probs.sum(-1) / (2 * vocabulary)
    most = min(int(top_ks.max()), vocabulary)
    if most > 0:
        likely = probs.topk(most, -1).values
        last = likely.gather(-1, top_ks.clamp(1, vocabulary)[:, None] - 1)[:, 0]
        least = torch.where(top_ks > 0, last, least)
    return least


def sample_tokens(
    logits: Tensor, batch: SamplingBatch, allowed: AllowedTokens | None = None
) -> tuple[list[int], list[float]]:
    """Sample a token for each row of `logits` (rows, vocabulary) and return ids and logprobs.

    The logprob is the untruncated softmax's at the row's temperature (at 1.0 for greedy rows), in float32. A bound row
    samples from that softmax renormalised over its `allowed` tokens, and its logprob is the whole softmax's all the
    same: what a trainer computes from the tokens alone. 0.0 stands for a token without a choice, and for no other of a
    bound row.
    """
    # on a CPU some rows at a time: what is computed of them stays in its cache from one operation to the next
    part = max(1, IN_CACHE // logits.shape[-1]) if logits.device.type == "cpu" else len(logits)
    token_ids: list[int] = []
    logprobs: list[float] = []
    for at in range(0, len(logits), part):
        rows = slice(at, at + part)
        drawn, values = _sample(logits[rows], _settings_of(batch, rows), _allowed_of(allowed, rows))
        token_ids += drawn
        logprobs += values
    return token_ids, logprobs


def _settings_of(batch: SamplingBatch, rows: slice) -> SamplingBatch:
    return SamplingBatch(
        temperatures=batch.temperatures[rows],
        top_ps=batch.top_ps[rows],
        top_ks=batch.top_ks[rows],
        seeds=batch.seeds[rows],
        positions=batch.positions[rows],
    )


def _allowed_of(allowed: AllowedTokens | None, rows: slice) -> AllowedTokens | None:
    """None where none of the rows is bound."""
    if allowed is None:
        return None
    here = (allowed.rows >= rows.start) & (allowed.rows < rows.stop)
    if not here.any():
        return None
    return AllowedTokens(rows=allowed.rows[here] - rows.start, tokens=allowed.tokens[here], free=allowed.free[here])


def _sample(logits: Tensor, batch: SamplingBatch, allowed: AllowedTokens | None) -> tuple[list[int], list[float]]:
    device = logits.device
    logits = logits.float()
    greedy = batch.temperatures == 0.0
    temperatures = np.where(greedy, np.float32(1.0), batch.temperatures)
    if (temperatures != 1.0).any():
        logits = logits / torch.from_numpy(temperatures).to(device)[:, None]
    logprobs = logits.log_softmax(-1)
    scores = logprobs
    if allowed is not None:
        rows, tokens = (torch.from_numpy(values).to(device) for values in (allowed.rows, allowed.tokens))
        scores = logprobs.clone()
        scores[rows] = logprobs[rows].masked_fill(~tokens, -torch.inf).log_softmax(-1)
    if not greedy.all():
        cut = np.flatnonzero(((batch.top_ks > 0) | (batch.top_ps < 1.0)) & ~greedy)
        if len(cut):
            rows = torch.from_numpy(cut).to(device)
            top_ks, top_ps = (torch.from_numpy(values[cut]).to(device) for values in (batch.top_ks, batch.top_ps))
            truncated = _truncate(scores[rows].exp(), top_ks, top_ps).log()
            scores = scores.clone()
            scores[rows] = truncated
        # argmax of log p + Gumbel noise samples from p (Gumbel 1954); unlike a cumulated sum it forgives rounding,
        # which differs
        # between batches
        noise = draw_noise(batch.seeds, batch.positions, logits.shape[-1], device)
        if greedy.any():
            noise[torch.from_numpy(greedy).to(device)] = 0.0
        scores = noise.add_(scores)
    drawn = scores.argmax(-1, keepdim=True)
    values = logprobs.gather(-1, drawn)[:, 0].tolist()
    if allowed is not None:
        for row, is_free in zip(allowed.rows.tolist(), allowed.free.tolist(), strict=True):
            values[row] = min(values[row], _CERTAIN) if is_free else 0.0
    return drawn[:, 0].tolist(), values
