"""The batch that is being decoded: rows join by prefill, one forward samples one token for every row, rows leave when
done."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightningrl.backends import GenerateRequest, TokenChunk
from lightningrl.errors import BackendError
from lightningrl_torch._forward import Forward, build_forward
from lightningrl_torch._grammars import MaskThread
from lightningrl_torch._graphs import with_graphs
from lightningrl_torch._models import read_traits
from lightningrl_torch._prefill import Prefiller, common_length
from lightningrl_torch._requests import Running, chunk_interval, deliver, not_finite
from lightningrl_torch._sampling import SamplingBatch, sample_tokens
from lightningrl_torch._shared import LEAST_SAVED, SharedPrompt
from lightningrl_torch._slots import KeyValues, SlotCache
from lightningrl_torch.settings import EngineSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Decoder"]


class Decoder:
    """Not thread-safe: belongs to the engine's thread."""

    def __init__(self, model: PreTrainedModel | Forward, *, policy: str, settings: EngineSettings) -> None:
        self.forward = with_graphs(
            model
            if isinstance(model, Forward)
            else build_forward(model, read_traits(model, policy), autocast=settings.autocast)
        )
        self._policy = policy
        self._settings = settings
        self._device = self.forward.device
        self._cache = SlotCache(self.forward.layers)
        self._prefiller = Prefiller(
            self.forward, batch_tokens=settings.prefill_tokens, cache_tokens=settings.prefix_cache_tokens
        )
        self._masks = MaskThread(self.forward.vocabulary)
        self._running: list[Running] = []
        # one entry per row
        self._lengths: NDArray[np.int64] = np.zeros(0, np.int64)
        self._shared: NDArray[np.int64] = np.zeros(0, np.int64)
        """Tokens of `_lengths` that are the shared prompt's."""
        self._last: NDArray[np.int64] = np.zeros(0, np.int64)
        self._sampling = _batch_of([])

    @property
    def rows(self) -> int:
        """Requests in the batch."""
        return len(self._running)

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return self.forward.vocabulary

    def check(self, request: GenerateRequest) -> None:
        """Nothing to refuse: all of `SamplingSettings` is honoured."""

    def forget(self) -> None:
        """The weights have changed: drop remembered prompts."""
        self.forward.refresh()
        self._prefiller.clear()

    def join(self, joining: Sequence[Running]) -> None:
        """Prefill all but the last token of each prompt; that one is the row's first decoding step."""
        self._running.extend(joining)  # first, so that a failure below finds them
        prompts = [running.request.prompt_ids[:-1] for running in joining]
        states = self._prefiller.prefill(prompts)
        shared = self._share(prompts, states)
        own: dict[tuple[int, int], KeyValues] = {}  # rows of one prompt go on from one tensor
        for kv, length in zip(states, shared, strict=True):
            own[id(kv), length] = own.get((id(kv), length)) or _behind(kv, length)
        self._cache.join([own[id(kv), length] for kv, length in zip(states, shared, strict=True)])
        self._shared = np.append(self._shared, np.array(shared, np.int64))
        self._find_sharing()
        self._lengths = np.append(self._lengths, [len(running.request.prompt_ids) - 1 for running in joining])
        self._last = np.append(self._last, [running.request.prompt_ids[-1] for running in joining])
        self._sampling = _batch_of(self._running)

    def step(self, version: int) -> None:
        """Sample one token for every row and deliver what is due."""
        if not self._running:
            return
        bound = [(row, one.grammar) for row, one in enumerate(self._running) if one.grammar is not None]
        masks = self._masks.begin([row for row, _ in bound], [state for _, state in bound]) if bound else None
        logits = self._logits()
        token_ids, logprobs = sample_tokens(logits, self._sampling, None if masks is None else masks.result())
        if not math.isfinite(sum(logprobs)):
            raise not_finite(self._policy)
        self._lengths += 1
        self._last = np.asarray(token_ids, np.int64)
        self._sampling.positions[:] += np.uint64(1)
        now = time.monotonic()
        interval = chunk_interval(self.rows, self._settings.stream_interval_s)
        due: list[tuple[Running, TokenChunk | Exception]] = []
        done: list[int] = []
        for row, (running, token_id, logprob) in enumerate(zip(self._running, token_ids, logprobs, strict=True)):
            if running.grammar is not None and running.grammar.error is not None:
                running.finished = True
                due.append((running, _broken(running, running.grammar.error)))
                done.append(row)
                continue
            reason = running.append(token_id, logprob)
            chunk = running.take_chunk(version, reason, now, interval)
            if chunk is not None:
                due.append((running, chunk))
            if reason is not None:
                done.append(row)
        deliver(due)
        self._leave(done)

    def drop(self, gone: Collection[Running]) -> None:
        """Free the rows of cancelled requests."""
        self._leave([row for row, running in enumerate(self._running) if running in gone])

    def evict(self) -> list[Running]:
        """Forget all rows and return their requests."""
        running, self._running = self._running, []
        self._lengths, self._last, self._shared = (np.zeros(0, np.int64) for _ in range(3))
        self._sampling = _batch_of([])
        self._cache.clear()
        self._prefiller.clear()
        self.forward.rest()
        return running

    def close(self) -> None:
        """Stop the thread of the masks."""
        self._masks.close()

    def _logits(self) -> Tensor:
        """(rows, vocabulary) after each row's last token."""
        self._cache.make_room()
        width = self._cache.width + 1
        allowed = None
        own = self._lengths - self._shared
        if int(own.min()) + 1 < width:
            padding = torch.from_numpy(width - 1 - own).to(self._device)
            allowed = torch.arange(width, device=self._device) >= padding[:, None]
        token_ids, positions = (torch.from_numpy(values).to(self._device) for values in (self._last, self._lengths))
        logits = self.forward.decode(token_ids, positions, self._cache, allowed)
        self._cache.advance()
        return logits

    def _leave(self, done: Sequence[int]) -> None:
        """Fill the places of `done` rows with the last rows."""
        if not done:
            return
        rows = self.rows - len(done)
        gone = set(done)
        staying = [row for row in range(rows, self.rows) if row not in gone]
        moves = list(zip([row for row in done if row < rows], staying, strict=True))
        for target, source in moves:
            self._running[target] = self._running[source]
            self._lengths[target] = self._lengths[source]
            self._last[target] = self._last[source]
            self._shared[target] = self._shared[source]
        del self._running[rows:]
        self._lengths, self._last, self._shared = self._lengths[:rows], self._last[:rows], self._shared[:rows]
        self._sampling = _batch_of(self._running)
        self._cache.leave(moves, rows, int((self._lengths - self._shared).max(initial=0)))
        self._find_sharing()

    def _share(self, prompts: Sequence[tuple[int, ...]], states: Sequence[KeyValues]) -> list[int]:
        """Tokens of each joining prompt that the cache's shared prompt has; where there is none yet, what all of them
        begin with becomes it, if that saves much."""
        if self._cache.shared is None and self.forward.shares and len(prompts) > 1:
            length = common_length(min(prompts), max(prompts))  # what the outermost have in common, all have
            if length and (len(prompts) - 1) * states[0][0][:2, :, :length].nbytes >= LEAST_SAVED:
                self._cache.shared = SharedPrompt(prompts[0][:length], states[0][0][:, :, :length])
        shared = self._cache.shared
        return [0 if shared is None or not shared.begins(ids) else len(shared.token_ids) for ids in prompts]

    def _find_sharing(self) -> None:
        """Say which rows have the shared prompt; forget one that none has."""
        rows = np.flatnonzero(self._shared)
        if not len(rows):
            self._cache.shared = None
        elif self._cache.shared is not None:
            self._cache.shared.rows = None if len(rows) == self.rows else torch.from_numpy(rows).to(self._device)


def _behind(states: KeyValues, tokens: int) -> KeyValues:
    """Keys and values of what stands behind so many tokens."""
    rest = [part[:, :, tokens:] for part in states]
    return rest if rest and rest[0].shape[2] else []


def _broken(running: Running, error: str) -> BackendError:
    return BackendError(f"request {running.request.id!r}: its grammar leaves no token to sample: {error}")


def _batch_of(running: Sequence[Running]) -> SamplingBatch:
    settings = [one.request.sampling for one in running]
    return SamplingBatch(
        temperatures=np.array([one.temperature for one in settings], np.float32),
        top_ps=np.array([one.top_p for one in settings], np.float32),
        top_ks=np.array([one.top_k for one in settings], np.int64),
        seeds=np.array([one.seed for one in running], np.uint64),
        positions=np.array([len(one.token_ids) for one in running], np.uint64),
    )
