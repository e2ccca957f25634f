"""The engine: serves the policy from verl's replicas. Prompt ids in, completion ids and logprobs out, of one version.

generate ─► balancer: the session's replica, else the least busy ─► replica.generate (Ray) ─► one chunk
               └─ replica dead: out of the balancer, and            └─ aborted for new weights:
                  the call goes to another                             the call starts again
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from lightningrl.backends import EngineInfo, GenerateRequest, TokenChunk
from lightningrl.errors import BackendError, ContextOverflow, EngineUnavailable
from lightningrl.types import FinishReason, SamplingSettings

__all__ = ["VerlEngine", "cut_at_stop", "sampling_parameters"]

logger = logging.getLogger(__name__)

_ABORTED = ("abort", "aborted")
_RETRY_S = 0.05
"""Pause before a call that was aborted for new weights starts again; the replica keeps it until they are there."""


class VerlEngine:
    """Implements `lightningrl.backends.Engine`. Any event loop may call it; any thread `hold` and `release`."""

    def __init__(
        self,
        client: Any,
        *,
        policy: str,
        version: int,
        context_length: int,
        eos_ids: Sequence[int],
        text_of: Callable[[Sequence[int]], str],
    ) -> None:
        """`client` is verl's `LLMServerClient`; its balancer knows the replicas."""
        self._policy = policy
        self._version = version
        self._context_length = context_length
        self._eos_ids = frozenset(eos_ids)
        self._text_of = text_of
        self._changed = threading.Condition()
        self._in_flight = 0
        self._released: Future[None] = Future()
        self._released.set_result(None)
        self.lost: list[str] = []
        """Addresses of replicas that died."""
        self.connect(client, version)

    def connect(self, client: Any, version: int) -> None:
        """Serve from these replicas from now on."""
        self._balancer = client._load_balancer
        self._version = version
        self.lost = []

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(policy=self._policy, version=self._version, context_length=self._context_length)

    def set_version(self, version: int) -> None:
        self._version = version

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """The completion as one chunk, as replicas answer. Raises ContextOverflow, EngineUnavailable, BackendError."""
        room = self._context_length - len(request.prompt_ids)
        if room < 1:
            raise ContextOverflow(
                f"the prompt has {len(request.prompt_ids)} tokens and policy {self._policy!r} takes "
                f"{self._context_length} "
                "with at least one to answer; shorten the history"
            )
        parameters = sampling_parameters(request.sampling, room)
        while True:
            await self._admitted()
            try:
                output = await self._ask_replica(request, parameters)
            finally:
                self._leave()
            if output is not None and output.stop_reason not in _ABORTED:
                break
            await asyncio.sleep(_RETRY_S)
        yield self._chunk(request.sampling, output, limit=parameters["max_tokens"])

    async def _admitted(self) -> None:
        while True:
            released = self._released
            await asyncio.shield(asyncio.wrap_future(released))  # a call that is cancelled leaves the others waiting
            with self._changed:
                if self._released is released:
                    self._in_flight += 1
                    return

    def _leave(self) -> None:
        with self._changed:
            self._in_flight -= 1
            self._changed.notify_all()

    async def _ask_replica(self, request: GenerateRequest, parameters: dict[str, Any]) -> Any:
        """verl's `TokenOutput`; None where the replica died and the call should go to another."""
        try:
            address, replica = await self._balancer.acquire_server.remote(request_id=request.session or request.id)
        except RayError as error:
            raise EngineUnavailable(
                f"no replica of policy {self._policy!r} is left; the trainer starts them again before its next step"
            ) from error
        answer = replica.generate.remote(
            request_id=uuid.uuid4().hex, prompt_ids=list(request.prompt_ids), sampling_params=dict(parameters)
        )
        try:
            return await answer
        except RayActorError as error:
            self._lose(address, error)
            return None
        except asyncio.CancelledError:
            ray.cancel(answer)
            raise
        except ray.exceptions.RayTaskError as error:
            raise BackendError(f"replica {address} of policy {self._policy!r} failed: {_last_line(error)}") from error
        finally:
            self._balancer.release_server.remote(server_id=address)

    def _lose(self, address: str, error: Exception) -> None:
        if address not in self.lost:
            self.lost.append(address)
            logger.warning("replica %s of policy %r died; its calls go to the others", address, self._policy)
            logger.info("replica %s: %s", address, error)
        self._balancer.remove_servers.remote([address])

    def _chunk(self, sampling: SamplingSettings, output: Any, *, limit: int) -> TokenChunk:
        tokens, logprobs = (
            tuple(int(token) for token in output.token_ids),
            tuple(float(value) for value in output.log_probs or ()),
        )
        if len(tokens) != len(logprobs):
            raise BackendError(
                f"a replica returned {len(tokens)} tokens but {len(logprobs)} logprobs; verl's rollout must "
                "calculate_log_probs"
            )
        version = output.extra_fields.get("global_steps")
        stops = bool(tokens) and (tokens[-1] in self._eos_ids or tokens[-1] in sampling.stop_token_ids)
        length = cut_at_stop(tokens, sampling.stop, self._text_of) if sampling.stop else len(tokens)
        is_stop = stops or length < len(tokens) or (bool(sampling.stop) and len(tokens) < limit)
        return TokenChunk(
            token_ids=tokens[:length],
            logprobs=logprobs[:length],
            policy_version=self._version if version is None else int(version),
            finish_reason=FinishReason.STOP if is_stop else FinishReason.LENGTH,
        )

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Wait until no call is being sampled; keep new ones waiting meanwhile."""
        with self._changed:
            self._released = Future()
            self._changed.wait_for(lambda: self._in_flight == 0)
        try:
            yield
        finally:
            self._released.set_result(None)


def sampling_parameters(sampling: SamplingSettings, room: int) -> dict[str, Any]:
    """vLLM's sampling parameters (`vllm.SamplingParams`); stop strings are found here: tokens stay whole."""
    parameters: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "max_tokens": min(sampling.max_tokens, room),
        "logprobs": True,
    }
    if sampling.stop_token_ids:
        parameters["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.seed is not None:
        parameters["seed"] = sampling.seed
    return parameters


def cut_at_stop(tokens: Sequence[int], stops: Sequence[str], text_of: Callable[[Sequence[int]], str]) -> int:
    """Number of tokens until one of `stops` is complete; all of them where none is."""
    if not any(stop in text_of(tokens) for stop in stops):
        return len(tokens)
    low, high = 1, len(tokens)
    while low < high:  # the text only grows, so the first count that holds a stop string can be searched
        middle = (low + high) // 2
        if any(stop in text_of(tokens[:middle]) for stop in stops):
            high = middle
        else:
            low = middle + 1
    return low


def _last_line(error: BaseException) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else type(error).__name__
