"""A request while it runs: what it has sampled, when it ends, and the way of its chunks back to its event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lightningrl.backends import GenerateRequest, TokenChunk
from lightningrl.errors import BackendError
from lightningrl.types import FinishReason

if TYPE_CHECKING:
    from lightningrl_torch.grammars import GrammarState

__all__ = ["Running", "TextOf", "chunk_interval", "deliver", "not_finite"]

TextOf = Callable[[Sequence[int]], str]
"""Token ids to text."""

_MARGIN = 8
_CHUNKS_PER_SECOND = 1000.0


class Running:
    """One request. The event loop reads `chunks`; everything else belongs to the decoding thread."""

    __slots__ = (
        "_ends",
        "_longest_stop",
        "_sent",
        "_sent_at",
        "_text_of",
        "chunks",
        "finished",
        "grammar",
        "limit",
        "logprobs",
        "loop",
        "request",
        "seed",
        "stop_token_ids",
        "token_ids",
    )

    def __init__(
        self,
        request: GenerateRequest,
        *,
        limit: int,
        stop_token_ids: frozenset[int],
        text_of: TextOf | None,
        loop: asyncio.AbstractEventLoop,
        grammar: GrammarState | None = None,
    ) -> None:
        self.request = request
        self.grammar = grammar
        self.limit = limit
        self.seed = 0
        self.loop = loop
        self.chunks: asyncio.Queue[TokenChunk | Exception] = asyncio.Queue()
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.finished = False
        self.stop_token_ids = stop_token_ids
        self._text_of = text_of
        self._ends = request.sampling.stop
        # a token is at least one byte, so this many last tokens hold any stop string that the newest one completes
        self._longest_stop = max((len(end.encode()) for end in self._ends), default=0) + _MARGIN
        self._sent = 0
        self._sent_at = time.monotonic()

    def append(self, token_id: int, logprob: float) -> FinishReason | None:
        """Take the next token and say whether it is the last."""
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        if self.grammar is not None:
            self.grammar.advance(token_id)
        if token_id in self.stop_token_ids or (self._ends and self._completes_stop()):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.token_ids) >= self.limit else None

    def take_chunk(self, version: int, reason: FinishReason | None, now: float, interval: float) -> TokenChunk | None:
        """Sampled tokens that were not sent yet, when the request is over or `interval` seconds have passed."""
        if reason is None and now - self._sent_at < interval:
            return None
        start, self._sent, self._sent_at = self._sent, len(self.token_ids), now
        self.finished = reason is not None
        return TokenChunk(
            token_ids=tuple(self.token_ids[start:]),
            logprobs=tuple(self.logprobs[start:]),
            policy_version=version,
            finish_reason=reason,
        )

    def fail(self, error: Exception) -> None:
        """End the request with an error."""
        self.finished = True
        deliver([(self, error)])

    def _completes_stop(self) -> bool:
        assert self._text_of is not None
        text = self._text_of(self.token_ids[-self._longest_stop :])
        return any(end in text for end in self._ends)


def chunk_interval(rows: int, least: float) -> float:
    """Seconds between two chunks of a request, so that event loops are not kept busy by many rows."""
    return max(least, rows / _CHUNKS_PER_SECOND)


def not_finite(policy: str) -> BackendError:
    """The error of logprobs that are no numbers."""
    return BackendError(
        f"policy {policy!r} gives logits that are not finite; lower the learning rate or check its weights"
    )


def deliver(items: Sequence[tuple[Running, TokenChunk | Exception]]) -> None:
    """Hand items to their requests' event loops, one wake-up for each loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Running, TokenChunk | Exception]]] = {}
    for running, item in items:
        by_loop.setdefault(running.loop, []).append((running, item))
    for loop, batch in by_loop.items():
        if not loop.is_closed():
            try:
                loop.call_soon_threadsafe(_put, batch)
            except RuntimeError:
                if not loop.is_closed():
                    raise


def _put(batch: Sequence[tuple[Running, TokenChunk | Exception]]) -> None:
    for running, item in batch:
        running.chunks.put_nowait(item)
