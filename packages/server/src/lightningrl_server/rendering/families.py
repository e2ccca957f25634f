"""A policy's renderer: its model family's own, from the `renderers` library, or the default, by its chat template."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from lightningrl.errors import ConfigError
from lightningrl_server.rendering.markups import Markup, find_markup
from lightningrl_server.rendering.templates import check_template_kwargs

__all__ = [
    "check_renderer",
    "create_renderer",
    "markup_of",
    "refuse_images",
    "renderers_that_fit",
    "resolve_config",
    "template_of",
]


def template_of(tokenizer: Any) -> str:
    """Text of a tokenizer's templates; empty where it has none."""
    saved = getattr(tokenizer, "chat_template", None) or ""
    return "\n".join(saved.values()) if isinstance(saved, Mapping) else str(saved)


def resolve_config(tokenizer: Any, name: str, wanted: Any, kwargs: Mapping[str, Any], markup: Markup | None) -> Any:
    """A typed config of the `renderers` library; that of a policy's own template reads its `markup`. Its own automatic
    choice would load the model's config, and torch with it."""
    models: Any = import_module("renderers.base").MODEL_RENDERER_MAP
    configs: Any = import_module("renderers.configs")
    if not isinstance(wanted, str):
        return wanted
    source = str(getattr(tokenizer, "name_or_path", "") or name)
    kind = models.get(source, "default") if wanted == "auto" else wanted
    if kind == "default":
        if wanted == "auto":
            refuse_images(source, name)
        added = tokenizer.get_added_vocab()
        reasoning = "think" if "<think>" in added and "</think>" in added else None
        return configs.DefaultRendererConfig(tool_parser=markup and markup.library, reasoning_parser=reasoning)
    check_renderer(kind, name)
    config = type(configs.config_from_name(kind))
    check_template_kwargs(kwargs, config.template_field_names(), f"the renderer {kind!r} of policy {name!r}")
    try:
        # A growing history keeps its earlier reasoning, so that it stays a prefix.
        return config(thinking_retention="all", **kwargs)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"renderer {kind!r} of policy {name!r}: {' '.join(str(error).split())}") from error


def markup_of(source: str, template: str, added: Collection[str]) -> Markup | None:
    """The tool-call markup of a model, a folder or a hub name, by its chat template and its configuration."""
    return find_markup(template, added, str(_config(source).get("model_type", "")))


def _config(source: str) -> dict[str, Any]:
    """A model's configuration, of a folder or of this machine's cache; empty where there is none."""
    path: Path | str | None = Path(source) / "config.json"
    if not Path(source).is_dir():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            cached = try_to_load_from_cache(source, "config.json")
        except HFValidationError:
            return {}
        path = cached if isinstance(cached, str) else None
    if path is None or not Path(path).is_file():
        return {}
    return dict(json.loads(Path(path).read_text(encoding="utf-8")))


def check_renderer(wanted: str, policy: str) -> None:
    """Raise ConfigError, with all names, for one that is no renderer's."""
    if wanted not in ("auto", "default") and wanted not in (families := _families()):
        raise ConfigError(f"policy {policy!r}: no renderer {wanted!r}; there are auto, default, {', '.join(families)}")


def create_renderer(tokenizer: Any, config: Any, name: str) -> Any:
    """The library's renderer for a policy's tokenizer. Raises ConfigError, with those that fit, where it does not."""
    try:
        return import_module("renderers.base").create_renderer(tokenizer, config)
    except Exception as error:  # (each of them has its own)
        fitting = _fitting(tokenizer)
        there = f"those that fit are {', '.join(fitting)}" if fitting else "none of the others fits; leave it at 'auto'"
        raise ConfigError(
            f"renderer {config.name!r} does not fit the tokenizer of policy {name!r}: {error}; {there}"
        ) from error


def renderers_that_fit(tokenizer: Any) -> str:
    """Advice on a policy whose tool calls nobody can read; empty where no renderer fits it."""
    fitting = _fitting(tokenizer)
    there = f"those that fit its tokenizer are {', '.join(fitting)}"
    return f", or its renderer to the family that it was trained in; {there}" if fitting else ""


def refuse_images(source: str, policy: str) -> None:
    """Raise ConfigError for a model of unknown family that reads images."""
    path = Path(source) / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if any(config.get(key) is not None for key in ("vision_config", "vision_tower", "image_token_id")):
        raise ConfigError(f"policy {policy!r} reads images and no renderer is known for it; name one in the recipe")


def _families() -> tuple[str, ...]:
    """Names of the renderers of one model family each."""
    models: Mapping[str, str] = import_module("renderers.base").MODEL_RENDERER_MAP
    return tuple(sorted(set(models.values())))


def _fitting(tokenizer: Any) -> tuple[str, ...]:
    """Names of those whose tokens this tokenizer has."""
    base, configs = import_module("renderers.base"), import_module("renderers.configs")
    fitting: list[str] = []
    for name in _families():
        if name == "gpt-oss" and "<|channel|>" not in tokenizer.all_special_tokens:
            continue  # this one would fetch its vocabulary to tell
        with suppress(Exception):  # whatever a renderer raises: it does not fit
            base.create_renderer(tokenizer, configs.config_from_name(name))
            fitting.append(name)
    return tuple(fitting)
