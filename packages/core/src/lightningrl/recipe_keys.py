"""Keys of a recipe: the dotted form of one, the settings that a part takes, and advice on a key that nobody knows."""

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

from lightningrl.errors import ConfigError
from lightningrl.recipe import Recipe
from lightningrl.sanitize import DEEPEST, is_deeper

__all__ = ["ELSEWHERE", "LEARNER", "all_keys", "check_options", "key_hint", "key_parts", "parse_toml", "recipe_path"]

LONG_KEY: Final = re.compile(r"""(?:(?<![\w-])(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+)""" f"{{{DEEPEST}}}")
"""A dotted key that would be nested deeper than anything here, which takes the parser seconds."""
_NAMES: Final = tomllib.loads(Path(__file__).with_name("names_elsewhere.toml").read_text(encoding="utf-8"))
ELSEWHERE: Final = {name: key for key, names in _NAMES.items() for name in names.split()}
"""Our keys by the names that TRL, verl and others have for them."""
LEARNER: Final = frozenset(
    {"betas", "clip_high", "clip_low", "context_length", "device", "epochs", "gradient_checkpointing", "weight_decay"}
    | {"dtype", "kl_coef", "learning_rate", "lora", "loss", "max_grad_norm", "minibatches", "schedule", "warmup_steps"}
)
"""Settings that a trainer backend usually takes."""


def recipe_path(path: Path) -> Path:
    """The file that a recipe's name means: a folder's `recipe.toml`."""
    return path / "recipe.toml" if path.is_dir() else path


def parse_toml(text: str) -> dict[str, Any]:
    """Raises TOMLDecodeError, also for what is nested deeper than anything in a recipe."""
    try:
        if LONG_KEY.search(text) is None and not is_deeper(data := tomllib.loads(text), DEEPEST):
            return data
    except RecursionError:
        pass
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:  # Python's own limit
        raise tomllib.TOMLDecodeError("it has a whole number of thousands of digits") from None
    raise tomllib.TOMLDecodeError(f"it is nested deeper than {DEEPEST} levels")


def key_parts(key: str) -> list[str]:
    """Split a dotted key; a part that holds a dot stands in quotes, as in TOML: `policies."qwen2.5".model`."""
    if '"' not in key and "'" not in key:
        return key.split(".")
    try:
        table = parse_toml(f"{key} = 0")
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
        raise ConfigError(*(f"{what} has no setting {name!r}; {key_hint(name, taken, all_keys())}" for name in unknown))


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


@cache
def all_keys() -> tuple[str, ...]:
    """Every key that has its place in a recipe, with its tables."""
    return tuple(_keys_of(Recipe, ""))


def _keys_of(model: type[pydantic.BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        if inspect.isclass(field.annotation) and issubclass(field.annotation, pydantic.BaseModel):
            yield from _keys_of(field.annotation, f"{prefix}{name}.")
        elif name != "folder":
            yield f"{prefix}{name}"
