"""The batch that is being decoded: rows join by prefill, one forward samples one token for every row, rows leave when
done. Prefill computes each token that prompts have in common once, for as long as the weights stay the same."""

from __future__ import annotations

import bisect
import math
import time
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightningrl.backends import GenerateRequest, TokenChunk
from lightningrl.errors import BackendError
from lightningrl_torch.forward import Forward, build_forward, with_graphs
from lightningrl_torch.grammars import MaskThread
from lightningrl_torch.models import read_traits
from lightningrl_torch.requests import Running, chunk_interval, deliver, not_finite
from lightningrl_torch.sampling import SamplingBatch, sample_tokens
from lightningrl_torch.settings import EngineSettings
from lightningrl_torch.slots import LEAST_SAVED, KeyValues, SharedPrompt, SlotCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Decoder", "Prefiller"]


LEAST_SHARED: Final = 16
"""Tokens that two prompts must have in common at their beginnings to be worth a look."""


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
            length = _common_length(min(prompts), max(prompts))  # what the outermost have in common, all have
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


class Prefiller:
    """Computes and remembers keys and values of prompts: the rollouts of a group pay for their prompt once, and a later
    prompt that begins as a remembered one does pays for what is new in it."""

    def __init__(self, forward: Forward, *, batch_tokens: int, cache_tokens: int) -> None:
        self._forward = forward
        self._batch_tokens = batch_tokens
        self._cache_tokens = cache_tokens
        self._cached: OrderedDict[tuple[int, ...], KeyValues] = OrderedDict()
        self._ordered: list[tuple[int, ...]] = []
        """Cached prefixes, sorted so that those that begin alike are neighbours."""
        self._tokens = 0

    def clear(self) -> None:
        """Forget everything: the weights have changed."""
        self._cached.clear()
        self._ordered.clear()
        self._tokens = 0

    def prefill(self, prefixes: Sequence[tuple[int, ...]]) -> list[KeyValues]:
        """Keys and values of each prefix, in order; an empty prefix has none."""
        computed: dict[tuple[int, ...], KeyValues] = {(): []}
        missing = []
        for prefix in dict.fromkeys(prefixes):
            if prefix in self._cached:
                self._cached.move_to_end(prefix)
                computed[prefix] = self._cached[prefix]
            elif prefix:
                missing.append(prefix)
        for wave in self._waves(missing):
            beginnings = {prefix: self._beginning(prefix) if self._forward.packs else [] for prefix in wave}
            for batch in self._plan(beginnings):
                before = [beginnings[prefix] for prefix in batch]
                new = [prefix[_tokens_of(past) :] for prefix, past in zip(batch, before, strict=True)]
                for prefix, kv in zip(batch, self._forward.prefill(new, before), strict=True):
                    computed[prefix] = kv
                    self._remember(prefix, kv)
        return [computed[prefix] for prefix in prefixes]

    def _waves(self, prefixes: list[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
        """The prefixes as one, or those first that others begin as, where that saves a quarter of the tokens: what
        they have in common is then remembered."""
        if not self._forward.packs or len(prefixes) < 2:
            return [prefixes] if prefixes else []
        first: list[tuple[int, ...]] = []
        then: list[tuple[int, ...]] = []
        saved = total = 0
        for prefix in sorted(prefixes):
            beginnings = _tokens_of(self._beginning(prefix))
            more = (_common_length(prefix[:-1], first[-1]) if first else 0) - beginnings
            total += len(prefix) - beginnings
            if more >= LEAST_SHARED and len(first[-1]) <= self._cache_tokens:
                then.append(prefix)
                saved += more
            else:
                first.append(prefix)
        return [first, then] if then and 4 * saved >= total else [prefixes]

    def _plan(self, beginnings: Mapping[tuple[int, ...], KeyValues]) -> list[list[tuple[int, ...]]]:
        """Batches of at most `batch_tokens` that are new; where shorter ones are padded, of similar length: at most a
        fifth of a batch is padding."""
        new = {prefix: len(prefix) - _tokens_of(past) for prefix, past in beginnings.items()}
        batches: list[list[tuple[int, ...]]] = []
        tokens = 0
        for prefix in sorted(new, key=new.__getitem__, reverse=True):
            if self._forward.packs:
                is_alike, tokens = True, tokens + new[prefix]
            else:
                widest = new[batches[-1][0]] if batches else 0
                is_alike, tokens = new[prefix] >= 0.8 * widest, (len(batches[-1]) + 1) * widest if batches else 0
            if batches and is_alike and tokens <= self._batch_tokens:
                batches[-1].append(prefix)
            else:
                batches.append([prefix])
                tokens = new[prefix]
        return batches

    def _beginning(self, prefix: tuple[int, ...]) -> KeyValues:
        """Cached keys and values of the prompt that has most in common with this one; its last token, at least, is
        computed."""
        place = bisect.bisect(self._ordered, prefix)
        near = self._ordered[max(0, place - 1) : place + 1]
        shared, nearest = max(((_common_length(prefix[:-1], one), one) for one in near), default=(0, ()))
        if shared < LEAST_SHARED:
            return []
        return [states[:, :, :shared] for states in self._cached[nearest]]

    def _remember(self, prefix: tuple[int, ...], kv: KeyValues) -> None:
        if len(prefix) > self._cache_tokens:
            return
        # a part of what a pass computed would keep all of it
        self._cached[prefix] = [
            states if states.untyped_storage().nbytes() == states.nbytes else states.clone() for states in kv
        ]
        bisect.insort(self._ordered, prefix)
        self._tokens += len(prefix)
        while self._tokens > self._cache_tokens:
            oldest, _ = self._cached.popitem(last=False)
            del self._ordered[bisect.bisect_left(self._ordered, oldest)]
            self._tokens -= len(oldest)


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


def _tokens_of(kv: KeyValues) -> int:
    return kv[0].shape[2] if kv else 0


def _common_length(left_ids: Sequence[int], other: Sequence[int]) -> int:
    """Count the tokens at the beginning that are the same."""
    for place, (left, right) in enumerate(zip(left_ids, other, strict=False)):
        if left != right:
            return place
    return min(len(left_ids), len(other))
