"""Reads a recipe: from a TOML or Python file, with settings by dotted key, and a sentence for each key that is wrong.

recipe.toml | recipe.py (`recipe = Recipe(...)`)  +  `--set key=value`  ─►  Recipe
"""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pydantic
from pydantic_core import ErrorDetails

from lightningrl.errors import ConfigError
from lightningrl.loading import run_recipe_file
from lightningrl.recipe import Recipe
from lightningrl.recipe_keys import ELSEWHERE, LEARNER, all_keys, key_hint, key_parts, parse_toml, recipe_path
from lightningrl.sanitize import DEEPEST, decode_text

__all__ = ["load_recipe", "parse_setting", "read_recipe", "with_settings"]

MISSING: Final[Mapping[str, str]] = {
    "agent": 'name the function that is called with a task\'s input: agent = "agent.py:answer"',
    "policy": 'say which model is trained: [policy] model = "Qwen/Qwen2.5-0.5B-Instruct"',
    "policy.model": 'say which model is trained, a hub name or a folder: model = "Qwen/Qwen2.5-0.5B-Instruct"',
    "rewards": 'say what is good: [rewards.right] use = "reward.py:right", a function of (task, output, trajectory)',
    "tasks": 'say where tasks come from: [tasks] train = "data.jsonl", or a function that returns them: train = '
    '"data.py:train_tasks"',
    "tasks.train": 'name a file of tasks: train = "data.jsonl", or the function that returns them: train = '
    '"data.py:train_tasks"',
}
"""The remedy for a missing key."""


def load_recipe(path: Path, settings: Mapping[str, Any] | None = None) -> Recipe:
    """Read a `.toml` or `.py` recipe, with `settings` by dotted key. Raises ConfigError with file, key and remedy."""
    return _refuse_wrong(*read_recipe(path, settings or {}))


def with_settings(recipe: Recipe, settings: Mapping[str, Any]) -> Recipe:
    """A recipe with dotted keys replaced: `{"loop.steps": 5}`. Raises ConfigError."""
    return _refuse_wrong(*_set(recipe, settings))


def read_recipe(source: Path | Recipe, settings: Mapping[str, Any]) -> tuple[Recipe, list[str]]:
    """The recipe less its wrong keys, and a sentence for each. Raises ConfigError where what is left is no recipe."""
    recipe, wrong = (source, []) if isinstance(source, Recipe) else _read(source)
    if not settings:
        return recipe, wrong
    try:
        recipe, more = _set(recipe, settings)
    except ConfigError as error:
        raise ConfigError(*wrong, *error.args) from None
    return recipe, [*wrong, *more]


def parse_setting(text: str) -> tuple[str, Any]:
    """`"loop.steps=5"` → `("loop.steps", 5)`; a value that is neither TOML nor Python's true or false is a text."""
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise ConfigError(f"setting {text!r} is not KEY=VALUE; write for example --set loop.steps=20")
    try:
        return key.strip(), parse_toml(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), {"True": True, "False": False}.get(value.strip(), value)


def _refuse_wrong(recipe: Recipe, wrong: Sequence[str]) -> Recipe:
    if wrong:
        raise ConfigError(*wrong)
    return recipe


def _read(path: Path) -> tuple[Recipe, list[str]]:
    path, wrong = recipe_path(path), list[str]()
    if not path.is_file():
        raise ConfigError(f"no recipe at {str(path)!r}; give a .toml or .py file, or a folder with a recipe.toml")
    if path.suffix == ".py":
        recipe = getattr(run_recipe_file(path), "recipe", None)
        if not isinstance(recipe, Recipe):
            raise ConfigError(f"recipe {str(path)!r} defines no `recipe = Recipe(...)`")
    elif path.suffix == ".toml":
        try:
            data = parse_toml(decode_text(path.read_bytes()).replace("\r\n", "\n"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"recipe {str(path)!r} is not valid TOML: {error}") from error
        recipe, wrong = _validate(data, str(path))
    else:
        raise ConfigError(f"recipe {str(path)!r} ends in {path.suffix!r}; a recipe is a .toml or .py file")
    return recipe.model_copy(update={"folder": path.resolve().parent}), wrong


def _set(recipe: Recipe, settings: Mapping[str, Any]) -> tuple[Recipe, list[str]]:
    data = _written_values(recipe)
    for key, value in settings.items():
        if len(parts := key_parts(key)) > DEEPEST:
            deepest = f"no key of a recipe is nested deeper than {DEEPEST} levels"
            raise ConfigError(f"setting {key[:40]!r}… has {len(parts)} parts; {deepest}")
        table = data
        for part in parts[:-1]:
            below = table.get(part, {})
            if not isinstance(below, dict):
                raise ConfigError(f"setting {key!r}: {part!r} is a value, not a table; see `lightningrl train --help`")
            table[part] = dict(below)  # a table of options is the recipe's own, which stays as it is
            table = table[part]
        table[parts[-1]] = value
    return _validate(data, "--set")


def _written_values(model: pydantic.BaseModel) -> dict[str, Any]:
    """Only what was set, objects kept as they are, so that it can be validated again."""
    values: dict[str, Any] = {}
    for name in model.model_fields_set:
        value = getattr(model, name)
        if isinstance(value, pydantic.BaseModel):
            value = _written_values(value)
        elif isinstance(value, dict):
            models = {key: _written_values(item) for key, item in value.items() if isinstance(item, pydantic.BaseModel)}
            value = {**value, **models}
        values[name] = value
    return values


def _validate(data: Mapping[str, Any], source: str) -> tuple[Recipe, list[str]]:
    """The recipe less its wrong keys, and a sentence for each. Raises ConfigError where what is left is none."""
    try:
        return Recipe.model_validate(data), []
    except pydantic.ValidationError as error:
        wrong = error.errors()
    slips = _learner_slips(data)
    sentences = [*map(_sentence, wrong), *slips.values()]
    left: dict[str, Any] = _without(_copy_tables(data), wrong)
    if slips:
        left["learner"] = {name: value for name, value in left["learner"].items() if name not in slips}
    try:
        recipe = Recipe.model_validate(left)
    except pydantic.ValidationError as error:  # keys that are right by themselves do not fit together
        sentences += [_sentence(problem) for problem in error.errors() if problem["type"] == "value_error"]
        recipe = None
    sentences = [f"{source}: {sentence}" for sentence in dict.fromkeys(sentences)]
    if recipe is None:
        raise ConfigError(*sentences)
    return recipe, sentences


def _copy_tables(data: Any) -> Any:
    """Copies of tables; values are the same."""
    return {name: _copy_tables(value) for name, value in data.items()} if isinstance(data, dict) else data


def _without(data: dict[str, Any], wrong: Sequence[ErrorDetails]) -> dict[str, Any]:
    """Less the values that are wrong, and tables that nobody knows. Others stay, and so does what is wrong with them:
    what stands in a table may be what the rest of the recipe speaks of."""
    for error in wrong:
        table, is_unknown = data, error["type"] == "extra_forbidden"
        for depth, part in enumerate(error["loc"], start=1):
            below = table.get(str(part))
            if not isinstance(below, dict) or (is_unknown and depth == len(error["loc"])):
                table.pop(str(part), None)
                break
            table = below
    return data


def _sentence(error: ErrorDetails) -> str:
    """The problem, and what to write."""
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        hint = key_hint(str(error["loc"][-1]), _table_keys(error["loc"][:-1]), all_keys())
        return f"unknown key {key!r}; {hint}"
    if error["type"] == "value_error":
        return f"{key}: {error['ctx']['error']}" if key else str(error["ctx"]["error"])
    if error["type"] in {"missing", "too_short"}:
        return f"{key!r} is missing; {MISSING.get(key, 'add it')}"
    got = "" if isinstance(error["input"], dict | list) else f", got {error['input']!r}"
    wanted = "write true or false" if error["type"].startswith("bool") else error["msg"]
    return f"{key!r}: {wanted}{got}"[:400]


def _learner_slips(data: Mapping[str, Any]) -> dict[str, str]:
    """Settings of the learner that surely are another name's, with a sentence for each. Only a backend knows all of its
    own, and it is not asked where nothing is left of a recipe."""
    learner = data.get("learner")
    names = learner if isinstance(learner, Mapping) else ()
    slips = [name for name in names if name in ELSEWHERE and name not in LEARNER]
    return {name: f"unknown key {f'learner.{name}'!r}; {key_hint(name, sorted(LEARNER), all_keys())}" for name in slips}


def _table_keys(location: Sequence[int | str]) -> list[str]:
    """Field names of the table at `location`, for the hint."""
    model: Any = Recipe
    for part in location:
        if isinstance(part, int):  # one of a list of tables
            continue
        if not (inspect.isclass(model) and issubclass(model, pydantic.BaseModel)) or part not in model.model_fields:
            break
        annotation = model.model_fields[str(part)].annotation
        arguments = [argument for argument in getattr(annotation, "__args__", ()) if inspect.isclass(argument)]
        model = arguments[-1] if arguments else annotation
    return list(model.model_fields) if inspect.isclass(model) and issubclass(model, pydantic.BaseModel) else []
