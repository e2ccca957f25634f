"""The services that evidence is made with, beside the judge: logprobs of given tokens, values of a critic, tokenizers.

score(trajectory, ask) ─► ask.logprobs(tokens, context) ┐   requests of a rollout at once are   ┌► TokenScorer.logprobs
                       ─► ask.values(contexts)          ┴─► computed together, beside no other's ┴► Valuer.values

The rounding of a sum depends on the sums that are computed beside it. So a rollout's numbers are the same bits whoever
else asks at that moment, also when a resumed run asks for many rollouts at once.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lightningrl.backends import Backend, Continuation, TokenScorer, Valuer
from lightningrl.errors import BackendError, PluginError
from lightningrl.types import Array, IntArray, Trajectory
from lightningrl_runs.segments import SegmentReader
from lightningrl_runs.trace import read_messages
from lightningrl_server.rendering.tokenizer import QuickTokenizer, load_tokenizer
from lightningrl_training.judge import Judge, Questions

__all__ = ["PolicyQueries", "RolloutServices"]

BATCH_TOKENS = 65_536
"""Tokens of requests handed to a backend together; it has its own, smaller, bound of one forward pass."""


_Batch = list[tuple[Continuation, "asyncio.Future[Any]"]]


class PolicyQueries:
    """The policies of a run, as evidence asks them. Used on one event loop at a time."""

    def __init__(
        self,
        models: Mapping[str, str],
        *,
        template_of: Callable[[str], str | None] = lambda policy: None,
        max_tokens: int = 4_000_000,
    ) -> None:
        """`models`: hub name or folder, by policy. `template_of(policy)`: the chat template in place of the model's.
        `max_tokens`: most that may be read for one rollout."""
        self.max_tokens = max_tokens
        self._template_of = template_of
        self._models = dict(models)
        self._backends: dict[str, Backend] = {}
        self._tokenizers: dict[str, QuickTokenizer] = {}
        self._readers: dict[str, SegmentReader] = {}
        self._loading = threading.Lock()
        self._queues: dict[tuple[str, str], _Queue] = {}

    def connect(self, policy: str, backend: Backend) -> Callable[[], None]:
        """Ask this backend for the policy from now on; returns a function that ends it."""
        self._backends[policy] = backend

        def disconnect() -> None:
            self._backends.pop(policy, None)
            for key in [key for key in self._queues if key[0] == policy]:
                del self._queues[key]

        return disconnect

    async def logprobs(self, asker: object, policy: str, continuation: Continuation, *, reference: bool) -> Array:
        """`asker`: the services of a rollout, or of a group."""
        backend = self._backend(policy)
        if not isinstance(backend, TokenScorer):
            raise PluginError(f"the trainer backend of policy {policy!r} has no `logprobs`; use backend = 'torch'")

        def compute(batch: Sequence[Continuation]) -> Sequence[Array]:
            return backend.logprobs(batch, reference=reference)

        kind = "reference logprobs" if reference else "logprobs"
        values = await self._queue(policy, kind, compute).ask(asker, continuation)
        return _checked(values, (len(continuation.tokens),), f"logprobs of policy {policy!r}")

    async def values(self, asker: object, policy: str, continuation: Continuation) -> Array:
        backend = self._backend(policy)
        if not isinstance(backend, Valuer):
            raise PluginError(
                f"the trainer backend of policy {policy!r} has no `values`; use backend = 'torch' with [learner.critic]"
            )
        values = await self._queue(policy, "values", backend.values).ask(asker, continuation)
        return _checked(values, (len(continuation.tokens) + 1,), f"values of policy {policy!r}")

    async def encode(self, policy: str, text: str) -> list[int]:
        return await asyncio.to_thread(lambda: self._tokenizer(policy).encode(text))

    async def read(self, trajectory: Trajectory) -> list[list[tuple[str, str]]]:
        return await asyncio.to_thread(read_messages, trajectory, self._reader)

    def _tokenizer(self, policy: str) -> QuickTokenizer:
        if policy not in self._models:
            there = ", ".join(map(repr, sorted(self._models))) or "none here"
            raise PluginError(f"no policy {policy!r} whose tokens could be read; there are: {there}")
        with self._loading:
            if policy not in self._tokenizers:
                self._tokenizers[policy] = QuickTokenizer(
                    load_tokenizer(self._models[policy], chat_template=self._template_of(policy))
                )
            return self._tokenizers[policy]

    def _reader(self, policy: str) -> SegmentReader:
        if policy not in self._readers:
            self._readers[policy] = SegmentReader(self._tokenizer(policy))
        return self._readers[policy]

    def _backend(self, policy: str) -> Backend:
        if policy not in self._backends:
            serving = ", ".join(map(repr, sorted(self._backends))) or "none"
            raise PluginError(
                f"no backend serves policy {policy!r} in this process (served: {serving}); such evidence is found in a "
                "run"
            )
        return self._backends[policy]

    def _queue(self, policy: str, kind: str, compute: Callable[[Sequence[Any]], Sequence[Any]]) -> _Queue:
        return self._queues.setdefault((policy, kind), _Queue(compute))


class _Queue:
    """Requests of one kind to one policy, a batch at a time."""

    def __init__(self, compute: Callable[[Sequence[Any]], Sequence[Any]]) -> None:
        self._compute = compute
        self._gathered: dict[object, _Batch] = {}
        """Requests by asker: all that it makes before the event loop has come round."""
        self._waiting: deque[_Batch] = deque()
        self._working: asyncio.Task[None] | None = None

    async def ask(self, asker: object, request: Continuation) -> Any:
        """Compute in the next batch; a failed batch is retried one by one, and a second error is raised."""
        loop = asyncio.get_running_loop()
        answer = loop.create_future()
        if asker not in self._gathered:
            self._gathered[asker] = []
            loop.call_soon(self._close, asker)
        self._gathered[asker].append((request, answer))
        return await answer

    def _close(self, asker: object) -> None:
        """Close the asker's batch: later requests go into another."""
        self._waiting.extend(_split(self._gathered.pop(asker)))
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work())

    async def _work(self) -> None:
        while self._waiting:
            # else given up
            batch = [(request, answer) for request, answer in self._waiting.popleft() if not answer.done()]
            if not await self._try(batch, is_last=False):  # one bad request fails its batch: by itself it fails alone
                for pair in batch:
                    await self._try([pair], is_last=True)

    async def _try(self, batch: _Batch, *, is_last: bool) -> bool:
        try:
            values = await asyncio.to_thread(self._compute, [request for request, _ in batch]) if batch else ()
            pairs = list(zip(batch, values, strict=True))
        except Exception as error:  # noqa: BLE001  the boundary to a backend: the rollout is left out and counted
            for _, answer in batch if is_last else ():
                if not answer.done():
                    answer.set_exception(error)
            return False
        for (_, answer), value in pairs:
            if not answer.done():
                answer.set_result(value)
        return True


def _split(asked: _Batch) -> Iterator[_Batch]:
    """Split requests into batches of at most `BATCH_TOKENS`."""
    batch: _Batch = []
    total = 0
    for request, answer in asked:
        tokens = len(request.context) + len(request.tokens)
        if batch and total + tokens > BATCH_TOKENS:
            yield batch
            batch, total = [], 0
        batch.append((request, answer))
        total += tokens
    yield batch


class RolloutServices(Questions):
    """`ask` for a rollout, or for those of a group: called, it asks the judge."""

    def __init__(self, judge: Judge | None, policies: PolicyQueries, *trajectories: Trajectory) -> None:
        super().__init__(judge, rollouts=len(trajectories))
        self._policies = policies
        self._trajectories = trajectories
        self._read = 0

    async def logprobs(
        self,
        tokens: Sequence[int] | IntArray,
        context: Sequence[int] | IntArray,
        *,
        policy: str | None = None,
        reference: bool = False,
    ) -> Array:
        """log π(token | context, tokens before) at temperature 1, one per token, float32."""
        if not len(tokens):
            return np.zeros(0, np.float32)
        continuation = self._continue(context, tokens, "nothing predicts the first token after an empty context")
        return await self._policies.logprobs(self, self._policy(policy), continuation, reference=reference)

    async def values(self, contexts: Sequence[Sequence[int] | IntArray], *, policy: str | None = None) -> Array:
        """The critic's value after each context, float32."""
        values = await asyncio.gather(*(self.token_values((), context, policy=policy) for context in contexts))
        return np.concatenate([np.zeros(0, np.float32), *values])

    async def token_values(
        self, tokens: Sequence[int] | IntArray, context: Sequence[int] | IntArray, *, policy: str | None = None
    ) -> Array:
        """The critic's value after the context and after each token, float32: one more than there are tokens."""
        continuation = self._continue(context, tokens, "there is nothing to value in an empty context")
        return await self._policies.values(self, self._policy(policy), continuation)

    async def encode(self, text: str, *, policy: str | None = None) -> list[int]:
        """The text's tokens, none added around them."""
        return await self._policies.encode(self._policy(policy), text)

    async def read(self, trajectory: Trajectory, /) -> list[list[tuple[str, str]]]:
        """The messages that each call adds to those before it, as (who, text)."""
        return await self._policies.read(trajectory)

    def _policy(self, name: str | None) -> str:
        """The policy of that name, or the rollout's own: that of its first call that may be trained."""
        calls = self._trajectories[0].transitions
        return name or next((call.policy for call in calls if call.trainable), calls[0].policy)

    def _continue(
        self, context: Sequence[int] | IntArray, tokens: Sequence[int] | IntArray, if_empty: str
    ) -> Continuation:
        """Take tokens after a context from the budget."""
        if not len(context):
            raise BackendError(f"{if_empty}; give a context of at least one token")
        self._read += len(context) + len(tokens)
        most = self._policies.max_tokens
        if self._read > most * len(self._trajectories):
            raise BackendError(
                f"a rollout's evidence may read {most} tokens of policies and critics; raise credit.max_tokens"
            )
        return Continuation(context=np.asarray(context, dtype=np.int32), tokens=np.asarray(tokens, dtype=np.int32))


def _checked(values: Any, shape: tuple[int, ...], what: str) -> Array:
    array = np.asarray(values, dtype=np.float32)
    if array.shape != shape:
        raise PluginError(f"{what}: the trainer backend returned shape {array.shape}, not {shape}")
    if not np.isfinite(array).all():
        raise BackendError(f"{what} are not finite; look at the learning rate of the steps before")
    return array
