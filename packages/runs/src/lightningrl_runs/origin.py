"""The origin of a run, read wherever it lies now: what it was started with, and the settings of each `--resume` since.

<run>/recipe.json   the frozen recipe
<run>/run.json      {"source", "folder", "run", "models": {policy: place}, "files": {policy: origin}, "settings",
                     "store"}
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pydantic

from lightningrl.errors import ConfigError, RunFolderError
from lightningrl.recipe import Recipe
from lightningrl.recipe_keys import recipe_path
from lightningrl.sanitize import parse_json
from lightningrl_runs.model_files import origin_of, reopen_model
from lightningrl_server.rendering.templates import load_template

__all__ = [
    "RunOrigin",
    "flatten",
    "is_own",
    "newest_run",
    "place_models",
    "read_import",
    "read_models",
    "read_object",
    "read_run_file",
    "read_values",
    "template_of",
]


_KINDS: Final = {
    **dict.fromkeys(("folder", "run", "store"), str),
    **dict.fromkeys(("models", "files", "settings", "traces"), dict),
    "source": str | None,
    "made": list,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOrigin:
    """The recipe and settings that a run was started with. Read without a lock: also while the run trains, and when the
    recipe is gone."""

    recipe: Recipe
    """The frozen recipe; keys that it lacks have their default."""
    values: Mapping[str, Any]
    """The frozen values, by dotted key."""
    source: Path | None
    """The recipe's file; None for a run that Python code started."""
    settings: Mapping[str, Any]
    """Given beside the recipe, by dotted key."""
    models: Mapping[str, str]
    """Hub name or absolute folder, by policy."""

    @classmethod
    def read(cls, folder: Path) -> RunOrigin:
        """Read a run's origin; recipe and models that were moved along are found where they lie now. Raises
        RunFolderError."""
        run_file = read_run_file(folder)
        try:
            recipe = Recipe.model_validate_json((folder / "recipe.json").read_bytes())
        except OSError:
            raise RunFolderError(
                f"no run in {str(folder)!r} that has a recipe; `lightningrl train RECIPE` starts one"
            ) from None
        except pydantic.ValidationError as error:
            key = ".".join(map(str, error.errors()[0]["loc"]))
            raise RunFolderError(
                f"run {str(folder)!r} was started by another version of LightningRL, which read {key!r} otherwise; "
                "go on with that version, or start a new run"
            ) from None
        source = recipe_path(_find(run_file["source"], folder, run_file)) if run_file.get("source") else None
        home = source.parent if source else _find(run_file.get("folder", "."), folder, run_file)
        return cls(
            recipe=recipe.model_copy(update={"folder": home}),
            values=read_values(folder),
            source=source,
            settings=run_file.get("settings", {}),
            models=read_models(folder),
        )


def is_own(folder: Path) -> bool:
    """True where a run of ours was made in a folder: its `run.json` is no other program's."""
    values = read_run_file(folder)
    return "source" in values and all(isinstance(values.get(name), dict) for name in ("models", "settings"))


def newest_run(root: Path) -> Path:
    """The run folder last written to below `root`; one that has a checkpoint, or a warm start, before those that never
    began. Raises RunFolderError where there is none."""
    runs = [path.parent for path in root.glob("*/run.json") if is_own(path.parent)]
    if not runs:
        raise RunFolderError(
            f"no run below {str(root)!r}; give one with --run, or start one with `lightningrl train RECIPE`"
        )
    begun = ("checkpoints/step-*/loop.json", "warm_start")
    return max(runs, key=lambda run: (any(any(run.glob(name)) for name in begun), (run / "run.json").stat().st_mtime))


def read_run_file(folder: Path) -> dict[str, Any]:
    """Values of `run.json`, as they were written; empty where there is none. Another program may have one, too: what is
    of another kind than ours is left out."""
    values = read_object(folder / "run.json")
    return {name: value for name, value in values.items() if isinstance(value, _KINDS.get(name, object))}


def read_import(folder: Path) -> dict[str, Any] | None:
    """Where an imported run is from: `source`, `formats`; None for any other run."""
    if (traces := read_run_file(folder).get("traces")) is None:
        return None
    formats = traces.get("formats")
    listed = [str(name) for name in formats] if isinstance(formats, list) else []
    return {**traces, "source": str(traces.get("source", "")), "formats": listed}


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where there is none, or it is nested deeper than anything of ours."""
    try:
        value = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def read_models(folder: Path) -> dict[str, str]:
    """Hub name or absolute folder, where it lies now, by policy. A model file is read again where its folder has gone
    from the cache."""
    run_file = read_run_file(folder)
    models, files = run_file.get("models", {}), run_file.get("files", {})
    places = {
        name: _find(model, folder, run_file) if Path(model).is_absolute() else model
        for name, model in models.items()
        if isinstance(model, str)
    }
    return {
        name: str(reopen_model(Path(place), files[name]) if name in files else place) for name, place in places.items()
    }


def template_of(recipe: Recipe, policy: str) -> str | None:
    """The chat template that a recipe puts in place of a model's; None = the model's own, or the file has gone."""
    settings = recipe.all_policies.get(policy)
    if settings is None or settings.chat_template is None:
        return None
    try:
        return load_template(settings.chat_template, recipe.folder, policy)
    except ConfigError:
        return None


def place_models(recipe: Recipe, models: Mapping[str, str]) -> dict[str, Any]:
    """`models` and `files` of `run.json`: folders that were read from a model file are the file there, with what it
    was."""
    origins = {name: origin for name, model in models.items() if (origin := origin_of(model)) is not None}
    places = {name: str(origins[name]["file"]) if name in origins else model for name, model in models.items()}
    files = {name: {**origin, "model": recipe.all_policies[name].model} for name, origin in origins.items()}
    return {"models": places, **({"files": files} if files else {})}


def read_values(folder: Path) -> dict[str, Any]:
    """Values of the frozen recipe by dotted key; empty where there is none, as in an import."""
    return {} if read_import(folder) is not None else flatten(read_object(folder / "recipe.json"))


def flatten(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted key; an empty table is as none."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        flat.update(flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return flat


def _find(path: str, folder: Path, run_file: Mapping[str, Any]) -> Path:
    """Find a file that the run knew as `path`: there still, or as far from the run's folder as when the run was
    made."""
    if Path(path).exists():
        return Path(path)
    now = folder.resolve()
    moved = Path(os.path.normpath(now / os.path.relpath(path, run_file.get("run", now))))
    return moved if moved.exists() else Path(path)
