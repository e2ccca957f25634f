"""The backend: verl's trainer and replicas behind LightningRL's `Backend`.

    driver process                                  Ray
    VerlBackend.learn ─► Runner actor ─► verl: actor, critic, reference workers ─ weights ─► vLLM replicas
    VerlEngine.generate ──────────────────────── verl's balancer ──────────────────────────────┘

verl starts when it is first needed, so that `load` can tell it where to resume.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayError

from lightningrl.advantages import count_distinct
from lightningrl.backends import LearnReport
from lightningrl.errors import BackendError, LightningError
from lightningrl.files import whole_folder
from lightningrl.types import Sample
from lightningrl_verl.engine import VerlEngine
from lightningrl_verl.environment import process_environment, quiet
from lightningrl_verl.export import export_checkpoint, step_folder
from lightningrl_verl.policy import PolicyFacts, count_parameters, read_policy
from lightningrl_verl.ray_connection import Connection, actor_environment, check_capacity, connect
from lightningrl_verl.recipe_check import check_machine, runs_on_cpu
from lightningrl_verl.rows import choose_samples, separate_calls
from lightningrl_verl.runner import Learned, Runner
from lightningrl_verl.seams import check_seams
from lightningrl_verl.settings import METRIC, Settings
from lightningrl_verl.verl_config import build_config

__all__ = ["VerlBackend"]

logger = logging.getLogger(__name__)

_STOP_S = 40.0
_METRICS = {
    "actor/pg_loss": "loss",
    "actor/grad_norm": "grad_norm",
    "actor/lr": "lr",
    "actor/entropy": "entropy",
    "actor/kl_loss": "kl_reference",
    "critic/vf_loss": "value_loss",
    "rollout_corr/rollout_is_mean": "importance",
}
"""verl's names of what the torch backend reports too."""


class VerlBackend:
    """Implements `lightningrl.backends.Backend`. Raises BackendError or ConfigError, before Ray starts."""

    def __init__(self, settings: Settings) -> None:
        """Made by `plugin.create_backend`, which prepares the environment before verl is imported."""
        self.settings = settings
        self._cpu = runs_on_cpu(settings)
        self._environment = process_environment(settings)
        check_seams()
        self._policy: PolicyFacts = read_policy(settings)
        build_config(settings, context_length=self._policy.context_length, cpu=self._cpu)  # verl's objections, now
        self._lock = threading.RLock()
        self._runner: Any = None
        self._engine: VerlEngine | None = None
        self._failure: LightningError | None = None
        self._connection: Connection | None = None
        self._resume_from: Path | None = None
        self._shared: Path | None = None
        """Where checkpoints lie: on a cluster, storage that all nodes see."""

    @property
    def serves_while_learning(self) -> bool:
        return self.settings.is_async

    @property
    def engine(self) -> VerlEngine:
        """The engine over verl's replicas; starts verl the first time (minutes)."""
        with self._lock:
            if self._failure is not None:  # one try: the next would end the same way, minutes later
                raise self._failure
            if self._engine is None:
                self._start()
            assert self._engine is not None
            return self._engine

    def learn(self, samples: Iterable[Sample]) -> LearnReport:
        """One step of verl's trainer; none where no row has a part in the loss. A replica that died is replaced first:
        verl is restarted from the weights as they are."""
        rows = choose_samples(samples, self.settings)
        engine = self.engine
        if not rows:
            return LearnReport(policy_version=engine.info.version, tokens=0, seconds=0.0)
        if engine.lost:
            self._replace_replicas()
        began, before = time.monotonic(), engine.info.version
        with contextlib.nullcontext() if self.settings.is_async else engine.held():
            learned = self._learn(rows)
            engine.set_version(learned.version)
        tokens = sum(int(sample.mask.sum()) for sample in rows)
        metrics = {name: learned.metrics[theirs] for theirs, name in _METRICS.items() if theirs in learned.metrics}
        metrics |= {theirs.partition(METRIC)[2]: value for theirs, value in learned.metrics.items() if METRIC in theirs}
        metrics |= {
            f"verl/{name}": value
            for name, value in learned.metrics.items()
            if name.startswith(("timing_s/", "perf/", "training/"))
        }
        metrics |= _staleness(rows, before)
        # verl computes every row from its first token
        computed = sum(len(row.token_ids) for sample in rows for row in separate_calls(sample))
        metrics |= {
            "rows": float(learned.rows),
            "seconds_rows": learned.seconds_rows,
            "trie_efficiency": count_distinct(rows) / computed,
        }
        if "timing_s/step" in learned.metrics:  # verl's own share of the time is its step without the wait for our rows
            own = learned.metrics["timing_s/step"] - learned.metrics["timing_s/gen"]
            metrics |= {"seconds_verl": own, "seconds_handover": time.monotonic() - began - own}
        return LearnReport(policy_version=learned.version, tokens=tokens, seconds=learned.seconds, metrics=metrics)

    def describe(self) -> str:
        """A line that says what learns: parameters, which of them, at what rate, in which numbers, on how many GPUs."""
        settings = self.settings
        parameters, trained = count_parameters(settings)
        gpus = settings.nodes * settings.gpus_per_node
        where = "CPU" if self._cpu else f"{gpus} GPU{'s' if gpus > 1 else ''}"
        dtype = "float32" if self._cpu else settings.dtype
        return settings.describe(parameters=parameters, trained=trained, dtype=dtype, where=where)

    def save(self, folder: Path) -> None:
        """Write weights, optimiser and schedule (actor, and critic) as verl does; a cluster needs a shared `folder`."""
        version = self.engine.info.version
        self._shared = self._shared or _above_checkpoints(folder)
        with whole_folder(folder) as scratch:
            inner = scratch / f"global_step_{version}"
            inner.mkdir(parents=True)
            self._ask(self._runner.save.remote(str(inner.resolve())))

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote. Restarts verl where it runs already."""
        with self._lock:
            self._resume_from = step_folder(folder)
            self._shared = _above_checkpoints(folder)
            if self._runner is not None:
                self._stop()
                self._start()

    def export(self, folder: Path, *, dtype: str | None = None, adapter: bool = False) -> None:
        """Write an ordinary transformers folder with tokenizer and chat template, LoRA merged. `dtype`: float32,
        bfloat16 or float16; None = that of the policy's own folder. Raises BackendError for an adapter."""
        if adapter:
            raise BackendError("verl's merger writes whole weights, LoRA merged; export them without --adapter")
        is_megatron = self.settings.strategy == "megatron"
        if self._runner is None and self._resume_from is not None:  # straight from the checkpoint, no cluster needed
            export_checkpoint(
                self._resume_from / "actor", folder, policy=self._policy, megatron=is_megatron, dtype=dtype
            )
            return
        with self._scratch() as scratch:
            saved = Path(scratch) / "saved"
            self.save(saved)
            export_checkpoint(
                step_folder(saved) / "actor", folder, policy=self._policy, megatron=is_megatron, dtype=dtype
            )

    def close(self) -> None:
        """Stop verl, its replicas, and Ray where we started it."""
        with self._lock:
            self._stop()
            if self._connection is not None:
                self._connection.leave()
                self._connection = None

    def _scratch(self) -> tempfile.TemporaryDirectory[str]:
        """A folder for weights that are read again at once, beside the checkpoints."""
        return tempfile.TemporaryDirectory(prefix=".lightningrl-", dir=self._shared)

    def _start(self) -> None:
        with quiet():
            self._start_verl()

    def _start_verl(self) -> None:
        check_machine(self.settings)
        config = build_config(
            self.settings, context_length=self._policy.context_length, cpu=self._cpu, resume_from=self._resume_from
        )
        self._connection = self._connection or connect(self.settings, config, self._environment)
        check_capacity(self.settings)
        environment = actor_environment(config, self._environment)
        self._runner = Runner.options(num_cpus=1, runtime_env=environment).remote(config)  # type: ignore[attr-defined]
        try:
            version = self._ask(self._runner.start.remote(), timeout_s=self.settings.start_timeout_s, what="start")
            client = self._ask(self._runner.client.remote())
        except BaseException as error:
            self._failure = error if isinstance(error, LightningError) else None
            self._stop()
            raise
        if self._engine is None:
            self._engine = VerlEngine(
                client,
                policy=self.settings.name or self.settings.policy,
                version=version,
                context_length=self._policy.context_length,
                eos_ids=self._policy.eos_ids,
                text_of=self._policy.text_of,
            )
        else:
            self._engine.connect(client, version)

    def _stop(self) -> None:
        runner, self._runner = self._runner, None
        if runner is None:
            return
        with contextlib.suppress(RayError):
            ray.get(runner.stop.remote(), timeout=_STOP_S)
        with contextlib.suppress(RayError):
            ray.kill(runner)

    def _learn(self, rows: Sequence[Sample]) -> Learned:
        # averaging, verl divides by the batch's tokens
        scale = (
            float(sum(int(sample.mask.sum()) for sample in rows))
            if self.settings.is_averaged
            else float(self.settings.minibatches)
        )
        learned: Learned = self._ask(
            self._runner.learn.remote(
                rows, minibatches=self.settings.minibatches, scale=scale, as_reward=self.settings.critic is not None
            )
        )
        return learned

    def _replace_replicas(self) -> None:
        """Save, stop, start from there: what was collected stays, the step goes on with the same weights."""
        engine = self.engine
        logger.warning("replicas %s died; restarting verl from version %d", ", ".join(engine.lost), engine.info.version)
        began = time.monotonic()
        with self._lock, engine.held(), self._scratch() as scratch:
            saved = Path(scratch) / "saved"
            self.save(saved)
            self._stop()
            resumed, self._resume_from = self._resume_from, step_folder(saved)
            try:
                self._start()
            finally:
                self._resume_from = resumed
        logger.warning("verl goes on with new replicas after %.0f s", time.monotonic() - began)

    def _ask(self, answer: Any, *, timeout_s: float | None = None, what: str = "the step") -> Any:
        """A remote answer; Ray's and verl's errors as one sentence."""
        try:
            return ray.get(answer, timeout=timeout_s)
        except GetTimeoutError:
            raise BackendError(
                f"verl was not ready after {timeout_s:g} s; raise start_timeout_s, or see Ray's logs"
            ) from None
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, LightningError):
                raise cause from None
            raise BackendError(f"verl failed at {what}: {_sentence(error)}") from error
        except RayError as error:
            raise BackendError(
                f"verl's trainer is gone ({_sentence(error)}); nothing collected is lost: go on with `lightningrl "
                "train --resume`"
            ) from error


def _above_checkpoints(folder: Path) -> Path:
    """`checkpoints/step-000010/policies/NAME` → `checkpoints`: the same storage, and there if the step's is gone."""
    above = folder.resolve().parents
    return above[min(2, len(above) - 1)]


def _staleness(samples: Sequence[Sample], version: int) -> dict[str, float]:
    """Age of the trained tokens, in versions."""
    ages = version - np.concatenate([sample.versions[sample.mask] for sample in samples])
    return {"staleness_mean": float(ages.mean()), "staleness_max": float(ages.max())}


def _sentence(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:500]
