"""`lightningrl tune` on verl: the training workers that verl's own SFT trainer is made of, and no replicas.

rows ─► nested tensors ─► TrainingWorker of each rank (FSDP or Megatron, by Ray) ─► metrics, or log π of tokens
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import ray
import torch
from ray.exceptions import RayError
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool
from verl.utils import tensordict_utils
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine_workers import TrainingWorker, TrainingWorkerConfig

from lightningrl.advantages import teaching_rows
from lightningrl.backends import Continuation, EngineInfo, GenerateRequest, LearnReport, TokenChunk
from lightningrl.errors import BackendError
from lightningrl.files import whole_folder
from lightningrl.types import Array, IntArray, Sample
from lightningrl_verl.environment import process_environment, quiet
from lightningrl_verl.export import export_checkpoint, step_folder
from lightningrl_verl.policy import count_parameters, read_policy
from lightningrl_verl.ray_connection import Connection, actor_environment, check_capacity, connect
from lightningrl_verl.recipe_check import check_machine, runs_on_cpu
from lightningrl_verl.runner import meeting_elsewhere
from lightningrl_verl.seams import check_seams
from lightningrl_verl.settings import Settings
from lightningrl_verl.verl_config import NEVER_ENDS, build_config

__all__ = ["VerlTuner", "weighted_loss"]


class VerlTuner:
    """A `lightningrl.backends.Backend` that learns and scores tokens, and serves nobody. Raises BackendError or
    ConfigError, before Ray starts."""

    serves_while_learning = False

    def __init__(self, settings: Settings) -> None:
        """Made by `plugin.create_tuner`, which prepares the environment before verl is imported."""
        self.settings = settings
        self._cpu = runs_on_cpu(settings)
        check_seams()
        self._policy = read_policy(settings)
        self._config = build_config(settings, context_length=self._policy.context_length, cpu=self._cpu)
        self._connection: Connection | None = None
        self._ranks: _Ranks | None = None
        self._version = 0
        self._saved: Path | None = None
        """Checkpoint with the weights of now."""

    @property
    def engine(self) -> _NoEngine:
        """Facts of the policy; it answers no calls."""
        return _NoEngine(
            EngineInfo(
                policy=self.settings.name or self.settings.policy,
                version=self._version,
                context_length=self._policy.context_length,
            )
        )

    def learn(self, samples: Iterable[Sample]) -> LearnReport:
        """One update by the gradient of -Σ weight · advantage · log π; none where no row has an advantage."""
        rows = teaching_rows(list(samples))
        if not rows:
            return LearnReport(policy_version=self._version, tokens=0, seconds=0.0)
        began = time.monotonic()
        wholes = [_Row(row.token_ids, row.mask, np.where(row.mask, row.weights * row.advantages, 0.0)) for row in rows]
        metrics = self._started().train(wholes)
        self._version, self._saved = self._version + 1, None
        return LearnReport(
            policy_version=self._version,
            tokens=sum(int(row.mask.sum()) for row in rows),
            seconds=time.monotonic() - began,
            metrics={name: float(metrics[name]) for name in ("loss", "grad_norm", "lr") if name in metrics},
        )

    def logprobs(self, continuations: Sequence[Continuation], *, reference: bool = False) -> Sequence[Array]:
        """For each its tokens' logprobs, by the weights of now. Raises BackendError for those of the start."""
        if reference:
            raise BackendError("the verl tuner keeps no reference; score the rows before the first update")
        rows = [
            _Row(
                np.concatenate([each.context, each.tokens]),
                np.arange(len(each.context) + len(each.tokens)) >= len(each.context),
                np.zeros(len(each.context) + len(each.tokens)),
            )
            for each in continuations
        ]
        temperatures = {each.temperature for each in continuations}
        if len(temperatures) > 1:
            raise BackendError(f"tokens of temperatures {sorted(temperatures)} in one question; ask for each alone")
        scores = self._started().score(rows, *temperatures) if rows else []
        # verl's number at a place is of the token after it
        return [score[row.mask.argmax() - 1 : -1] for score, row in zip(scores, rows, strict=True)]

    def describe(self) -> str:
        """A line that says what learns: parameters, which of them, at what rate, in which numbers, where."""
        parameters, trained = count_parameters(self.settings)
        gpus = self.settings.nodes * self.settings.gpus_per_node
        where = "CPU" if self._cpu else f"{gpus} GPU{'s' if gpus > 1 else ''}"
        dtype = "float32" if self._cpu else self.settings.dtype
        return self.settings.describe(parameters=parameters, trained=trained, dtype=dtype, where=where)

    def save(self, folder: Path) -> None:
        """Write weights, optimiser and schedule as verl does; a cluster needs a shared `folder`."""
        with whole_folder(folder) as scratch:
            actor = scratch / f"global_step_{self._version}" / "actor"
            actor.mkdir(parents=True)
            self._started().save(actor.resolve(), self._version)
        self._saved = None  # whoever asked may move it

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote."""
        checkpoint = step_folder(folder)
        self._started().load(checkpoint / "actor")
        self._version, self._saved = int(checkpoint.name.rpartition("_")[2]), checkpoint

    def export(self, folder: Path, *, dtype: str | None = None, adapter: bool = False) -> None:
        """Write an ordinary transformers folder with tokenizer and chat template, LoRA merged. Raises BackendError for
        an adapter."""
        if adapter:
            raise BackendError("verl's merger writes whole weights, LoRA merged; export them without --adapter")
        is_megatron = self.settings.strategy == "megatron"
        with contextlib.ExitStack() as stack:
            saved = self._saved
            if saved is None:
                scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix=".lightningrl-", dir=folder.parent))
                self.save(Path(scratch) / "saved")
                saved = step_folder(Path(scratch) / "saved")
            export_checkpoint(saved / "actor", folder, policy=self._policy, megatron=is_megatron, dtype=dtype)

    def close(self) -> None:
        """Stop the workers, and Ray where we started it."""
        if self._ranks is not None:
            self._ranks.stop()
            self._ranks = None
        if self._connection is not None:
            self._connection.leave()
            self._connection = None

    def _started(self) -> _Ranks:
        """The workers; starts them the first time (half a minute)."""
        if self._ranks is None:
            check_machine(self.settings)
            environment = process_environment(self.settings)
            with quiet():
                self._connection = self._connection or connect(self.settings, self._config, environment)
                check_capacity(self.settings)
                self._ranks = _Ranks(self._config, self.settings, actor_environment(self._config, environment))
        return self._ranks


@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    """Tokens, which of them are scored, and by what their log π counts in the loss."""

    token_ids: IntArray
    mask: np.ndarray[Any, np.dtype[np.bool_]]
    values: np.ndarray[Any, Any]


class _Ranks:
    """verl's training workers, one a rank."""

    def __init__(self, config: Any, settings: Settings, environment: Mapping[str, Any]) -> None:
        self._pool = RayResourcePool(process_on_nodes=[settings.gpus_per_node] * settings.nodes, max_colocate_count=1)
        worker = RayClassWithInitArgs(ray.remote(TrainingWorker), config=_worker_config(config, settings))
        worker.update_options({"runtime_env": environment})
        with _told("start"):
            self._group = meeting_elsewhere(
                resource_pool=self._pool, ray_cls_with_init=worker, device_name=config.trainer.device
            )
            self._group.reset()
            self._group.set_loss_fn(weighted_loss)
            self._count = max(self._group._query_dispatch_info("train")) + 1

    def train(self, rows: Sequence[_Row]) -> Mapping[str, Any]:
        """Take one update; return verl's metrics of it."""
        with _told("the update"):
            output = self._group.train_batch(self._pack(rows, update_lr_scheduler=True)).get()
        metrics: Mapping[str, Any] = tensordict_utils.get(output, "metrics")
        return metrics

    def score(self, rows: Sequence[_Row], temperature: float) -> list[Array]:
        """Score the token after each place of each row."""
        with _told("scoring"):
            output = self._group.infer_batch(self._pack(rows, temperature=temperature, compute_loss=False)).get()
        return [row.numpy().astype(np.float32) for row in output["log_probs"].unbind()[: len(rows)]]

    def save(self, folder: Path, step: int) -> None:
        with _told("saving"):
            self._group.save_checkpoint(str(folder), None, step)

    def load(self, folder: Path) -> None:
        with _told("loading"):
            self._group.load_checkpoint(str(folder), None, False)

    def stop(self) -> None:
        for worker in self._group.workers:
            with contextlib.suppress(RayError):
                ray.kill(worker)
        for group in self._pool.pgs or ():
            ray.util.remove_placement_group(group)

    def _pack(self, rows: Sequence[_Row], *, temperature: float = 1.0, **more: Any) -> Any:
        """verl's table of a batch, with as many rows for each rank: the last ones count for nothing."""
        silent = _Row(rows[0].token_ids, np.zeros_like(rows[0].mask), np.zeros_like(rows[0].values))
        padded = [*rows, *[silent] * (-len(rows) % self._count)]
        columns = {
            "input_ids": [torch.from_numpy(row.token_ids.astype(np.int64)) for row in padded],
            "position_ids": [torch.arange(len(row.token_ids)) for row in padded],
            "loss_mask": [torch.from_numpy(row.mask.astype(np.int64)) for row in padded],
            "values": [torch.from_numpy(row.values.astype(np.float32)) for row in padded],
        }
        nested = {name: torch.nested.as_nested_tensor(column, layout=torch.jagged) for name, column in columns.items()}
        return tensordict_utils.get_tensordict(
            tensor_dict=nested, non_tensor_dict={"temperature": temperature, "global_batch_size": len(padded), **more}
        )


class _NoEngine:
    """Implements `lightningrl.backends.Engine` but for its answers."""

    def __init__(self, info: EngineInfo) -> None:
        self.info = info

    def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        _refuse()


def weighted_loss(
    config: Any = None, model_output: Any = None, data: Any = None, dp_group: Any = None
) -> tuple[torch.Tensor, dict[str, float]]:
    """-Σ value · log π over a batch's tokens, as verl calls a loss: each rank's part times the ranks, of which verl
    takes the mean."""
    values = torch.roll(data["values"].values(), shifts=-1, dims=0)
    return -(model_output["log_probs"].values() * values).sum() * data["dp_size"], {}


def _refuse() -> NoReturn:
    raise BackendError("the verl tuner answers no calls; `lightningrl train` starts the replicas that do")


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """Ray's and verl's errors as one sentence."""
    try:
        yield
    except RayError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        sentence = (lines[-1] if lines else type(error).__name__)[:500]
        raise BackendError(f"verl's training workers failed at {what}: {sentence}") from error


def _worker_config(config: Any, settings: Settings) -> Any:
    """Settings of a training worker: those that the actor of a run of RL has (verl/workers/engine_workers.py)."""
    part = config.actor_rollout_ref
    actor = omega_conf_to_dataclass(part.actor)
    engine, optimiser = actor.engine, actor.optim
    engine.use_dynamic_bsz = True
    engine.max_token_len_per_gpu = engine.infer_max_token_len_per_gpu = part.actor.ppo_max_token_len_per_gpu
    optimiser.total_training_steps = settings.total_steps or NEVER_ENDS
    return TrainingWorkerConfig(
        model_type="language_model",
        model_config=omega_conf_to_dataclass(part.model),
        engine_config=engine,
        optimizer_config=optimiser,
        checkpoint_config=actor.checkpoint,
        profiler_config=None,
    )
