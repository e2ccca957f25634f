"""A run of `lightningrl tune`: rows, updates, validation, checkpoints, the tuned policy.

<run>/tune/{rows.json, reference*.npy}   what it is tuned on
<run>/policy/                            the tuned policy, a transformers folder
"""

from __future__ import annotations

import hashlib
import inspect
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightningrl.backends import Backend
from lightningrl.errors import ConfigError, RunFolderError
from lightningrl.files import whole_folder, write_durably
from lightningrl.plugins import Plugin, PluginManager
from lightningrl.recipe import Recipe
from lightningrl_server.rendering.renderer import PolicyRenderer
from lightningrl_training.checkpoints import LoopState, find_checkpoint
from lightningrl_training.export import name_stops, open_to_readers
from lightningrl_training.exported_settings import fix_template, set_sampling
from lightningrl_training.loggers.jsonl import JsonlLogger
from lightningrl_training.memory_check import check_tuning_memory
from lightningrl_training.models import own_template
from lightningrl_training.policies import load_backend
from lightningrl_training.run_folder import RunFolder
from lightningrl_training.tuning.rows import Rows, find_file, read_rows
from lightningrl_training.tuning.settings import TuneSettings
from lightningrl_training.tuning.tuner import Tuner, TuningRow, arrange, order_of

__all__ = ["TuneData", "TuneResult", "build_backend", "make_renderer", "read_data", "tune_policy"]

_OF_RL = frozenset(
    [
        "clip_high",
        "clip_low",
        "critic",
        "engine",
        "entropy_coef",
        "epochs",
        "importance_cap",
        "importance_mask",
        "kl_coef",
        "kl_estimator",
        "learning_rate",
        "loss",
        "loss_options",
        "minibatches",
        "minimum_factor",
        "schedule",
        "sequence_mask",
        "total_steps",
        "vllm",
        "warmup_steps",
        "weight_decay",
    ]
)
"""Settings of the learner that are RL's: the others say what learns, where, and in which numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneData:
    """Rows of a run."""

    training: list[TuningRow]
    validation: list[TuningRow]
    left_out: Counter[str]
    digest: str
    """Digest of the files: a run goes on with the same."""

    def steps(self, settings: TuneSettings) -> int:
        """Updates of the whole run."""
        return settings.epochs * -(-len(self.training) // settings.batch)


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneResult:
    """Result of a run."""

    policy: Path
    step: int
    """Update whose weights these are."""
    loss: float | None
    """Its validation loss; None = nothing was held out."""


def make_renderer(recipe: Recipe, model: str) -> PolicyRenderer:
    """The renderer that the gateway of a run of this recipe has."""
    policy = recipe.policy
    return PolicyRenderer(
        model,
        policy.renderer,
        name=policy.name,
        template_kwargs=policy.chat_template_kwargs,
        chat_template=own_template(policy.name, policy, recipe.folder),
    )


def read_data(settings: TuneSettings, renderer: PolicyRenderer) -> TuneData:
    """Read and render the rows. Raises ConfigError where there are none."""
    method = settings.method
    file = find_file(settings.data, method)
    read = read_rows(file, method, renderer, settings.max_tokens)
    digest = hashlib.blake2b(file.read_bytes(), digest_size=16)
    held_out, rows, left_out = Rows(), list(read.rows), read.left_out
    aside = settings.data / "validation" / f"{method}.jsonl"
    if isinstance(settings.validation, Path):
        aside = find_file(settings.validation, method)
    if isinstance(settings.validation, float):
        random.Random(settings.seed).shuffle(rows)  # noqa: S311 - a split, not secrets
        count = max(1, round(settings.validation * len(rows)))
        held_out.rows[:], rows = rows[:count], rows[count:]
    elif aside.is_file():
        held_out = read_rows(aside, method, renderer, settings.max_tokens)
        digest.update(aside.read_bytes())
    if not rows:
        why = "; ".join(f"{count} × {reason}" for reason, count in left_out.most_common(3)) or "the file is empty"
        raise ConfigError(f"{str(file)!r} has no row to tune on: {why}; make rows with `lightningrl curate`")
    return TuneData(
        training=arrange(rows, settings),
        validation=arrange(held_out.rows, settings),
        left_out=left_out + held_out.left_out,
        digest=digest.hexdigest(),
    )


def build_backend(
    recipe: Recipe, plugins: PluginManager, model: str, settings: TuneSettings, data: TuneData
) -> Backend:
    """The recipe's trainer backend with the settings of `[tune]` in place of RL's. Raises ConfigError, before weights
    are read, where this machine has less memory than learning from these rows surely needs."""
    plugin: Plugin = plugins.find("lightningrl_trainers", recipe.backend)
    options = {name: value for name, value in recipe.backend_options.items() if name not in _OF_RL}
    tuner = replace(plugin, factory=plugin.tuner or plugin.factory)
    taken, steps = inspect.signature(tuner.factory).parameters, data.steps(settings)
    wanted = {
        "loss": "reinforce",
        "learning_rate": settings.rate(adapters=bool(options.get("lora"))),
        "warmup_steps": round(settings.warmup * steps),
        "total_steps": steps + 1,
        "schedule": "linear",
        "weight_decay": settings.weight_decay,
        "seed": settings.seed,
    }
    options |= {"policy": model} | {key: value for key, value in wanted.items() if key in taken}
    lengths = sorted(row.row.tokens for row in data.training)
    longest = max(row.row.longest for row in data.training)
    check_tuning_memory(
        recipe.policy.name, tuner.factory, options, longest=longest, batch=sum(lengths[-settings.batch :])
    )
    backend: Backend = tuner.build(name=recipe.policy.name, **options)
    return backend


def tune_policy(
    recipe: Recipe,
    folder: RunFolder,
    backend: Backend,
    data: TuneData,
    settings: TuneSettings,
    renderer: PolicyRenderer,
    show: Callable[[int, int, Mapping[str, float]], None],
) -> TuneResult:
    """Take all updates, from the newest checkpoint on, and write the tuned policy: the best by validation, else the
    last. `show` gets each update's number, of how many, and its metrics. Raises LightningError."""
    name, steps = recipe.policy.name, data.steps(settings)
    _keep_rows(folder, data)
    longest = backend.engine.info.context_length
    for row in (*data.training, *data.validation):
        if row.row.longest > longest:
            raise ConfigError(
                f"a row has {row.row.longest} tokens and policy {name!r} reads {longest}; leave such rows out with "
                f"--set tune.max_tokens={longest}"
            )
    tuner = Tuner(backend, settings, policy=name)
    place = folder.path / "tune"
    # of the starting weights, so before any checkpoint is loaded
    reference = tuner.keep_reference(data.training, place / "reference.npy")
    held_reference = (
        tuner.keep_reference(data.validation, place / "reference_validation.npy") if data.validation else None
    )
    saved = folder.latest()
    first, seconds = 0, 0.0
    if saved is not None:
        load_backend(backend, saved.folder, name)
        first, seconds = saved.state.step, saved.state.seconds
    began, log = time.monotonic() - seconds, JsonlLogger(folder.metrics, resume_after=first)

    def finish(step: int, metrics: dict[str, float]) -> None:
        is_saved = step % settings.checkpoint_every == 0 or step == steps
        if data.validation and (is_saved or step == 0):
            metrics |= tuner.validate(data.validation, held_reference)
        elapsed = time.monotonic() - began
        log.log(step, {**metrics, "minutes": elapsed / 60})
        if is_saved and step:
            loss = metrics.get("validation/loss")
            _save(folder, backend, name, step, elapsed, None if loss is None else -loss)
        show(step, steps, metrics)

    try:
        if first == 0:
            finish(0, {})
        for step in range(first, steps):
            numbers = order_of(len(data.training), settings, step)
            rows = [data.training[number] for number in numbers]
            finish(step + 1, tuner.update(rows, None if reference is None else reference[numbers]))
    finally:
        log.close()
    return _write_policy(recipe, folder, backend, renderer)


def _save(folder: RunFolder, backend: Backend, name: str, step: int, seconds: float, score: float | None) -> None:
    scratch = folder.new_checkpoint(step)
    (scratch / "policies").mkdir()
    backend.save(scratch / "policies" / name)
    folder.commit_checkpoint(scratch, LoopState(step=step, seconds=seconds, rollouts=0, score=score), keep=1)


def _keep_rows(folder: RunFolder, data: TuneData) -> None:
    """Keep which rows the run is of. Raises RunFolderError where it began with others."""
    path = folder.path / "tune" / "rows.json"
    if path.is_file():
        before: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if before["digest"] != data.digest:
            raise RunFolderError(f"run {str(folder.path)!r} began with other rows; give it those, or start a new run")
        return
    summary = {
        "digest": data.digest,
        "training": len(data.training),
        "validation": len(data.validation),
        "left_out": dict(data.left_out),
    }
    write_durably(path, json.dumps(summary, indent=2) + "\n")


def _write_policy(recipe: Recipe, folder: RunFolder, backend: Backend, renderer: PolicyRenderer) -> TuneResult:
    name, target = recipe.policy.name, folder.path / "policy"
    chosen = find_checkpoint(folder.path)
    load_backend(backend, chosen.folder, name)
    with folder.making("policy"), whole_folder(target) as scratch:
        backend.export(scratch)
        name_stops(scratch, renderer.stop_token_ids)
        template = own_template(name, recipe.policy, recipe.folder)
        fix_template(scratch, template, recipe.policy.chat_template_kwargs)
        set_sampling(scratch, recipe.sampling.settings())
        open_to_readers(scratch)
    score = chosen.state.score
    return TuneResult(policy=target, step=chosen.state.step, loss=None if score is None else -score)
