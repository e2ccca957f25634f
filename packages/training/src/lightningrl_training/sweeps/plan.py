"""The plan of a sweep: each combination of values with each seed is a point, and a run folder of the sweep's.

<sweep>/plan.json           recipe, values, seeds, digests of the recipes: written first, in one rename
<sweep>/<point>/            a run folder: lr=1e-4,seed=0
<sweep>/logs/<point>.txt    output of its process
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from lightningrl.errors import ConfigError, RunFolderError
from lightningrl.files import write_durably
from lightningrl.recipe import Recipe
from lightningrl.recipe_keys import recipe_path
from lightningrl.sanitize import printable
from lightningrl_client.recipe_file import load_recipe, parse_setting
from lightningrl_runs.origin import read_object

__all__ = ["PLAN", "Point", "SweepPlan", "default_sweep", "make_plan", "open_plan", "split_values"]

PLAN: Final = "plan.json"
SEED: Final = "loop.seed"
MOST_POINTS: Final = 1_000
_PLACES: Final = ("name", "loggers", "logger_options", "runtime")
"""Tables that change no result: a sweep goes on when they change."""
_PAIRS: Final = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A run of a sweep: one value of each key, and a seed."""

    values: Mapping[str, str]
    """Values that differ between settings, by key, as typed."""
    seed: int

    @property
    def setting(self) -> str:
        """The setting in a line: `learner.learning_rate=1e-4`; empty where the sweep is over seeds alone."""
        return " ".join(f"{key}={value}" for key, value in self.values.items())

    @property
    def name(self) -> str:
        """Name of the run's folder, below the sweep's."""
        parts = [f"{key.rpartition('.')[2]}={value}" for key, value in self.values.items()]
        text = ",".join([*parts, f"seed={self.seed}"])
        safe = re.sub(r"[^\w.,=+-]+", "_", text).lstrip(".-")
        if safe == text and len(safe) <= 120:
            return safe
        return f"{safe[:100]}-{hashlib.sha256(json.dumps(dict(self.values)).encode()).hexdigest()[:8]},seed={self.seed}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepPlan:
    """The runs of a sweep."""

    recipe: Path
    """The recipe's file."""
    axes: Mapping[str, Sequence[str]]
    """Keys with more than one value, and these as typed."""
    seeds: Sequence[int]
    fixed: Mapping[str, str] = field(default_factory=dict[str, str])
    """Keys with one value, which all runs have."""
    digests: Mapping[str, str] = field(default_factory=dict[str, str])
    """Digest of each setting's recipe, by `Point.setting`."""

    @property
    def points(self) -> list[Point]:
        """The runs, seed by seed: each setting has had one before any has a second."""
        settings = [dict(zip(self.axes, values, strict=True)) for values in itertools.product(*self.axes.values())]
        return [Point(values=values, seed=seed) for seed in self.seeds for values in settings]

    @property
    def settings(self) -> list[str]:
        return list(dict.fromkeys(point.setting for point in self.points))

    def texts(self, point: Point) -> list[str]:
        """A point's settings as `--set` takes them."""
        return [f"{key}={value}" for key, value in {**self.fixed, **point.values, SEED: str(point.seed)}.items()]

    def read_recipe(self, point: Point) -> Recipe:
        """The recipe of a point. Raises ConfigError."""
        return load_recipe(self.recipe, dict(map(parse_setting, self.texts(point))))

    def to_json(self) -> str:
        data = {
            "recipe": str(self.recipe),
            "axes": {key: list(values) for key, values in self.axes.items()},
            "seeds": list(self.seeds),
            "fixed": dict(self.fixed),
            "digests": dict(self.digests),
            "points": [point.name for point in self.points],
        }
        return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def split_values(text: str) -> list[str]:
    """Split `1e-5,1e-4` at its commas, but for those in brackets and quotes."""
    values, closing, quote = [""], list[str](), ""
    for character in text:
        if not quote and not closing and character == ",":
            values.append("")
            continue
        values[-1] += character
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in _PAIRS:
            closing.append(_PAIRS[character])
        elif closing and character == closing[-1]:
            closing.pop()
    return [value.strip() for value in values]


def make_plan(source: Path, settings: Sequence[str], *, seeds: int | None) -> SweepPlan:
    """Plan a sweep from its command line, every recipe of it read. Raises ConfigError, a sentence for what is wrong."""
    lists = dict(map(_split_setting, settings))
    given = lists.pop(SEED, None)
    if given is not None and seeds is not None and len(given) > 1:
        raise ConfigError(
            f"--seeds {seeds} and --set {SEED}={','.join(given)} both say which seeds; give one of the two"
        )
    fixed = {key: values[0] for key, values in lists.items() if len(values) == 1}
    axes = {key: values for key, values in lists.items() if len(values) > 1}
    count = (seeds or (len(given) if given else 1)) * _product(axes)
    if count > MOST_POINTS:
        raise ConfigError(
            f"a sweep of {count:,} runs is too large; give fewer values or seeds, {MOST_POINTS:,} runs at most"
        )
    where = recipe_path(source).resolve()
    first = load_recipe(where, dict(map(parse_setting, (f"{key}={value}" for key, value in fixed.items()))))
    plan = SweepPlan(recipe=where, axes=axes, fixed=fixed, seeds=_seeds(given, seeds, first.loop.seed))
    recipes = {point.setting: plan.read_recipe(point) for point in plan.points}
    _check_seed(plan)
    return SweepPlan(
        recipe=where,
        axes=axes,
        seeds=plan.seeds,
        fixed=fixed,
        digests={setting: _digest(recipe) for setting, recipe in recipes.items()},
    )


def open_plan(plan: SweepPlan, folder: Path) -> bool:
    """Write the plan into the sweep's folder, or find it there; true where there was one. Raises RunFolderError where
    the folder holds anything else, or another plan."""
    path = folder / PLAN
    if path.is_file():
        _check_same(read_object(path), json.loads(plan.to_json()), folder)
        return True
    try:
        names = sorted(file.name for file in folder.iterdir()) if folder.is_dir() else []
        if names and set(names) - {".lock", f".{PLAN}.new"}:
            raise RunFolderError(
                f"folder {str(folder)!r} holds {names[-1]!r} and no sweep; a sweep is made in a new or an empty "
                "folder: give another --sweep"
            )
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_durably(path, plan.to_json())
    except OSError as error:
        raise RunFolderError(
            f"sweep folder {str(folder)!r} cannot be written: {error.strerror}; free space or give another --sweep"
        ) from error
    return False


def default_sweep(runs: Path, plan: SweepPlan, name: str) -> Path:
    """The folder that the same command finds again."""
    what = json.dumps([str(plan.recipe), plan.axes, list(plan.seeds), plan.fixed], sort_keys=True)
    return runs / f"{name}-sweep-{hashlib.sha256(what.encode()).hexdigest()[:8]}"


def _split_setting(text: str) -> tuple[str, list[str]]:
    key, value = text.partition("=")[::2]
    parse_setting(text)  # raises where it is no setting
    values = split_values(value)
    if "" in values and len(values) > 1:
        raise ConfigError(
            f"--set {text!r} has an empty value; write for example --set {key}=1,2, without a comma at the end"
        )
    parsed = [json.dumps(parse_setting(f"{key}={value}")[1], default=str) for value in values]
    for index, same in enumerate(parsed):
        if same in parsed[:index]:
            raise ConfigError(f"--set {text!r} has {values[index]!r} twice; more runs of one setting are --seeds")
    return key.strip(), values


def _seeds(given: Sequence[str] | None, seeds: int | None, first: int) -> list[int]:
    try:
        listed = [first] if given is None else [int(value) for value in given]
    except ValueError:
        raise ConfigError(
            f"--set {SEED}={','.join(given or ())}: a seed is a whole number; write --set {SEED}=0,1,2"
        ) from None
    return listed if seeds is None else list(range(listed[0], listed[0] + seeds))


def _product(axes: Mapping[str, Sequence[str]]) -> int:
    count = 1
    for values in axes.values():
        count *= len(values)
    return count


def _check_seed(plan: SweepPlan) -> None:
    """Raise ConfigError where a seed of the recipe's own hides the sweep's."""
    own = plan.read_recipe(plan.points[0]).backend_options.get("seed")
    if len(plan.seeds) > 1 and own != plan.seeds[0]:
        raise ConfigError(
            f"the recipe's learner has a seed of its own, {own!r}, which each run of the sweep would have; remove it: "
            f"{SEED} is the learner's, too"
        )


def _digest(recipe: Recipe) -> str:
    """A digest of what a recipe says, the seed and places aside."""
    data = json.loads(recipe.frozen_text())
    data["loop"].pop("seed")
    for name in _PLACES:
        data.pop(name, None)
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def _check_same(old: Mapping[str, Any], new: Mapping[str, Any], folder: Path) -> None:
    for key, name in (("recipe", "recipe"), ("axes", "values"), ("fixed", "settings"), ("seeds", "seeds")):
        if old.get(key) != new[key]:
            raise RunFolderError(
                f"sweep {str(folder)!r} has another {name}: {printable(str(old.get(key)))[:200]}; give it that, or "
                "start a new one: --sweep FOLDER"
            )
    if old.get("digests") != new["digests"]:
        raise RunFolderError(
            f"the recipe has changed since sweep {str(folder)!r} started, and its runs would not be alike; restore it, "
            "or start a new one: --sweep FOLDER"
        )
