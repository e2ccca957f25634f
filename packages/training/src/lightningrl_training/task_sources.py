"""Draws a run's tasks from a task source, and refuses what it needs and this run has not.

tasks.use ─► build_source ─► check_needs ─► draw_sets: train, then validation without the inputs of train ─► TaskSets
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, Final

from lightningrl.errors import ConfigError, describe_raised
from lightningrl.loading import is_reference, resolve
from lightningrl.plugins import PluginManager
from lightningrl.protocols import TaskSource
from lightningrl.recipe import Recipe
from lightningrl.recipe_keys import check_options
from lightningrl.recipe_tables import SplitConfig
from lightningrl.types import Task
from lightningrl_client.runtime.agent_loader import runs_in_process
from lightningrl_client.runtime.task_sources import FOLDER, OF_SOURCE, MixedSource, make_source, takes_task
from lightningrl_training.part_checks import gather, required_settings
from lightningrl_training.tasks import TaskSets, input_key, make_tasks, refuse_shared

__all__ = ["build_source", "draw_sets", "source_reward"]

NEEDS: Final = ("container", "network", "one_at_a_time", "python>=3.12")
CONTAINERS: Final = ("docker", "podman")
MOST_WITHOUT_COUNT: Final = 100_000
"""Tasks after which a source is taken to be without end."""
MOST_SHARED: Final = 20
"""Tasks drawn for each validation task, most of which training has, after which there are taken to be no more."""


def build_source(recipe: Recipe, plugins: PluginManager) -> TaskSource | None:
    """The recipe's task source, of several a `MixedSource`; None where tasks come from files. Raises ConfigError for
    what it is not given and for what it needs, PluginError where it is not installed."""
    parts = recipe.tasks.all_sources
    if not parts:
        return None

    def make(name: str) -> TaskSource:
        use, options = parts[name].use, parts[name].options
        is_plugin = isinstance(use, str) and not is_reference(use)
        factory = plugins.find("lightningrl_tasks", use).factory if is_plugin else resolve(use, recipe.folder)
        check_options(factory, options, what=f"task source {use!r}", reserved=(FOLDER,))
        if missing := [each for each in required_settings(factory) if each not in options and each != FOLDER]:
            raise ConfigError(
                *(f"task source {use!r} needs the setting {each!r}; set it in its options" for each in missing)
            )
        source = make_source(use, options, recipe.folder, plugins)
        _check_needs(use, source, recipe)
        if recipe.agent == OF_SOURCE and not callable(getattr(source, "agent", None)):
            raise ConfigError(
                f'task source {use!r} brings no agent, which agent = "{OF_SOURCE}" asks for; name one of yours: '
                '"agent.py:answer"'
            )
        return source

    sources = dict(zip(parts, gather(*(lambda name=name: make(name) for name in parts)), strict=True))
    return sources[""] if "" in sources else MixedSource(sources, {name: part.share for name, part in parts.items()})


def source_reward(name: str, source: TaskSource | None) -> Callable[..., Any]:
    """The reward that the source brings. Raises ConfigError where there is none."""
    reward: Callable[..., Any] | None = getattr(source, "reward", None)
    if reward is None:
        lacks = "tasks.use names no task source" if source is None else "not every task source here has a `reward`"
        raise ConfigError(
            f'rewards.{name}.use = "{OF_SOURCE}" is the reward that a task source brings, and {lacks}; name one of '
            'yours: "reward.py:right"'
        )
    return reward


def _check_needs(use: Any, source: TaskSource, recipe: Recipe) -> None:
    """Raise ConfigError for a need that this run or this machine does not meet, before anything is drawn."""
    who = f"task source {use!r}"
    for need in sorted(source.requires):
        if need == "one_at_a_time":
            many = runs_in_process(recipe) and recipe.runtime.workers > 1
            if recipe.runtime.concurrency > 1 or many:
                key = "runtime.workers" if recipe.runtime.concurrency == 1 else "runtime.concurrency"
                raise ConfigError(f"{who} runs one rollout at a time in a process; set {key} = 1")
        elif need == "container":
            is_here = recipe.runtime.launcher == "local" and recipe.runtime.workers > 0
            if is_here and not any(map(shutil.which, CONTAINERS)):
                raise ConfigError(f"{who} needs containers, and neither docker nor podman is on PATH; install one")
        elif bounds := re.fullmatch(r"python(>=|<)(\d+)\.(\d+)", need):
            asked = (int(bounds[2]), int(bounds[3]))
            if (sys.version_info[:2] >= asked) is not (bounds[1] == ">="):
                here = f"{sys.version_info.major}.{sys.version_info.minor}"
                raise ConfigError(f"{who} needs {need}, and this is Python {here}; install with another")
        elif need != "network":
            raise ConfigError(f"{who} requires {need!r}, which nobody here knows; it may be: {', '.join(NEEDS)}")


def draw_sets(recipe: Recipe, source: TaskSource) -> TaskSets:
    """Draw the run's tasks. A validation task whose input training has is left out, and another drawn in its place.
    Raises ConfigError: too few, no end, a repeated id."""
    tasks = recipe.tasks
    is_of_files = isinstance(recipe.agent, Mapping) and bool(recipe.agent.get("from_task"))
    is_whole = _sees_task(source) if recipe.agent == OF_SOURCE else is_of_files

    def key(task: Task) -> str:
        return input_key(task, with_metadata=is_whole)

    assert isinstance(tasks.train, SplitConfig)
    train = _take("train", tasks.train, _draw("train", tasks.train, source))
    notes = [f"{_names(recipe)} needs the network while it runs"] if "network" in source.requires else []
    validation: tuple[Task, ...] = ()
    if isinstance(tasks.validation, SplitConfig):
        trained = set(map(key, train))
        shared: list[Task] = []
        stream = _draw("validation", tasks.validation, source)
        if tasks.validation.count is not None:
            stream = _unseen(stream, trained, key, shared, tasks.validation.count)
        validation = _take("validation", tasks.validation, stream, shared)
        if shared:
            drawn = len(validation) + len(shared)
            notes.append(
                f"of {drawn} validation tasks drawn {len(shared)} had the input of a training task ({shared[0].id!r}) "
                "and were left out"
            )
    refuse_shared(train, validation, key)
    if recipe.validation.tasks is not None:
        validation = validation[: recipe.validation.tasks]
    return TaskSets(train=train, validation=validation, notes=tuple(notes))


def _names(recipe: Recipe) -> str:
    return ", ".join(f"task source {part.use!r}" for part in recipe.tasks.all_sources.values())


def _sees_task(source: Any) -> bool:
    return isinstance(source, MixedSource) or takes_task(source.agent)


def _draw(which: str, split: SplitConfig, source: TaskSource) -> Iterator[Task]:
    """Tasks of a set in their order, beyond `count` where somebody goes on."""
    what, name = f"tasks.{which}", split.split or which

    def stream(count: int | None) -> Iterator[Any]:
        try:
            yield from source.tasks(name, seed=split.seed, count=count)
        except ConfigError as error:
            raise ConfigError(f"{what}: {error}") from error
        except Exception as error:
            raise ConfigError(f"{what}: its source raised {describe_raised(error)}; mend it, or its options") from error

    more = () if split.count is None or which == "train" else islice(stream(None), split.count, None)
    return make_tasks(what, which, chain(islice(stream(split.count), split.count), more))


def _unseen(
    stream: Iterator[Task], trained: set[str], key: Callable[[Task], str], shared: list[Task], count: int
) -> Iterator[Task]:
    """Tasks that training has not; `shared` gets the others."""
    for task in islice(stream, MOST_SHARED * count):
        if key(task) in trained:
            shared.append(task)
        else:
            yield task


def _take(which: str, split: SplitConfig, stream: Iterator[Task], shared: Sequence[Task] = ()) -> tuple[Task, ...]:
    what = f"tasks.{which}"
    most = MOST_WITHOUT_COUNT if split.count is None else split.count
    tasks = tuple(islice(stream, most + (split.count is None)))
    if split.count is None and len(tasks) > most:
        raise ConfigError(
            f"{what}: the source goes on after {most:,} tasks; say how many to take: {what} = {{ count = 2000 }}"
        )
    if not tasks and not shared:
        name = repr(split.split or which)
        raise ConfigError(f"{what}: the source has no tasks in {name}; check split, and the source's options")
    if split.count is not None and len(tasks) < split.count:
        beside = f" whose input training has not, beside {len(shared)} that it has" if shared else ""
        raise ConfigError(
            f"{what}.count is {split.count}, and the source gave {len(tasks)}{beside}; ask for at most so many"
        )
    seen: set[str] = set()
    for task in tasks:
        if task.id in seen:
            raise ConfigError(f"{what}: two tasks have the id {task.id!r}; a source gives each task one of its own")
        seen.add(task.id)
    return tasks
