"""Reads a recipe: from a TOML or Python file, with settings by dotted key, and a sentence for each key that is wrong.

recipe.toml | recipe.py (`recipe = Recipe(...)`)  +  `--set key=value`  ─►  Recipe
"""

from __future__ import annotations

import difflib
import inspect
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import pydantic
from pydantic_core import ErrorDetails

from lightningrl.errors import ConfigError
from lightningrl.loading import run_recipe_file
from lightningrl.recipe import Recipe
from lightningrl.sanitize import DEEPEST, is_deeper

__all__ = [
    "check_options",
    "key_hint",
    "key_parts",
    "load_recipe",
    "parse_setting",
    "read_recipe",
    "recipe_path",
    "with_settings",
]

LONG_KEY: Final = re.compile(r"""(?:(?<![\w-])(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+)""" f"{{{DEEPEST}}}")
"""A dotted key that would be nested deeper than anything here, which takes the parser seconds."""
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
ELSEWHERE: Final[Mapping[str, str]] = {
    "adam_beta1": "learner.betas",
    "adam_beta2": "learner.betas",
    "ahead": "loop.max_staleness",
    "base_model": "policy.model",
    "batch_size": "loop.tasks_per_step",
    "beta": "learner.kl_coef",
    "bf16": "learner.dtype",
    "clip_range": "learner.clip_low",
    "cliprange": "learner.clip_low",
    "cliprange_value": "learner.critic.clip",
    "ent_coef": "learner.entropy_coef",
    "entropy_coeff": "learner.entropy_coef",
    "epsilon": "learner.clip_low",
    "epsilon_high": "learner.clip_high",
    "eval_steps": "validation.every",
    "fp16": "learner.dtype",
    "kl_beta": "learner.kl_coef",
    "loss_type": "samples.aggregation",
    "lr": "learner.learning_rate",
    "lr_scheduler_type": "learner.schedule",
    "max_failed": "outcomes.max_failed_rewards",
    "max_completion_length": "sampling.max_tokens",
    "max_new_tokens": "sampling.max_tokens",
    "max_steps": "loop.steps",
    "mini_batch_size": "learner.minibatches",
    "model_name": "policy.model",
    "model_name_or_path": "policy.model",
    "num_epochs": "loop.steps",
    "num_generations": "loop.group_size",
    "num_iterations": "learner.epochs",
    "num_rollouts": "loop.group_size",
    "num_train_epochs": "loop.steps",
    "num_workers": "runtime.workers",
    "per_device_train_batch_size": "loop.tasks_per_step",
    "ppo_epochs": "learner.epochs",
    "report_to": "loggers",
    "reward_funcs": "rewards",
    "rollouts_per_task": "loop.group_size",
    "save_steps": "loop.checkpoint_every",
    "save_total_limit": "loop.keep_checkpoints",
    "scale_rewards": "credit.use",
    "train_batch_size": "loop.tasks_per_step",
    "vf_coef": "learner.critic.coefficient",
    "warmup_ratio": "learner.warmup_steps",
}
"""Names that TRL, verl and others use, and the key that says the same here."""
LEARNER: Final = frozenset(
    {"betas", "clip_high", "clip_low", "context_length", "device", "dtype", "epochs", "gradient_checkpointing"}
    | {"kl_coef", "learning_rate", "lora", "loss", "max_grad_norm", "minibatches", "schedule", "warmup_steps"}
    | {"weight_decay"}
)
"""Settings that a trainer backend usually takes."""


def recipe_path(path: Path) -> Path:
    """The file that a recipe's name means: a folder's `recipe.toml`."""
    return path / "recipe.toml" if path.is_dir() else path


def load_recipe(path: Path, settings: Mapping[str, Any] | None = None) -> Recipe:
    """Read a `.toml` or `.py` recipe, with `settings` by dotted key. Raises ConfigError with file, key and remedy."""
    return _refuse_wrong(*read_recipe(path, settings or {}))


def with_settings(recipe: Recipe, settings: Mapping[str, Any]) -> Recipe:
    """A recipe with dotted keys replaced: `{"loop.steps": 5}`. Raises ConfigError."""
    return _refuse_wrong(*_set(recipe, settings))


def read_recipe(source: Path | Recipe, settings: Mapping[str, Any]) -> tuple[Recipe, list[str]]:
    """The recipe less the keys that are wrong, and a sentence for each: what else is wrong can be looked for. Raises
    ConfigError where what is left is no recipe."""
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
        return key.strip(), _parse_toml(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), {"True": True, "False": False}.get(value.strip(), value)


def key_parts(key: str) -> list[str]:
    """Split a dotted key; a part that holds a dot stands in quotes, as in TOML: `policies."qwen2.5".model`."""
    if '"' not in key and "'" not in key:
        return key.split(".")
    try:
        table = _parse_toml(f"{key} = 0")
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"setting {key!r} is no dotted key ({error}); quote the part that holds a dot") from None
    parts: list[str] = []
    while isinstance(table, dict):
        (part,) = table
        parts.append(part)
        table = table[part]
    return parts


def check_options(
    factory: Callable[..., Any], options: Mapping[str, Any], *, what: str, reserved: Sequence[str] = ()
) -> None:
    """Raise ConfigError with those of `options` that `factory` does not take: a setting nobody consumes is an error."""
    parameters = inspect.signature(factory).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    taken = [name for name, parameter in parameters.items() if name not in reserved and parameter.kind in kinds]
    if unknown := [name for name in options if name not in taken]:
        raise ConfigError(
            *(f"{what} has no setting {name!r}; {key_hint(name, taken, _all_keys())}" for name in unknown)
        )


def key_hint(name: str, keys: Sequence[str], elsewhere: Iterable[str] = ()) -> str:
    """Advice on a name that is none of `keys`, a table's own; `elsewhere`: dotted keys of other tables."""
    there = ELSEWHERE.get(name)
    if there is not None and there.rpartition(".")[2] in keys:
        return f"did you mean {there.rpartition('.')[2]!r}?"
    if there is None and name in LEARNER and name not in keys:
        there = f"learner.{name}"
    if there is None:
        there = min((key for key in elsewhere if key.rpartition(".")[2] == name), key=len, default=None)
    if there is not None:
        table = there.rpartition(".")[0]
        return f"here it is {there!r}" + (f", which belongs in [{table}]" if table else "")
    guess = difflib.get_close_matches(name, keys, n=1)
    return f"did you mean {guess[0]!r}?" if guess else f"it takes: {', '.join(sorted(keys)) or 'none'}"


# ------------------------------------------------------------------ files and settings


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
            data = _parse_toml(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"recipe {str(path)!r} is not valid TOML: {error}") from error
        recipe, wrong = _validate(data, str(path))
    else:
        raise ConfigError(f"recipe {str(path)!r} ends in {path.suffix!r}; a recipe is a .toml or .py file")
    return recipe.model_copy(update={"folder": path.resolve().parent}), wrong


def _parse_toml(text: str) -> dict[str, Any]:
    """Raises TOMLDecodeError, also for what is nested deeper than anything in a recipe."""
    try:
        if LONG_KEY.search(text) is None and not is_deeper(data := tomllib.loads(text), DEEPEST):
            return data
    except RecursionError:
        pass
    raise tomllib.TOMLDecodeError(f"it is nested deeper than {DEEPEST} levels")


def _set(recipe: Recipe, settings: Mapping[str, Any]) -> tuple[Recipe, list[str]]:
    data = _written_values(recipe)
    for key, value in settings.items():
        if len(parts := key_parts(key)) > DEEPEST:
            raise ConfigError(
                f"setting {key[:40]!r}… has {len(parts)} parts; no key of a recipe is nested deeper than {DEEPEST} "
                "levels"
            )
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
            value = {
                key: _written_values(item) if isinstance(item, pydantic.BaseModel) else item
                for key, item in value.items()
            }
        values[name] = value
    return values


# ------------------------------------------------------------------ sentences about wrong keys


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
        hint = key_hint(str(error["loc"][-1]), _table_keys(error["loc"][:-1]), _all_keys())
        return f"unknown key {key!r}; {hint}"
    if error["type"] == "value_error":
        return f"{key}: {error['ctx']['error']}" if key else str(error["ctx"]["error"])
    if error["type"] in {"missing", "too_short"}:
        return f"{key!r} is missing; {MISSING.get(key, 'add it')}"
    got = "" if isinstance(error["input"], dict | list) else f", got {error['input']!r}"
    return f"{key!r}: {error['msg']}{got}"[:400]


def _learner_slips(data: Mapping[str, Any]) -> dict[str, str]:
    """Settings of the learner that surely are another name's, with a sentence for each. Only a backend knows all of its
    own, and it is not asked where nothing is left of a recipe."""
    learner = data.get("learner")
    slips = (
        [name for name in learner if name in ELSEWHERE and name not in LEARNER] if isinstance(learner, Mapping) else []
    )
    return {
        name: f"unknown key {f'learner.{name}'!r}; {key_hint(name, sorted(LEARNER), _all_keys())}" for name in slips
    }


@cache
def _all_keys() -> tuple[str, ...]:
    """Every key that has its place in a recipe, with its tables."""
    return tuple(_keys_of(Recipe, ""))


def _keys_of(model: type[pydantic.BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        if inspect.isclass(field.annotation) and issubclass(field.annotation, pydantic.BaseModel):
            yield from _keys_of(field.annotation, f"{prefix}{name}.")
        elif name != "folder":
            yield f"{prefix}{name}"


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
