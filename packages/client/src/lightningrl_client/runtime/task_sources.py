"""Task sources (`tasks.use`): made by name and options, in the trainer, which reads and rewards, and in each worker.

tasks.use, options ─► make_source ─► TaskSource          several ─► MixedSource, whose ids are `name/id`
agent = "tasks"    ─► worker_agent: `tasks:{…}` ─► (in the worker) load_source_agent ─► the source's own `agent`
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import count as count_from
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lightningrl.errors import ConfigError, LightningError, describe_raised
from lightningrl.loading import is_reference, resolve

if TYPE_CHECKING:
    from lightningrl.plugins import PluginManager
    from lightningrl.protocols import TaskSource
    from lightningrl.recipe import Recipe
    from lightningrl.types import Task, Trajectory

__all__ = ["OF_SOURCE", "MixedSource", "load_source_agent", "make_source", "takes_task", "worker_agent"]

OF_SOURCE: Final = "tasks"
"""The agent, or a reward's `use`, that comes with the source."""
PREFIX: Final = f"{OF_SOURCE}:{{"
FOLDER: Final = "recipe_folder"
"""Keyword that a factory is given the recipe's folder by, where it takes it: relative paths start there."""


def make_source(use: Any, options: Mapping[str, Any], folder: Path, plugins: PluginManager) -> TaskSource:
    """A task source, by its plugin's name, a class or function, or a reference to one. Raises ConfigError or
    PluginError."""
    is_plugin = isinstance(use, str) and not is_reference(use)
    plugin = plugins.find("lightningrl_tasks", use) if is_plugin else None
    factory = resolve(use, folder) if plugin is None else plugin.factory
    offered = {FOLDER: folder} if FOLDER in inspect.signature(factory).parameters else {}
    try:
        source: TaskSource = factory(**offered, **options) if plugin is None else plugin.build(**offered, **options)
    except LightningError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"task source {use!r} raised {describe_raised(error)} when it was made; mend it, or its options"
        ) from error
    if not callable(getattr(source, "tasks", None)):
        raise ConfigError(
            f"task source {use!r} makes a {type(source).__name__}, which has no `tasks(split, *, seed, count)`; give "
            "it one"
        )
    return source


class MixedSource:
    """Several sources as one. The name of each stands before its tasks' ids; each rewards and solves its own.

    shares a: 2, b: 1    a/0  b/0  a/1  a/2  b/1  a/3 …    the next is of the one that is farthest behind its share
    """

    def __init__(self, sources: Mapping[str, TaskSource], shares: Mapping[str, float]) -> None:
        self._sources = dict(sources)
        self._shares = dict(shares)
        agents = [getattr(source, "agent", None) for source in sources.values()]
        if agents and all(inspect.iscoroutinefunction(agent) for agent in agents):
            self.agent: Callable[..., Any] = self._async_agent
        elif all(agents):
            self.agent = self._agent
        if all(getattr(source, "reward", None) for source in sources.values()):
            self.reward = self._reward

    @property
    def requires(self) -> frozenset[str]:
        return frozenset[str]().union(*(source.requires for source in self._sources.values()))

    def tasks(self, split: str, /, *, seed: int, count: int | None) -> Iterator[Task]:
        """Tasks of all sources by their shares, until one of them that is due has no more."""
        streams = {name: source.tasks(split, seed=seed, count=count) for name, source in self._sources.items()}
        taken = dict.fromkeys(streams, 0)
        for _ in range(count) if count is not None else count_from():
            name = min(streams, key=lambda name: (taken[name] + 0.5) / self._shares[name])
            task = next(streams[name], None)
            if task is None:
                return
            taken[name] += 1
            yield replace(task, id=f"{name}/{task.id}")

    def gold(self, task: Task) -> Any | None:
        """The output that earns the most, where the task's source knows it."""
        source, task = self._part(task)
        gold = getattr(source, "gold", None)
        return None if gold is None else gold(task)

    def _part(self, task: Task) -> tuple[Any, Task]:
        name, _, own_id = task.id.partition("/")
        return self._sources[name], replace(task, id=own_id)

    def _reward(self, task: Task, output: Any, trajectory: Trajectory) -> Any:
        source, task = self._part(task)
        return source.reward(task, output, trajectory)

    def _agent(self, question: Any, task: Task) -> Any:
        source, task = self._part(task)
        return source.agent(question, task) if takes_task(source.agent) else source.agent(question)

    async def _async_agent(self, question: Any, task: Task) -> Any:
        return await self._agent(question, task)


def takes_task(agent: Callable[..., Any]) -> bool:
    """True for an agent of a source whose second argument, the task, has no default or is called so."""
    try:
        parameters = list(inspect.signature(agent).parameters.values())
    except (TypeError, ValueError):  # a builtin says nothing of what it takes
        return False
    places = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    return len(places) > 1 and (places[1].default is inspect.Parameter.empty or places[1].name == "task")


def worker_agent(recipe: Recipe) -> Any:
    """The recipe's agent as workers are told of it: the source's own by a text that `load_source_agent` reads.
    Raises ConfigError where there is no source, or no text says its options."""
    if recipe.agent != OF_SOURCE:
        return recipe.agent
    sources = recipe.tasks.all_sources
    if not sources:
        raise ConfigError(
            f'agent = "{OF_SOURCE}" is the one that a task source brings, and tasks.use names none; name one, or an '
            'agent of yours: "agent.py:answer"'
        )
    try:
        parts = {name: source.model_dump(mode="json") for name, source in sources.items()}
    except ValueError as error:
        raise ConfigError(f"the options of a task source are told to workers as JSON: {error}; give such") from error
    return f"{OF_SOURCE}:{json.dumps(parts)}"


def load_source_agent(text: str, folder: Path) -> Callable[..., Any] | None:
    """The agent of the sources that `worker_agent` wrote of; None for the text of another agent. Raises ConfigError or
    PluginError."""
    if not text.startswith(PREFIX):
        return None
    from lightningrl.plugins import load_plugins

    plugins, parts = load_plugins(), json.loads(text.removeprefix(f"{OF_SOURCE}:"))
    sources = {name: make_source(part["use"], part["options"], folder, plugins) for name, part in parts.items()}
    source: Any = sources[""] if "" in sources else MixedSource(sources, dict.fromkeys(sources, 1.0))
    agent: Callable[..., Any] | None = getattr(source, "agent", None)
    if agent is None:
        raise ConfigError(f'agent = "{OF_SOURCE}": not every task source here has an `agent`; name one of yours')
    return agent
