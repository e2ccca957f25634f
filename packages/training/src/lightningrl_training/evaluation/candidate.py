"""Candidates of an evaluation, found by what a user writes.

RUN  RUN@best  RUN@newest  RUN@40      a run's checkpoint
FOLDER                                 an exported transformers folder, or any other
MODEL@https://api.openai.com/v1        a model of an OpenAI-compatible provider

Agent, tasks and rewards are one recipe's for all of them; a run brings what its weights need: policies, backend,
learner, credit.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lightningrl.errors import ConfigError
from lightningrl.recipe import Recipe
from lightningrl.recipe_tables import NamedUpstreamConfig
from lightningrl_client.recipe_file import with_settings
from lightningrl_training.checkpoints import Checkpoint, find_checkpoint
from lightningrl_viewer.reading.origin import RunOrigin

__all__ = ["Candidate", "find_candidate", "run_of"]

EXAMINED = (
    "agent",
    "adapters",
    "tasks",
    "roles",
    "upstream",
    "telemetry",
    "rewards",
    "sampling",
    "validation",
    "outcomes",
    "runtime",
)
"""Keys of the recipe that every candidate is examined with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A policy to be evaluated."""

    name: str
    """Name to show: `runs/mine after step 40`."""
    recipe: Recipe
    checkpoint: Checkpoint | None = None
    """Weights; None = the models as the recipe has them."""
    upstream: NamedUpstreamConfig | None = None
    """Provider that answers in place of any policy."""


def run_of(text: str) -> Path | None:
    """Run folder that the text names; None where it names none."""
    path = Path(text if _is_run(Path(text)) else text.rpartition("@")[0] or text)
    return path if _is_run(path) else None


def _is_run(path: Path) -> bool:
    return (path / "run.json").is_file() and (path / "recipe.json").is_file()


def find_candidate(text: str, recipe: Recipe | None, *, api_key_env: str | None = None) -> Candidate:
    """Find the candidate that the text names. `recipe` None = the run's own. Raises ConfigError, RunFolderError."""
    model, _, place = text.rpartition("@")
    if place.startswith(("http://", "https://")):
        if not model:
            raise ConfigError(
                f"{text!r} names no model; write MODEL@URL, for example gpt-5-mini@https://api.openai.com/v1"
            )
        upstream = NamedUpstreamConfig(base_url=place, api_key_env=api_key_env, model=model)
        return Candidate(name=f"{model} at {place}", recipe=_wanted(recipe, text), upstream=upstream)
    if (run := run_of(text)) is not None:
        saved = find_checkpoint(run, place if Path(text) != run else None)
        return Candidate(name=f"{run} after step {saved.state.step}", recipe=_of_run(run, recipe), checkpoint=saved)
    if (Path(text) / "config.json").is_file():
        settings = {"policy.model": str(Path(text).absolute())}
        return Candidate(name=text, recipe=with_settings(_wanted(recipe, text), settings))
    raise ConfigError(
        f"{text!r} is no run folder, no transformers folder and no model of a provider; write RUN, RUN@best, RUN@40, "
        "a folder with a config.json, or MODEL@https://…"
    )


def _wanted(recipe: Recipe | None, text: str) -> Recipe:
    if recipe is None:
        raise ConfigError(
            f"{text!r} says nothing of agent, tasks and rewards; name the recipe: --recipe examples/text_to_sql"
        )
    return recipe


def _of_run(run: Path, recipe: Recipe | None) -> Recipe:
    origin = RunOrigin.read(run)
    tables = {name: f'policies."{name}"' for name in origin.models} | {origin.recipe.policy.name: "policy"}
    own = with_settings(origin.recipe, {f"{tables[name]}.model": model for name, model in origin.models.items()})
    if recipe is None:
        return own
    return own.model_copy(update={**{name: getattr(recipe, name) for name in EXAMINED}, "folder": recipe.folder})
