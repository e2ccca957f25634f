"""vLLM's engine in this process, as the batch that `TorchEngine` steps: vLLM decodes and samples, the rest is the same.

GenerateRequest ─► join ─► LLMEngine.add_request ─► step ─► tokens, logprobs ─► chunks
learner's weights ─► load ─► vLLM's reload_weights, a layer at a time ─► prompts of older weights forgotten

Made for vLLM 0.32. On a GPU vLLM frees its memory while the learner steps (its sleep mode, level 2).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import random
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from lightningrl.backends import GenerateRequest, TokenChunk
from lightningrl.errors import BackendError
from lightningrl_torch._requests import Running, chunk_interval, deliver, not_finite
from lightningrl_torch.settings import Settings, VllmSettings
from lightningrl_torch.vllm_check import check_sampling, installed_vllm

if TYPE_CHECKING:
    from vllm import LLMEngine

__all__ = ["VllmBatch"]

logger = logging.getLogger(__name__)

Weights = Callable[[], Iterable[tuple[str, torch.Tensor]]]
"""Weights of now by the names of a transformers folder, made one at a time."""

VARIABLES: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""vLLM in this process, where the weights are, telling nobody; threads are `engine_threads`' to decide."""
CPU_CACHE_BYTES: Final = 2**30
"""Keys and values on a CPU, where nobody said."""
CPU_BLOCK: Final = 32
"""Tokens of a prompt that are remembered together; vLLM's own 128 on a CPU are longer than many prompts."""
GIB: Final = 2**30


class VllmBatch:
    """Implements `lightningrl_torch.engine.Batch`. `load` and `resting` are for whoever holds the engine; all else is
    the engine's thread's. `weights`: the learner's, whenever it is called."""

    def __init__(self, settings: Settings, *, context_length: int, device: torch.device, weights: Weights) -> None:
        self._policy = settings.name or settings.policy
        self._interval = settings.stream_interval_s
        self._weights = weights
        options = settings.vllm or VllmSettings()
        self._sleeps = options.sleep and device.type == "cuda" and settings.max_staleness == 0
        self._asleep = False
        self._engine = _start(settings, options, context_length, device, sleeps=self._sleeps)
        self._running: dict[str, Running] = {}
        self._asked = 0

    @property
    def rows(self) -> int:
        """Requests that are being decoded."""
        return len(self._running)

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return int(self._engine.model_config.get_vocab_size())

    def check(self, request: GenerateRequest) -> None:
        """Raises BackendError for what would be sampled with other logprobs than the learner's."""
        refusal = check_sampling(request.sampling)
        if refusal is not None:
            raise BackendError(f"request {request.id!r}: {refusal}")

    def join(self, joining: Sequence[Running]) -> None:
        """Give requests to vLLM."""
        for running in joining:
            self._asked += 1
            name = str(self._asked)
            self._running[name] = running  # first, so that a failure below finds it
            prompt: Any = {"prompt_token_ids": list(running.request.prompt_ids)}
            self._engine.add_request(name, prompt, _parameters(running))

    def step(self, version: int) -> None:
        """Sample a token for each request, or read some of its prompt, and deliver what is due."""
        if not self._running:
            return
        now = time.monotonic()
        interval = chunk_interval(self.rows, self._interval)
        due: list[tuple[Running, TokenChunk | Exception]] = []
        ended: list[str] = []
        for output in self._engine.step():
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
        self._abort(ended)
        deliver(due)

    def drop(self, gone: Collection[Running]) -> None:
        """Free the places of cancelled requests."""
        names = [name for name, running in self._running.items() if running in gone]
        for name in names:
            del self._running[name]
        self._abort(names)

    def evict(self) -> list[Running]:
        """Forget all requests and return them."""
        evicted, self._running = self._running, {}
        self._abort(list(evicted))
        return list(evicted.values())

    def forget(self) -> None:
        """The weights have changed: drop remembered prompts."""
        if not self._engine.reset_prefix_cache():
            raise BackendError("vLLM kept prompts of older weights, as requests were running; report this as a bug")

    def load(self) -> None:
        """Serve the learner's weights of now. Only while no request runs."""
        if self._asleep:
            self._engine.wake_up(["weights"])
        with torch.no_grad():
            self._engine.collective_rpc(_reload, args=(self._weights(),))
        if self._asleep:
            self._engine.wake_up(["kv_cache"])
            self._asleep = False

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """Leave the GPU's memory to the learner; who learns calls `load`, and where it fails the weights as they then
        are come back."""
        if self._sleeps:
            self._engine.sleep(level=2)
            self._asleep = True
        try:
            yield
        finally:
            if self._asleep:
                self.load()

    def close(self) -> None:
        """Give back vLLM's memory."""
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self._engine.engine_core.shutdown()
        del self._engine
        cleanup_dist_env_and_memory()

    def _abort(self, names: list[str]) -> None:
        if names:
            self._engine.abort_request(names)


def _start(
    settings: Settings, options: VllmSettings, context_length: int, device: torch.device, *, sleeps: bool
) -> LLMEngine:
    """The engine, with the weights of the policy's folder. Raises BackendError with vLLM's own words."""
    installed_vllm()
    for name, value in VARIABLES.items():
        os.environ[name] = value
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    on_cpu = device.type == "cpu"
    if on_cpu:
        # logprobs are a compiled function of vLLM's: half a minute, and a C++ compiler
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        torch._dynamo.config.disable = True
    from vllm import EngineArgs, LLMEngine
    from vllm.platforms import current_platform

    built_for = "cpu" if current_platform.is_cpu() else "cuda"
    if built_for != device.type:
        raise BackendError(
            f"the vLLM that is installed computes on {built_for!r} and policy {settings.policy!r} is on "
            f"{device.type!r}; set learner.device = {built_for!r}, or install the other build"
        )
    cache = None if options.kv_cache_gb is None else int(options.kv_cache_gb * GIB)
    arguments = EngineArgs(
        model=settings.policy,
        skip_tokenizer_init=True,
        dtype=settings.dtype,
        max_model_len=context_length,
        max_num_seqs=settings.max_batch,
        max_num_batched_tokens=max(settings.prefill_tokens, settings.max_batch),
        seed=settings.seed & 0x7FFFFFFF,
        gpu_memory_utilization=options.gpu_memory_utilization,
        kv_cache_memory_bytes=CPU_CACHE_BYTES if on_cpu and cache is None else cache,
        block_size=CPU_BLOCK if on_cpu else None,
        enforce_eager=on_cpu or options.enforce_eager,
        enable_prefix_caching=True,
        enable_sleep_mode=sleeps,
        logprobs_mode="processed_logprobs",  # at the request's temperature
        generation_config="vllm",  # none of the folder's: the recipe says how to sample
        distributed_executor_backend="uni",
        disable_log_stats=True,
        use_tqdm_on_load=False,
    )
    with _untouched():
        try:
            engine = LLMEngine.from_engine_args(arguments)
            _rehearse(engine)
            return engine
        except (ValueError, RuntimeError, NotImplementedError, AssertionError, OSError) as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            reason = lines[0].rstrip(".;:") if lines else type(error).__name__
            raise BackendError(
                f'vLLM cannot serve policy {settings.policy!r}: {reason}; use learner.engine = "torch"'
            ) from error


def _rehearse(engine: LLMEngine) -> None:
    """Sample a token: a head size that vLLM has no kernel for raises here, not in a run."""
    from vllm import SamplingParams

    prompt: Any = {"prompt_token_ids": [0, 1]}
    engine.add_request("rehearsal", prompt, SamplingParams(max_tokens=1, detokenize=False))
    while engine.has_unfinished_requests():
        engine.step()
    engine.reset_prefix_cache()


@contextlib.contextmanager
def _untouched() -> Iterator[None]:
    """Random generators and `torch.set_num_threads` stay as they are: vLLM seeds the ones and, on a CPU, replaces the
    other by a function that does nothing."""
    state, arrays, set_threads, threads = (
        random.getstate(),
        np.random.get_state(),
        torch.set_num_threads,
        torch.get_num_threads(),
    )
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on its own use of torch
        try:
            yield
        finally:
            random.setstate(state)
            np.random.set_state(arrays)
            torch.set_num_threads = set_threads
            set_threads(threads)


def _parameters(running: Running) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = running.request.sampling
    return SamplingParams(
        temperature=sampling.temperature,
        max_tokens=running.limit,
        stop_token_ids=sorted(running.stop_token_ids),
        ignore_eos=True,  # they are among the stop tokens
        seed=running.seed & (2**63 - 1),
        logprobs=0,  # of the sampled token
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def _reload(worker: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """In vLLM's worker."""
    worker.reload_weights(weights_iterator=weights)
    # vLLM 0.32 on a CPU keeps a packed copy of tied embeddings, which a reload leaves as it was
    head = getattr(worker.model_runner.model, "lm_head", None)
    if head is not None and hasattr(head, "cpu_linear"):
        head.quant_method.process_weights_after_loading(head)
