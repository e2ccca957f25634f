"""vLLM as the batch of a policy that `TorchEngine` steps: vLLM decodes and samples, the rest is the same. Its engine is
in this process: of one policy all of whose weights learn, or of several with adapters on one base. Then all their
requests are one batch, and each row is decoded with the adapters of its policy (S-LoRA, Sheng et al. 2023, arXiv
2311.03285).

GenerateRequest ─► join ─► vLLM ─► step ─► tokens, logprobs ─► chunks

batch of policy a ─requests─┐                  ┌─outputs of its requests─► batch of policy a
batch of policy b ─requests─┴► LLMEngine.step ─┴─outputs of its requests─► batch of policy b

learner's weights ─► load ─► vLLM's reload_weights, a layer at a time ─► prompts of older weights forgotten
learner's adapters ─► load ─► a folder as peft writes it ─► vLLM's add_lora

Made for vLLM 0.32. On a GPU vLLM frees its memory while a learner steps (its sleep mode).
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import random
import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from lightningrl.backends import GenerateRequest, TokenChunk
from lightningrl.errors import BackendError
from lightningrl_torch.requests import Running, chunk_interval, deliver, not_finite
from lightningrl_torch.settings import Settings, VllmSettings
from lightningrl_torch.vllm_check import adapter_rank, check_sampling, common_settings, installed_vllm

if TYPE_CHECKING:
    from vllm import LLMEngine
    from vllm.lora.request import LoRARequest

__all__ = ["VllmBatch"]

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
MOST_ADAPTERS: Final = 4
"""Policies whose rows are decoded together; of more, some wait their turn."""


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
        self._engine = _use_vllm(settings, context_length, device)
        self._folder = tempfile.TemporaryDirectory(prefix="lightningrl-adapters-")
        self._loaded = 0
        if self._has_adapters:
            try:
                with _refusals(settings.policy):
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


class _VllmEngine:
    """vLLM's `LLMEngine`, for batches in several threads. Whoever steps first, steps for all."""

    def __init__(self, engine: LLMEngine, *, sleep_level: int) -> None:
        """`sleep_level`: vLLM's, while a learner steps; 0 = awake."""
        self.users = 0
        self._engine = engine
        self._sleep_level = sleep_level
        self._asleep = False
        self._lock = threading.RLock()
        self._outputs: dict[str, list[Any]] = {}
        """The list that a request's outputs go to."""
        self._requests, self._adapters = itertools.count(1), itertools.count(1)

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return int(self._engine.model_config.get_vocab_size())

    @property
    def is_idle(self) -> bool:
        """No policy has a request that runs."""
        return not self._engine.has_unfinished_requests()

    @property
    def is_asleep(self) -> bool:
        """Its memory is a learner's."""
        return self._asleep

    def new_name(self) -> str:
        """Name for a request."""
        return str(next(self._requests))

    def add(self, name: str, running: Running, outputs: list[Any], adapter: LoRARequest | None) -> None:
        """Take a request in; what `step` has for it goes to `outputs`."""
        prompt: Any = {"prompt_token_ids": list(running.request.prompt_ids)}
        with self._lock:
            self._outputs[name] = outputs
            self._engine.add_request(name, prompt, _parameters(running), lora_request=adapter)

    def step(self, outputs: list[Any]) -> list[Any]:
        """Take all that is in `outputs`; where that is nothing, after a step of vLLM."""
        with self._lock:
            if not outputs:
                for output in self._engine.step():
                    going = self._outputs.get(output.request_id)
                    if output.finished:
                        self._outputs.pop(output.request_id, None)
                    if going is not None:
                        going.append(output)
            taken = list(outputs)
            outputs.clear()
            return taken

    def abort(self, names: list[str]) -> None:
        """Forget requests."""
        if not names:
            return
        with self._lock:
            for name in names:
                self._outputs.pop(name, None)
            self._engine.abort_request(names)

    def forget_prompts(self) -> None:
        """Drop keys and values of prompts. Raises BackendError while a request runs."""
        with self._lock:
            if not self._engine.reset_prefix_cache():
                raise BackendError("vLLM kept prompts of older weights, as requests were running; report this as a bug")

    def reload(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Serve these weights, by the names of a transformers folder. Only while no request runs."""
        with self._lock:
            if self._asleep:
                self._engine.wake_up(["weights"])
            with torch.no_grad():
                self._engine.collective_rpc(_reload, args=(weights,))
            if self._asleep:
                self._engine.wake_up(["kv_cache"])
                self._asleep = False

    def load_adapter(self, folder: Path) -> LoRARequest:
        """Read adapters that `peft` wrote, which stay there as long as they are served. Each has a number of its own:
        prompts that vLLM remembers are of one adapter."""
        from vllm.lora.request import LoRARequest

        with self._lock:
            if self._asleep:
                self._engine.wake_up()
                self._asleep = False
            number = next(self._adapters)
            adapter = LoRARequest(f"{folder.name}-{number}", number, str(folder))
            self._engine.add_lora(adapter)
            return adapter

    def drop_adapter(self, adapter: LoRARequest) -> None:
        """Give back an adapter's memory."""
        with self._lock:
            self._engine.remove_lora(adapter.lora_int_id)

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """Leave the GPU's memory to a learner, who loads weights or an adapter before the block ends. Requests of other
        policies wait meanwhile; where some run already, it stays awake."""
        with contextlib.ExitStack() as held:
            held.enter_context(self._lock)
            if self._sleep_level and self.is_idle:
                self._engine.sleep(level=self._sleep_level)
                self._asleep = True
            else:
                held.close()
            yield

    def leave(self) -> None:
        """A policy needs it no longer; the last one gives back its memory."""
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        with STARTING:
            self.users -= 1
            if self.users:
                return
            for key in [key for key, one in ENGINES.items() if one is self]:
                del ENGINES[key]
            self._engine.engine_core.shutdown()
            del self._engine
            cleanup_dist_env_and_memory()


ENGINES: Final[dict[Hashable, _VllmEngine]] = {}
"""Engines that serve adapters, by all that their policies have in common."""
STARTING: Final = threading.Lock()


def _use_vllm(settings: Settings, context_length: int, device: torch.device) -> _VllmEngine:
    """The engine of a policy, which calls `leave` at its end: for adapters one that is there, where it fits. Raises
    BackendError with vLLM's own words."""
    key = None
    if settings.adapters is not None:
        key = (str(device), context_length, *common_settings(settings).values())
    with STARTING:
        engine = None if key is None else ENGINES.get(key)
        if engine is None:
            engine = _start(settings, context_length, device)
            if key is not None:
                ENGINES[key] = engine
        engine.users += 1
        return engine


def _start(settings: Settings, context_length: int, device: torch.device) -> _VllmEngine:
    """The engine, with the weights of the policy's folder."""
    installed_vllm()
    for name, value in VARIABLES.items():
        os.environ[name] = value
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    options = settings.vllm or VllmSettings()
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
    sleeps = options.sleep and not on_cpu and settings.max_staleness == 0
    lora: dict[str, Any] = {}
    if settings.adapters is not None:
        lora = {"enable_lora": True, "max_loras": MOST_ADAPTERS, "max_lora_rank": adapter_rank(settings.adapters.rank)}
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
        **lora,
    )
    with _untouched(), _refusals(settings.policy):
        engine = LLMEngine.from_engine_args(arguments)
        _rehearse(engine)
    # adapters stand on weights that do not change: the CPU keeps those while vLLM sleeps, the learner has others
    return _VllmEngine(engine, sleep_level=0 if not sleeps else 1 if lora else 2)


@contextlib.contextmanager
def _refusals(policy: str) -> Iterator[None]:
    """Raise a BackendError of one sentence for what vLLM raises."""
    try:
        yield
    except (ValueError, RuntimeError, NotImplementedError, AssertionError, OSError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = lines[0].rstrip(".;:") if lines else type(error).__name__
        raise BackendError(f'vLLM cannot serve policy {policy!r}: {reason}; use learner.engine = "torch"') from error


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
