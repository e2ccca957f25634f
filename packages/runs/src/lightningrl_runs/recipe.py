"""A run's recipe, key by key: the value, whether it is the default, where it is from, who reads it, what it is for.

RunOrigin         (frozen values, settings given) ┬─►  list_recipe_keys ─► RecipeKey…
Recipe's classes  (defaults, docs)                ┘
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Literal

import pydantic

from lightningrl import recipe, recipe_tables
from lightningrl.plugins import PluginManager
from lightningrl.recipe import Recipe
from lightningrl.recipe_keys import key_parts
from lightningrl_runs.origin import flatten

__all__ = ["RecipeKey", "is_within", "list_recipe_keys", "written_keys"]

_READERS: Final[Mapping[str, str]] = {
    "name": "the name of the run's folder",
    "agent": "workers, which call it",
    "adapters": "workers, before the agent is imported",
    "tasks": "the training loop, once at its start",
    "policy": "the server (model, renderer) and the trainer backend",
    "policies": "the server (model, renderer, roles) and the trainer backend",
    "roles": "the gateway, for calls that name no role",
    "upstream": "the gateway, for models that are no policies",
    "telemetry": "the server, for spans that reach it",
    "rewards": "the evaluator, when a rollout has ended",
    "intermediate_rewards": "the evaluator, before the terminal rewards",
    "credit": "the scorer, when a group has been rewarded",
    "judge": "the credit assigner, through the evaluator",
    "samples": "the scorer, when rows are built",
    "sampling": "the gateway, with each call of a training rollout",
    "validation": "the training loop; its sampling by the gateway",
    "outcomes": "the evaluator, for rollouts that did not succeed",
    "runtime": "the launcher of workers; timeout_s and max_attempts by the store's queue, servers by the trainer",
    "store_url": "the server, which keeps the run there; whoever looks reads it in run.json",
    "loop": "the training loop",
    "backend": "the training loop, which builds it",
    "learner": "the trainer backend",
    "backends": "the trainer backend of that name; others leave it unread",
    "loggers": "the training loop, after each step",
    "logger_options": "the logger of that name",
}
"""Readers of a key, by its first part."""
_OF_BACKEND: Final = frozenset({"policy", "name", "seed"})
"""Parameters of a backend's factory that are no settings of a recipe's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeKey:
    """One setting."""

    key: str
    value: Any
    is_default: bool | None
    """None = it has no default: somebody had to say it."""
    origin: Literal["--set", "recipe", "default"]
    reader: str
    """The part of the program that reads it."""
    about: str
    """Purpose of the key; empty where nobody says."""


def list_recipe_keys(
    recipe: Recipe,
    *,
    settings: Collection[str] = (),
    values: Mapping[str, Any] | None = None,
    written: Collection[str] | None = None,
    plugins: PluginManager | None = None,
) -> list[RecipeKey]:
    """List every key, those of the top level first.

    `settings`: given beside the recipe; `values`: as they were frozen; `written`: what the recipe's file sets, None =
    whatever is not the default. With `plugins`, what the trainer backend takes where the recipe says nothing is among
    them.
    """
    defaults, given = dict(_defaults(recipe)), [".".join(key_parts(key)) for key in settings]
    of_backend = {} if plugins is None else _backend_defaults(recipe.backend, plugins)
    frozen = flatten(json.loads(recipe.frozen_text())) if values is None else values
    whole = {**{key: value for key, value in of_backend.items() if key not in frozen}, **frozen}
    rows = []
    for key in sorted(whole, key=lambda key: ("." in key, key)):
        default = defaults.get(key, of_backend.get(key, _NONE))
        is_default = None if default is _NONE else _same(whole[key], default)
        is_written = (not is_default) if written is None else is_within(key, written)
        origin: Literal["--set", "recipe", "default"] = (
            "--set" if is_within(key, given) else "recipe" if is_written else "default"
        )
        about = _about().get(_shape(key), "")
        rows.append(
            RecipeKey(
                key=key,
                value=whole[key],
                is_default=is_default,
                origin=origin,
                reader=_reader(key, recipe),
                about=about,
            )
        )
    return rows


_NONE: Final = object()


def is_within(key: str, keys: Collection[str]) -> bool:
    """True where the key or a table around it is among `keys`."""
    parts = key.split(".")
    return any(".".join(parts[:count]) in keys for count in range(1, len(parts) + 1))


def written_keys(model: pydantic.BaseModel, prefix: str = "") -> Iterator[str]:
    """Yield the keys that a recipe's file sets."""
    for name in model.model_fields_set - {"folder"}:
        yield from _written_below(getattr(model, name), f"{prefix}{name}")


def _written_below(value: Any, key: str) -> Iterator[str]:
    if isinstance(value, pydantic.BaseModel):
        yield from written_keys(value, f"{key}.")
    elif isinstance(value, dict) and value:
        for name, below in value.items():
            yield from _written_below(below, f"{key}.{name}")
    else:
        yield key


def _defaults(model: pydantic.BaseModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the model's keys with their defaults, as JSON has them."""
    for name, field in type(model).model_fields.items():
        value, key = getattr(model, name), f"{prefix}{name}"
        if isinstance(value, pydantic.BaseModel):
            yield from _defaults(value, f"{key}.")
        elif isinstance(value, dict):
            for below, part in value.items():
                if isinstance(part, pydantic.BaseModel):
                    yield from _defaults(part, f"{key}.{below}.")
        elif not field.is_required():
            yield key, field.get_default(call_default_factory=True)
    if isinstance(model, Recipe):  # validation takes from [sampling] what it does not say
        yield from (
            (f"{prefix}validation.sampling.{name}", getattr(model.sampling, name))
            for name in ("top_p", "top_k", "max_tokens")
        )


def _same(value: Any, default: Any) -> bool:
    return bool(value == (list(default) if isinstance(default, tuple) else default))


def _backend_defaults(backend: str, plugins: PluginManager) -> dict[str, Any]:
    """Return the trainer backend's own defaults; empty where it is not installed."""
    if backend not in plugins.trainers:
        return {}
    parameters = inspect.signature(plugins.trainers[backend].factory).parameters.values()
    return {
        f"learner.{parameter.name}": parameter.default
        for parameter in parameters
        if parameter.default is not parameter.empty and parameter.name not in _OF_BACKEND
    }


def _reader(key: str, recipe: Recipe) -> str:
    parts = key.split(".")
    if parts[0] == "rewards" and len(parts) > 3:
        return f"reward {parts[1]!r} ({_use(recipe.rewards, parts[1])})"
    if parts[0] == "intermediate_rewards" and len(parts) > 3:
        return f"intermediate reward {parts[1]!r} ({_use(recipe.intermediate_rewards, parts[1])})"
    if parts[-1] in ("trained_agents", "calls"):
        return "the scorer, when rows are built"
    if parts[:2] == ["credit", "options"]:
        return f"credit assigner {recipe.credit.use!r}"
    if parts[:2] == ["tasks", "options"]:
        return "the functions of tasks.train and tasks.validation"
    if parts[0] == "learner" or (parts[0] == "policy" and parts[1:2] == ["learner"]):
        return f"trainer backend {recipe.backend!r}"
    if parts[0] == "backends" and parts[1:2] != [recipe.backend]:
        return f"nobody: backend {recipe.backend!r} runs"
    if parts[:2] == ["runtime", "launchers"] and parts[2:3] != [recipe.runtime.launcher]:
        return f"nobody: launcher {recipe.runtime.launcher!r} runs"
    return _READERS.get(parts[0], "")


def _use(rewards: Mapping[str, Any], name: str) -> str:
    return str(rewards[name].use) if name in rewards else "unknown"


def _shape(key: str) -> str:
    """`rewards.right.weight` → `rewards.*.weight`."""
    parts = key.split(".")
    if parts[0] in {"rewards", "intermediate_rewards", "policies", "roles"} and len(parts) > 1:
        parts[1] = "*"
    return ".".join(parts)


@cache
def _about() -> dict[str, str]:
    """The sentence under each field of the recipe's classes, by the shape of its key."""
    nodes = [node for module in (recipe, recipe_tables) for node in ast.parse(inspect.getsource(module)).body]
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    sentences = {name: _sentences(node) for name, node in classes.items()}
    about: dict[str, str] = {}

    def add(kind: type[pydantic.BaseModel], prefix: str) -> None:
        texts = {
            name: text for base in reversed(kind.__mro__) for name, text in sentences.get(base.__name__, {}).items()
        }
        for name, field in kind.model_fields.items():
            about[f"{prefix}{name}"] = texts.get(name, "")
            for inner in _models(field.annotation):
                add(inner, f"{prefix}{name}." if not _is_table(field.annotation) else f"{prefix}{name}.*.")

    add(Recipe, "")
    return about


def _sentences(node: ast.ClassDef) -> dict[str, str]:
    return {
        field.target.id: " ".join(str(below.value.value).split())
        for field, below in zip(node.body, node.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
    }


def _models(annotation: Any) -> Iterator[type[pydantic.BaseModel]]:
    if inspect.isclass(annotation) and issubclass(annotation, pydantic.BaseModel):
        yield annotation
    for part in getattr(annotation, "__args__", ()):
        yield from _models(part)


def _is_table(annotation: Any) -> bool:
    return getattr(annotation, "__origin__", None) is dict
