"""vLLM as the batch of a policy that `TorchEngine` steps: vLLM decodes and samples, the rest is the same.

GenerateRequest ─► join ─► VllmEngine.add ─► step ─► tokens, logprobs ─► chunks
learner's weights ─► load ─► vLLM's reload_weights, a layer at a time ─► prompts of older weights forgotten
learner's adapters ─► load ─► a folder as peft writes it ─► vLLM's add_lora
"""

from __future__ import annotations

import contextlib
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lightningrl.backends import GenerateRequest, TokenChunk
from lightningrl.errors import BackendError
from lightningrl_torch._requests import Running, chunk_interval, deliver, not_finite
from lightningrl_torch._vllm_engine import refusals, use_vllm
from lightningrl_torch.settings import Settings
from lightningrl_torch.vllm_check import check_sampling

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

__all__ = ["VllmBatch"]

Weights = Callable[[], Iterable[tuple[str, torch.Tensor]]]
"""Weights of now by the names of a transformers folder, made one at a time."""


class VllmBatch:
    """Implements `lightningrl_torch.engine.Batch`. `load` and `resting` are for whoever holds the engine; all else is
    the engine's thread's. `weights`: the learner's, whenever it is called; where it has adapters, `write_adapters`
    writes them into a folder."""

    def __init__(
        self,
        settings: Settings,
        *,
        context_length: int,
        device: torch.device,
        weights: Weights,
        write_adapters: Callable[[Path], None],
    ) -> None:
        self._policy = settings.name or settings.policy
        self._interval = settings.stream_interval_s
        self._weights, self._write_adapters = weights, write_adapters
        self._has_adapters = settings.adapters is not None
        self._adapters: tuple[LoRARequest, Path] | None = None
        """Adapters that are served, and where vLLM reads them."""
        self._running: dict[str, Running] = {}
        self._outputs: list[Any] = []
        self._engine = use_vllm(settings, context_length, device)
        self._folder = tempfile.TemporaryDirectory(prefix="lightningrl-adapters-")
        self._loaded = 0
        if self._has_adapters:
            try:
                with refusals(settings.policy):
                    self.load()
            except BackendError:
                self.close()
                raise

    @property
    def rows(self) -> int:
        """Requests that are being decoded."""
        return len(self._running)

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return self._engine.vocabulary

    def check(self, request: GenerateRequest) -> None:
        """Raises BackendError for what would be sampled with other logprobs than the learner's."""
        refusal = check_sampling(request.sampling)
        if refusal is not None:
            raise BackendError(f"request {request.id!r}: {refusal}")

    def join(self, joining: Sequence[Running]) -> None:
        """Give requests to vLLM."""
        adapter = None if self._adapters is None else self._adapters[0]
        for running in joining:
            name = self._engine.new_name()
            self._running[name] = running  # first, so that a failure below finds it
            self._engine.add(name, running, self._outputs, adapter)

    def step(self, version: int) -> None:
        """Sample a token for each request, or read some of its prompt, and deliver what is due."""
        if not self._running:
            return
        now = time.monotonic()
        interval = chunk_interval(self.rows, self._interval)
        due: list[tuple[Running, TokenChunk | Exception]] = []
        ended: list[str] = []
        for output in self._engine.step(self._outputs):
            running = self._running.get(output.request_id)
            if running is None:
                continue
            reason = None
            completion: Any = output.outputs[0]
            for token, logprobs in zip(completion.token_ids, completion.logprobs, strict=True):
                logprob = logprobs[token].logprob
                if not math.isfinite(logprob):
                    raise not_finite(self._policy)
                reason = running.append(token, logprob)
                if reason is not None:
                    break
            if output.finished and reason is None:
                raise BackendError(f"vLLM ended a request with {completion.finish_reason!r} before it was over")
            chunk = running.take_chunk(version, reason, now, interval)
            if chunk is not None:
                due.append((running, chunk))
            if reason is not None:
                del self._running[output.request_id]
                if not output.finished:  # a stop string, which vLLM was not told of
                    ended.append(output.request_id)
        self._engine.abort(ended)
        deliver(due)

    def drop(self, gone: Collection[Running]) -> None:
        """Free the places of cancelled requests."""
        names = [name for name, running in self._running.items() if running in gone]
        for name in names:
            del self._running[name]
        self._engine.abort(names)

    def evict(self) -> list[Running]:
        """Forget all requests and return them."""
        evicted, self._running = self._running, {}
        self._engine.abort(list(evicted))
        self._outputs.clear()
        return list(evicted.values())

    def forget(self) -> None:
        """The weights have changed: drop remembered prompts. vLLM remembers those of adapters by the adapters' name,
        which is new after each `load`."""
        if not self._has_adapters:
            self._engine.forget_prompts()

    def load(self) -> None:
        """Serve what the learner has now. Only while no request of the policy runs."""
        if not self._has_adapters:
            self._engine.reload(self._weights())
            return
        before = self._adapters
        self._loaded += 1
        folder = Path(self._folder.name) / f"{self._loaded}"
        self._write_adapters(folder)
        self._adapters = self._engine.load_adapter(folder), folder
        if before is not None:
            self._engine.drop_adapter(before[0])
            shutil.rmtree(before[1])

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """Leave the GPU's memory to the learner; who learns calls `load`, and where it fails the weights as they then
        are come back."""
        with self._engine.resting():
            try:
                yield
            finally:
                if self._engine.is_asleep:
                    self.load()

    def close(self) -> None:
        """Give back vLLM's memory, if no other policy is served by it."""
        self._engine.abort(list(self._running))
        if self._adapters is not None:
            self._engine.drop_adapter(self._adapters[0])
        self._engine.leave()
        self._folder.cleanup()
