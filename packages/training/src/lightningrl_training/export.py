"""Exports a policy as a transformers folder that names where it stops: every token at which the run's answers ended.

the starting model's own (generation_config.json, config.json)  +  those of the run's renderer  ─►
generation_config.json
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightningrl.errors import ConfigError, LightningError, RunFolderError
from lightningrl.plugins import load_plugins
from lightningrl_server.rendering.renderer import PolicyRenderer
from lightningrl_training import policies
from lightningrl_training.build import build_backends
from lightningrl_training.checkpoints import find_checkpoint
from lightningrl_viewer.reading.origin import RunOrigin

__all__ = ["export_policy", "name_stops", "open_to_readers", "stop_tokens"]

CARRIED = ("bos_token_id", "pad_token_id")
"""Tokens taken from the model's configuration where it had no generation configuration, whose readers ask it alone."""


def export_policy(
    run: Path, origin: RunOrigin, target: Path, *, policy: str | None, step: str | int | None, dtype: str | None
) -> int:
    """Write a trained policy's weights of a run's checkpoint to `target`, as `Run.export` says. Returns the step that
    they are of. Raises ConfigError or RunFolderError."""
    recipe, name = origin.recipe, policy or origin.recipe.policy.name
    trained = [each for each, config in recipe.all_policies.items() if config.trainable]
    if name not in trained:
        raise ConfigError(f"no policy {name!r} is trained in run {str(run)!r}; choose one of: {', '.join(trained)}")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise RunFolderError(f"folder {str(target)!r} is not empty; give another")
    rights = target.stat().st_mode if target.exists() else None
    find_checkpoint(run, step)
    stops = stop_tokens(origin.models[name], recipe.all_policies[name].renderer, name=name)
    backend = build_backends(recipe, load_plugins(), origin.models, will_run=False)[name]()
    try:
        while True:
            saved = find_checkpoint(run, step)
            try:
                policies.load_backend(backend, saved.folder, name)
                break
            except (OSError, LightningError):
                if saved.folder.exists():  # else the run has made newer ones meanwhile, and this one went
                    raise
        backend.export(target, dtype=dtype)
        name_stops(target, stops)
        open_to_readers(target)
        if rights is not None:
            target.chmod(rights)
    finally:
        backend.close()
    return saved.state.step


def open_to_readers(folder: Path) -> None:
    """The same rights for every file: some libraries write weights for their owner alone."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def stop_tokens(model: str, renderer: str, *, name: str) -> tuple[int, ...]:
    """Tokens that end an answer of a run's policy, beside those that the model names itself. Raises ConfigError."""
    return PolicyRenderer(model, renderer, name=name).stop_token_ids


def name_stops(folder: Path, stop_token_ids: Sequence[int]) -> None:
    """Add tokens to the end-of-text tokens of a transformers folder's generation configuration. Stop strings of calls
    are the agent's, who goes on sending them."""
    config, path = _read(folder / "config.json"), folder / "generation_config.json"
    generation = _read(path) or {name: config[name] for name in CARRIED if config.get(name) is not None}
    stops = list(dict.fromkeys([*_ids(generation), *_ids(config), *stop_token_ids]))
    if not stops or stops == _ids(generation):
        return
    generation.pop("_from_model_config", None)  # by which transformers would make it anew from the model's
    generation["eos_token_id"] = stops if len(stops) > 1 else stops[0]
    path.write_text(json.dumps(generation, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _ids(config: dict[str, Any]) -> list[int]:
    ids = config.get("eos_token_id")
    return [ids] if isinstance(ids, int) else list(ids or ())


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
