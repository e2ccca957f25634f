"""An exported folder, told where its policy stops: at every token at which the run's own answers ended.

the starting model's own (generation_config.json, config.json)  +  those of the run's renderer  ─►  generation_config.json
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightningrl_server.rendering.renderer import PolicyRenderer

__all__ = ["name_stops", "stop_tokens"]

KEPT = ("bos_token_id", "pad_token_id")
"""Of the model's configuration, where it had no generation configuration: a reader of one asks the other for nothing."""


def stop_tokens(model: str, renderer: str, *, name: str) -> tuple[int, ...]:
    """Tokens that end an answer of a run's policy, beside those that the model names itself. Raises ConfigError."""
    return PolicyRenderer(model, renderer, name=name).stop_token_ids


def name_stops(folder: Path, stop_token_ids: Sequence[int]) -> None:
    """Add them to the end-of-text tokens of a transformers folder's generation configuration. Stop strings of an agent's calls are the
    agent's, who goes on sending them."""
    config, path = _read(folder / "config.json"), folder / "generation_config.json"
    generation = _read(path) or {name: config[name] for name in KEPT if config.get(name) is not None}
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
