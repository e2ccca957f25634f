"""The backend: engine and learner on one machine, CPU or one CUDA GPU.

on-policy        rollouts ──► engine ──► weights ◄── learner ◄── samples         `learn` holds the engine
max_staleness>0  rollouts ──► engine ──► copy ◄─swap─ weights ◄── learner        the swap alone holds the engine
engine = "vllm"  rollouts ──► vLLM ──► its copy ◄─load─ weights ◄── learner    likewise, in either case; of adapters
                                                                               it copies no more than those

A call never mixes versions: what changes the weights that it reads waits until it has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import numpy as np
import torch

from lightningrl.backends import Continuation, GenerateRequest, LearnReport, Speed
from lightningrl.errors import BackendError
from lightningrl.types import Array, IntArray, Sample, SamplingSettings
from lightningrl_torch.bits import MOMENT_BYTES, check_bits, check_same, silence_bits
from lightningrl_torch.checkpoint import read_checkpoint, restore_generators, write_checkpoint, written_folder
from lightningrl_torch.device import cpu_threads, return_memory
from lightningrl_torch.engine import TorchEngine
from lightningrl_torch.exported import find_dtype, merge_adapters, write_model
from lightningrl_torch.memory import engine_threads, is_large
from lightningrl_torch.packing import make_row
from lightningrl_torch.policy import LoadedPolicy, frozen_parts, quiet
from lightningrl_torch.rates import explain_rate, format_rate
from lightningrl_torch.settings import EngineSettings, Settings
from lightningrl_torch.vllm_check import installed_vllm

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lightningrl_torch.learner import Learner, Reference
    from lightningrl_torch.vllm_batch import VllmBatch

__all__ = ["TorchBackend"]

T = TypeVar("T")

LEARNING: Final = ThreadPoolExecutor(1, "learner")
"""The one thread that computes with several CPU threads, for all policies of the process: see `cpu_threads`."""
_CALLS: Final = 8
"""Calls at once while the speed of a policy is measured."""
_READ, _SAMPLED, _LEARNED = 16, 6, 32
"""Tokens of each."""
_WORDS: Final = 200
"""Tokens of the vocabulary; which ones does not matter."""


class TorchBackend:
    """Implements `lightningrl.backends.Backend` with transformers and torch. Keyword parameters: the fields of
    `Settings`."""

    __signature__ = inspect.signature(Settings)

    def __init__(self, **settings: Any) -> None:
        silence_bits()
        with cpu_threads(1):
            asked = Settings(**settings)
            check_bits(asked)
            self._policy = LoadedPolicy(asked)
            self.settings = self._policy.settings
            self._reference = _reference(self._policy, self.settings)
        self._asked_rate = asked.learning_rate
        self._threads = self.settings.threads or torch.get_num_threads()
        self._engine_threads = engine_threads(self.settings, self._policy.parameters)
        # threads that wait for each other on busy cores cost both
        if self.serves_while_learning and self.settings.threads is None:
            self._threads = max(1, self._threads - self._engine_threads)
        self._is_large = is_large(self._policy.parameters)
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Pairs of tensors: the engine reads the first, the learner changes the second; empty while they are the
        same."""
        self._building = threading.Lock()
        self._built: Learner | None = None
        """The learner, once it was asked for: until there is something to learn, what it imports would only keep the
        engine waiting."""
        self._restored: dict[str, Any] | None = None
        """State of a learner that was not built yet, from a checkpoint."""
        if self._policy.light is None:
            _ = self._learner
        self._vllm = self._make_vllm() if self.settings.engine == "vllm" else None
        self._reading = threading.Lock()
        """Held by whoever reads the weights beside the engine, or changes them."""
        self._engine = TorchEngine(
            self._vllm or self._policy.served,
            policy=self.settings.name or self.settings.policy,
            context_length=self._policy.context_length,
            stop_token_ids=self._policy.stop_token_ids,
            text_of=self._policy.text_of,
            tokenizer=self._policy.tokenizer_text if self.settings.has_grammars else None,
            seed=self.settings.seed,
            settings=EngineSettings(
                max_batch=self.settings.max_batch,
                prefill_tokens=self.settings.prefill_tokens,
                prefix_cache_tokens=self.settings.prefix_cache_tokens,
                stream_interval_s=self.settings.stream_interval_s,
                threads=self._engine_threads,
                autocast=self.settings.dtype == "bfloat16",
            ),
        )

    @property
    def serves_while_learning(self) -> bool:
        """Only where rollouts are out meanwhile; else engine and learner share one copy of the weights."""
        return self.settings.max_staleness > 0

    @property
    def engine(self) -> TorchEngine:
        """The engine that serves the policy's current weights."""
        return self._engine

    @property
    def learner(self) -> Learner:
        """The learner that changes them."""
        return self._learner

    def learn(self, samples: Iterable[Sample]) -> LearnReport:
        """Take one optimisation step and serve the new version afterwards. Whatever changes the weights that the engine
        reads waits for running requests to end and keeps new ones waiting: the step, or with a copy the swap
        (`seconds_swap`)."""
        rows = list(samples)
        return LEARNING.submit(self._learn_beside if self.serves_while_learning else self._learn_held, rows).result()

    def _learn_held(self, rows: Sequence[Sample]) -> LearnReport:
        with self._learning():
            report = self._learner.learn(rows)
            self._swap(report.policy_version)
        return report

    @contextlib.contextmanager
    def _learning(self) -> Iterator[None]:
        """All threads, no request, and on a GPU the memory of an engine that has weights of its own."""
        resting = contextlib.nullcontext() if self._vllm is None else self._vllm.resting()
        with self._reading, self._engine.held(), cpu_threads(self._threads), resting:
            if self._is_large:  # its weights are about to change, or a step has nothing to learn
                self._engine.rest()
                return_memory()
            yield
            if self._is_large:
                return_memory()

    def _learn_beside(self, rows: Sequence[Sample]) -> LearnReport:
        with self._reading, cpu_threads(self._threads):
            self._copy_weights()
            report = self._learner.learn(rows)
            began = time.monotonic()
            if report.policy_version != self._engine.info.version:
                with self._engine.held():
                    self._swap(report.policy_version)
        return replace(report, metrics={**report.metrics, "seconds_swap": time.monotonic() - began})

    def _copy_weights(self) -> None:
        """Give the engine trained weights of its own, before the first step; frozen ones stay shared."""
        if self._copies or self._vllm is not None:
            return
        model = self._policy.model
        with self._engine.held():
            served: PreTrainedModel = copy.deepcopy(model, frozen_parts(model))
            served.requires_grad_(requires_grad=False).eval()  # type: ignore[no-untyped-call]
            theirs = dict(served.named_parameters())
            self._copies = [(theirs[name], parameter) for name, parameter in self._learner.parameters.items()]
            self._engine.set_model(served)

    def _swap(self, version: int) -> None:
        """The engine's weights become the learner's. Only inside `held()`."""
        if self._vllm is not None:
            self._vllm.load()
        with torch.no_grad():
            for served, learned in self._copies:
                served.copy_(learned)
        self._engine.set_version(version)

    def logprobs(self, continuations: Sequence[Continuation], *, reference: bool = False) -> list[Array]:
        """For each its tokens' logprobs, computed beside the engine. The reference of a LoRA policy is the policy
        without its adapters, so the engine's requests wait meanwhile."""
        rows = self._rows([(one.context, one.tokens, one.temperature) for one in continuations])
        if not rows:
            return []
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._read())
            model = self._policy.model
            if reference:
                if self._reference is None:
                    raise BackendError(
                        f"policy {self.settings.policy!r} keeps no reference to score with; set learner.kl_coef "
                        "above 0, or train with "
                        "[learner.lora]"
                    )
                if self._policy.adapters is not None and not self._copies and self._vllm is None:
                    stack.enter_context(self._engine.held())
                model = stack.enter_context(self._reference())
            logprobs = self._learner.recompute(rows, model)
        return [logprobs[id(row)] for row in rows]

    def values(self, continuations: Sequence[Continuation]) -> list[Array]:
        """For each the critic's value after the context and after each token, computed beside the engine."""
        if self._learner.critic is None:
            raise BackendError(f"policy {self.settings.policy!r} has no critic; add a table [learner.critic]")
        # the value before a token that nobody sampled is the one after all that stands there
        rows = self._rows([(one.context, np.append(one.tokens, np.int32(0)), 1.0) for one in continuations], beyond=1)
        if not rows:
            return []
        with self._read():
            values = self._learner.values(rows)
        return [values[id(row)] for row in rows]

    def _rows(self, read: Sequence[tuple[IntArray, IntArray, float]], *, beyond: int = 0) -> list[Sample]:
        """Rows to be read, of which `beyond` tokens need not fit the context: nobody reads what comes of them."""
        rows = [make_row(*one) for one in read]
        for row in rows:
            if len(row.token_ids) > self._policy.context_length + beyond:
                name, most = self.settings.policy, self._policy.context_length
                tokens = len(row.token_ids) - beyond
                raise BackendError(f"{tokens} tokens are more than policy {name!r} reads ({most}); shorten the context")
        return rows

    @contextlib.contextmanager
    def _read(self) -> Iterator[None]:
        """Weights that stay as they are, read by no more threads than the engine has."""
        with self._reading, cpu_threads(self._engine_threads):
            yield

    def describe(self) -> str:
        """A line that says what learns: parameters, which of them, at what rate, in which numbers, by how many
        threads."""
        policy, device = self._policy, self._policy.device
        trained = (
            0
            if policy.adapters is None
            else sum(weight.numel() for weight in policy.model.parameters() if weight.requires_grad)
        )
        where = device.type if device.type != "cpu" else f"{self._threads} thread{'s' if self._threads > 1 else ''}"
        if self._vllm is not None:
            where = f"{where}, sampled by vLLM {installed_vllm()}"
        settings, parameters = self.settings, policy.parameters - trained
        adapters, rollouts = settings.adapters is not None, settings.rollouts_per_step
        usual = explain_rate(parameters, adapters=adapters, rollouts=rollouts)
        rate = None
        if self._asked_rate is None:
            rate = f"{format_rate(self.learning_rate)} ({usual})"
        elif self._asked_rate == "auto":
            probed = None if self._built is None else self._built.probe
            rate = f"{format_rate(self.learning_rate)} (auto)" if probed else f"auto (before the probe: {usual})"
        dtype = settings.dtype if settings.quantize is None else f"{settings.dtype} on {settings.quantize} weights"
        if policy.shares_with:
            where = f"{where}, frozen weights shared with {', '.join(map(repr, policy.shares_with))}"
        return settings.describe(parameters=parameters, trained=trained, dtype=dtype, where=where, rate=rate)

    @property
    def learning_rate(self) -> float:
        """Learning rate before the schedule's factor; with "auto", before the probe, the usual one."""
        state = self._restored or {}
        pace = float(state.get("pace", 1.0)) if self._built is None else self._built.pace
        rate = self.settings.learning_rate
        return pace * (rate if isinstance(rate, float) else self._learner.rate)

    def measure(self) -> Speed | None:
        """Measure the speed of a large policy; None = it is small, and as fast as its surroundings."""
        if not self._is_large:
            return None
        learner = self._learner

        def rehearse(rows: Sequence[Sample]) -> None:
            with self._learning():
                learner.rehearse(rows)

        trained = sum(one.numel() for one in learner.parameters.values())
        return _measure(
            self._engine,
            lambda rows: LEARNING.submit(rehearse, rows).result(),
            parameters=self._policy.parameters,
            trained=trained,
            weight_bytes=self._policy.weight_bytes,
            moment_bytes=MOMENT_BYTES[self.settings.optimizer],
        )

    def save(self, folder: Path) -> None:
        """Write trained weights (safetensors), optimiser, schedule and random generators; complete when it returns.
        What nobody has asked for yet, the learner, has no state: the first rollouts do not wait for its imports."""
        is_fresh = self._policy.light is not None and self._built is None and self._restored is None
        learner = None if is_fresh else self._learner.state()
        write_checkpoint(
            folder,
            self._weights,
            {"policy": self.settings.policy, "learner": learner, "engine": self._engine.random_state()},
        )

    @cpu_threads(1)
    def load(self, folder: Path) -> None:
        """Restore what `save` wrote: on the CPU, learning and sampling go on bit for bit."""
        weights, state = read_checkpoint(folder, self._policy.device)
        if state["learner"] is not None:
            check_same(state["learner"].get("settings", {}), self.settings)
        parameters = self._weights
        for name in sorted(parameters.keys() | weights.keys()):
            ours, theirs = (tuple(found[name].shape) if name in found else None for found in (parameters, weights))
            if ours != theirs:
                raise BackendError(
                    f"checkpoint {str(folder)!r} does not fit policy {self.settings.policy!r}: {name!r} is {theirs} "
                    f"there and {ours} here; "
                    "use the policy, LoRA and critic settings that it was saved with (learner.lora = false: all "
                    "weights were trained)"
                )
        with self._reading, self._engine.held():
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.copy_(weights[name])
            learner = self._restored = state["learner"]
            if learner is None:
                self._built = None
            elif self._built is not None:
                self._built.load_state(learner)
            self._engine.set_random_state(state["engine"])
            self._swap(0 if learner is None else int(learner["step"]))
            restore_generators(state)

    def go_back(self, folder: Path, *, slower: float) -> float:
        """Restore what `save` wrote as a new version, and learn on at `slower` times the present rate, which is
        returned."""
        learner = self._learner
        step, rate, pace = learner.step, learner.rate, learner.pace
        self.load(folder)
        learner = self._learner  # another one, where the checkpoint was written before the first update
        learner.step, learner.rate, learner.pace = step + 1, rate, pace * slower
        with self._reading, self._engine.held():
            self._swap(learner.step)
        return rate * learner.pace

    def export(self, folder: Path, *, dtype: str | None = None, adapter: bool = False) -> None:
        """Write an ordinary transformers folder with tokenizer and chat template, LoRA merged. `dtype`: float32,
        bfloat16 or float16; None = that of the policy's own folder. `adapter`: LoRA's weights alone, for `peft`."""
        light, wanted = self._policy.light, find_dtype(dtype, self._policy.dtype)
        if adapter:
            if self._policy.adapters is None:
                raise BackendError(
                    "all weights of this policy learned, so that there is no adapter; export it without --adapter"
                )
            with written_folder(folder) as scratch:
                self._policy.write_adapters(scratch)
            return
        if light is not None:
            with written_folder(folder) as scratch:
                light.write(scratch, wanted)
            return
        adapters = self._policy.adapters
        model = self._policy.model if adapters is None else merge_adapters(adapters)
        with written_folder(folder) as scratch, quiet():
            write_model(model, scratch, wanted)
            self._policy.whole.tokenizer.save_pretrained(scratch)

    def close(self) -> None:
        """Stop the engine's thread."""
        self._engine.close()
        self._policy.close()

    def _make_vllm(self) -> VllmBatch:
        from lightningrl_torch.vllm_batch import VllmBatch

        return VllmBatch(
            self.settings,
            context_length=self._policy.context_length,
            device=self._policy.device,
            weights=self._policy.named_weights,
            write_adapters=self._policy.write_adapters,
        )

    @property
    def _learner(self) -> Learner:
        # whoever asks first may only be reading
        with self._building, cpu_threads(1), torch.inference_mode(mode=False), torch.enable_grad():
            if self._built is None:
                from lightningrl_torch.learner import Learner

                reference = self._reference if self.settings.has_kl_loss else None
                learner = Learner(self._policy.model, self.settings, reference=reference)
                if self._restored is not None:
                    learner.load_state(self._restored)
                self._built = learner
            return self._built

    @property
    def _weights(self) -> dict[str, torch.nn.Parameter]:
        """All that learns."""
        if self._policy.light is not None and self._built is None:
            return self._policy.light.parameters
        critic = self._learner.critic
        return {
            **self._learner.parameters,
            **({f"critic.{name}": one for name, one in critic.parameters.items()} if critic else {}),
        }


def _reference(policy: LoadedPolicy, settings: Settings) -> Reference | None:
    """The starting policy: adapters switched off, or a frozen copy where loss or reward measure a KL to it."""
    if policy.adapters is not None:

        @contextlib.contextmanager
        def without_adapters() -> Iterator[PreTrainedModel]:
            with policy.adapters.disable_adapter():
                yield policy.model

        return without_adapters
    if settings.kl_coef == 0.0:
        return None
    frozen: PreTrainedModel = copy.deepcopy(policy.model).requires_grad_(requires_grad=False)
    frozen.eval()  # type: ignore[no-untyped-call]
    return lambda: contextlib.nullcontext(frozen)


def _measure(
    engine: TorchEngine,
    rehearse: Callable[[Sequence[Sample]], None],
    *,
    parameters: int,
    trained: int,
    weight_bytes: int,
    moment_bytes: float,
) -> Speed:
    """Speed of a policy here: a few random tokens are read, sampled and learned from, which leaves no trace in it.
    Takes some seconds where a policy is slow. `rehearse` computes rows' gradient."""
    rng = random.Random(0)  # noqa: S311 - which tokens does not matter

    def words(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(_WORDS) for _ in range(count))

    _ask(engine, 1, words, prompt=2, tokens=1)  # what is made once
    _, reading = _timed(lambda: _ask(engine, _CALLS, words, prompt=_READ, tokens=1))
    # fewer than asked for where one ends early; a prompt of two tokens takes about as long as a token
    sampled, sampling = _timed(lambda: _ask(engine, _CALLS, words, prompt=2, tokens=_SAMPLED))
    rows = [_row(words(1 + _LEARNED)) for _ in range(_CALLS // 2)]
    _, learning = _timed(lambda: rehearse(rows))

    def speed(tokens: int, took: float) -> float:
        return tokens / max(took, 1e-9)

    return Speed(
        parameters=parameters,
        trained=trained,
        weight_bytes=weight_bytes,
        moment_bytes=moment_bytes,
        read=speed(_CALLS * _READ, reading.wall),
        sampled=speed(sampled, sampling.wall),
        calls=_CALLS,
        learned=speed(len(rows) * _LEARNED, learning.wall),
        read_cpu=speed(_CALLS * _READ, reading.cpu),
        sampled_cpu=speed(sampled, sampling.cpu),
        learned_cpu=speed(len(rows) * _LEARNED, learning.cpu),
    )


def _ask(engine: TorchEngine, calls: int, words: Callable[[int], tuple[int, ...]], *, prompt: int, tokens: int) -> int:
    """Tokens that were sampled."""

    async def call(number: int) -> int:
        request = GenerateRequest(
            id=f"speed-{number}", prompt_ids=words(prompt), sampling=SamplingSettings(max_tokens=tokens, seed=number)
        )
        return sum([len(chunk.token_ids) async for chunk in engine.generate(request)])

    async def all_of_them() -> int:
        return sum(await asyncio.gather(*map(call, range(calls))))

    return asyncio.run(all_of_them())


def _row(tokens: tuple[int, ...]) -> Sample:
    """All but the first are learned."""
    return make_row(np.array(tokens[:1], np.int32), np.array(tokens[1:], np.int32), 1.0)


class _Took(NamedTuple):
    """Seconds."""

    wall: float
    cpu: float
    """This process has, in which the policy is served and learned."""


def _timed(work: Callable[[], T]) -> tuple[T, _Took]:
    wall, cpu = time.monotonic(), time.process_time()
    done = work()
    return done, _Took(time.monotonic() - wall, time.process_time() - cpu)
