"""Plugins: hook specifications, `Plugin` records, and a manager that is built once and passed on.

entry points (group "lightningrl")  ─►  load_plugins()  ─►  manager.adapters["langchain"].factory()
a user's own object or "file.py:name"  ───────────────►  (needs no package: see lightningrl.loading)
"""

from __future__ import annotations

import difflib
import importlib.metadata
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import pluggy

from lightningrl.errors import LightningError, PluginError, describe_raised

if TYPE_CHECKING:
    from lightningrl.backends import Capabilities
    from lightningrl.protocols import StepReport
    from lightningrl.recipe import Recipe
    from lightningrl.types import Advantages, ToolCall, ToolStatus, Trajectory, TrajectoryGroup

__all__ = ["COMMANDS", "YIELDING", "HookSpecs", "Plugin", "PluginManager", "hookimpl", "load_plugins"]

logger = logging.getLogger(__name__)

PROJECT = "lightningrl"
PREFIX = "lightningrl_"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plugin:
    """One installed part. Heavy imports belong inside `factory`."""

    name: str
    summary: str
    factory: Callable[..., Any]
    """Called with the recipe's options as keyword arguments."""
    capabilities: Capabilities | None = None
    """Capabilities that a trainer backend declares."""
    tuner: Callable[..., Any] | None = None
    """Factory of the `Backend` that `lightningrl tune` learns with; None = `factory`."""
    check: Callable[[Recipe], None] | None = None
    """Check that raises ConfigError for a recipe which this trainer backend or logger cannot honour, before anything
    heavy starts."""
    secrets: tuple[str, ...] = ()
    """Environment variables with a logger's own keys, which agents do not get in runs that name it."""
    distribution: str = field(default="", compare=False)
    """Distribution and version that brought it; filled in by the manager."""

    def build(self, **options: Any) -> Any:
        """Call the factory. Raises PluginError where it raises, but for errors that are meant for a person."""
        try:
            return self.factory(**options)
        except LightningError:
            raise
        except (Exception, SystemExit) as error:
            raise PluginError(
                f"plugin {self.name!r} from {self.distribution or 'the recipe'}: its factory raised "
                f"{describe_raised(error)}; "
                "mend its options or the plugin, or take another (`lightningrl plugins` lists what is installed)"
            ) from error


class HookSpecs(Protocol):
    """Every extension point there is."""

    @hookspec
    def lightningrl_adapters(self) -> Iterable[Plugin]:
        """Yield adapters; each factory returns an OpenTelemetry `BaseInstrumentor`."""

    @hookspec
    def lightningrl_trainers(self) -> Iterable[Plugin]:
        """Yield trainer backends with their `capabilities`; each factory returns a `Backend`."""

    @hookspec
    def lightningrl_tasks(self) -> Iterable[Plugin]:
        """Yield task sources; each factory returns a `TaskSource`."""

    @hookspec
    def lightningrl_reward_functions(self) -> Iterable[Plugin]:
        """Yield terminal rewards; each factory returns a `Reward`."""

    @hookspec
    def lightningrl_intermediate_rewards(self) -> Iterable[Plugin]:
        """Yield automatic intermediate rewards; each factory returns an `IntermediateReward`."""

    @hookspec
    def lightningrl_reward_mutators(self) -> Iterable[Plugin]:
        """Yield attacks on rewards; each factory returns a `lightningrl_training.redteam.Mutator`."""

    @hookspec
    def lightningrl_credit_assigners(self) -> Iterable[Plugin]:
        """Yield credit assigners; each factory returns a `CreditAssigner`."""

    @hookspec
    def lightningrl_credit_needs(self) -> Iterable[Plugin]:
        """Yield what credit assigners may need of a run (`requires`); each factory returns a `lightningrl.Need`."""

    @hookspec
    def lightningrl_worker_launchers(self) -> Iterable[Plugin]:
        """Yield places where agent workers run; each factory returns a `WorkerLauncher`."""

    @hookspec
    def lightningrl_pages(self) -> Iterable[Plugin]:
        """Yield pages of a running run, at `/NAME`; each factory takes `run`, a `ServedRun`, and returns ASGI."""

    @hookspec
    def lightningrl_view_pages(self) -> Iterable[Plugin]:
        """Yield pages of the viewer, `name` below a run; each factory returns an `async` function of a run, of HTML."""

    @hookspec
    def lightningrl_dialects(self) -> Iterable[Plugin]:
        """Yield APIs that agents speak; each factory returns a `lightningrl.Dialect`."""

    @hookspec
    def lightningrl_model_formats(self) -> Iterable[Plugin]:
        """Yield formats of model files, by suffix; each factory returns a
        `lightningrl_runs.model_files.ModelFormat`."""

    @hookspec
    def lightningrl_loggers(self) -> Iterable[Plugin]:
        """Yield loggers of metrics; each factory takes `folder` (the run's), `run` (its name) and `config` (its
        recipe), and returns a `lightningrl.MetricLogger`."""

    @hookspec
    def lightningrl_trace_importers(self) -> Iterable[Plugin]:
        """Yield importers of traces, by format; each factory returns a `lightningrl_traces.TraceImporter`."""

    @hookspec
    def lightningrl_commands(self) -> Iterable[Plugin]:
        """Yield commands of `lightningrl`; each factory returns a function that `typer` reads, or a `typer.Typer`."""

    @hookspec(firstresult=True)
    def lightningrl_classify_tool_result(self, tool_call: ToolCall) -> ToolStatus | None:
        """Say whether a tool's result is a failure; the first answer that is not None wins."""

    @hookspec
    def lightningrl_rollout_finished(self, trajectory: Trajectory) -> None:
        """Watch a rollout that has ended and been rewarded."""

    @hookspec
    def lightningrl_group_credited(self, group: TrajectoryGroup, advantages: Advantages) -> None:
        """Watch a group whose credit has been assigned."""

    @hookspec
    def lightningrl_step_finished(self, report: StepReport) -> None:
        """Watch a training step that has ended."""


COMMANDS = "lightningrl_commands"
YIELDING = {
    "lightningrl_adapters": "adapter",
    "lightningrl_trainers": "trainer backend",
    "lightningrl_tasks": "task source",
    "lightningrl_reward_functions": "reward",
    "lightningrl_intermediate_rewards": "intermediate reward",
    "lightningrl_reward_mutators": "reward mutator",
    "lightningrl_credit_assigners": "credit assigner",
    "lightningrl_credit_needs": "credit need",
    "lightningrl_worker_launchers": "worker launcher",
    "lightningrl_dialects": "dialect",
    "lightningrl_pages": "pages",
    "lightningrl_view_pages": "viewer page",
    "lightningrl_loggers": "logger",
    "lightningrl_model_formats": "model format",
    "lightningrl_trace_importers": "trace importer",
    COMMANDS: "command",
}
EXTRAS = {
    ("trainer backend", "torch"): "torch",
    ("trainer backend", "verl"): "verl",
    ("worker launcher", "ray"): "verl",
    ("model format", "gguf"): "torch",
    **{("task source", name): name.replace("_", "-") for name in ("harbor", "openenv", "reasoning_gym", "verifiers")},
    ("adapter", "autogen"): "autogen",
    ("adapter", "langchain"): "langchain",
    ("adapter", "openai-agents"): "openai-agents",
}
"""Parts of ours that are distributions of their own, and the extra that installs each."""

_ALIASES = {("adapter", "langgraph"): "langchain"}
"""Names that users give to parts, and the parts' own."""


def _raise(error: PluginError) -> None:
    raise error


class _Records:
    """A manager's plugins of one kind by name, as an attribute of it."""

    def __init__(self, hook: str) -> None:
        self._hook = hook

    def __get__(self, manager: PluginManager, _: type[PluginManager]) -> Mapping[str, Plugin]:
        return manager.records(self._hook)


class PluginManager:
    """The plugins of one run. Build it once (`load_plugins`) and pass it on."""

    def __init__(self, report: Callable[[PluginError], object] = _raise) -> None:
        """`report` is told of a plugin whose records cannot be used; by default it raises."""
        self._pluggy = pluggy.PluginManager(PROJECT)
        self._pluggy.add_hookspecs(HookSpecs)
        self._report = report
        self._records: dict[str, Mapping[str, Plugin]] = {}
        self._failures = 0
        self._warned: set[tuple[str, str]] = set()  # plugin and hook of each warning

    adapters = _Records("lightningrl_adapters")
    trainers = _Records("lightningrl_trainers")
    rewards = _Records("lightningrl_reward_functions")
    intermediate_rewards = _Records("lightningrl_intermediate_rewards")
    credit_assigners = _Records("lightningrl_credit_assigners")
    worker_launchers = _Records("lightningrl_worker_launchers")
    dialects = _Records("lightningrl_dialects")
    pages = _Records("lightningrl_pages")
    commands = _Records(COMMANDS)

    @property
    def hook(self) -> Any:
        """Pluggy's relay: call a hook by name."""
        return self._pluggy.hook

    def notify(self, hook: str, **arguments: Any) -> None:
        """Call a watching hook. A plugin that raises in it is counted (`take_failures`) and named once; the others are
        called."""
        watching = getattr(self._pluggy.hook, hook).get_hookimpls()
        for implementation in watching:
            others = [other.plugin for other in watching if other is not implementation]
            try:
                self._pluggy.subset_hook_caller(hook, others)(**arguments)
            except Exception as error:  # the boundary to who only looks on: training goes on without them
                self._failures += 1
                plugin = _describe_plugin(implementation)
                if (plugin, hook) not in self._warned:
                    self._warned.add((plugin, hook))
                    logger.warning(
                        "plugin %s raised %s: %s in %s; training goes on, hooks_failed counts; fix or remove it",
                        plugin,
                        type(error).__name__,
                        error,
                        hook,
                        exc_info=logger.isEnabledFor(logging.DEBUG),
                    )

    def take_failures(self) -> int:
        """Count how often watching hooks raised since this was last asked."""
        taken, self._failures = self._failures, 0
        return taken

    def register(self, module: object, *, distribution: str = "the recipe") -> None:
        """Add a module or object with hook implementations. Raises PluginError on a misspelt hook."""
        hooks = {name for name in vars(HookSpecs) if name.startswith(PREFIX)}
        for name in dir(module):
            if not name.startswith(PREFIX) or name in hooks or not callable(getattr(module, name)):
                continue
            guess = difflib.get_close_matches(name, hooks, n=1)
            hint = f"did you mean {guess[0]!r}?" if guess else f"hooks are: {', '.join(sorted(hooks))}"
            raise PluginError(f"plugin from {distribution}: no hook named {name!r}; {hint}")
        try:
            self._pluggy.register(module, name=f"{distribution}:{getattr(module, '__name__', id(module))}")
            self._pluggy.check_pending()
        except (pluggy.PluginValidationError, ValueError) as error:
            raise PluginError(f"plugin from {distribution} cannot be registered: {error}; fix or remove it") from error
        self._records.clear()

    def records(self, hook: str) -> Mapping[str, Plugin]:
        """Plugins that `hook` yields, by name. Raises PluginError on duplicates and records of another type."""
        if hook not in self._records:
            self._records[hook] = self._collect(hook)
        return self._records[hook]

    def check(self) -> None:
        """Raise PluginError for a broken plugin of any kind, also of one that nobody has asked for yet."""
        for hook in YIELDING:
            self.records(hook)

    def find(self, hook: str, name: str) -> Plugin:
        """Find the plugin called `name`. Raises PluginError naming what is installed."""
        records = self.records(hook)
        if name in records:
            return records[name]
        alias = _ALIASES.get((YIELDING[hook], name), name)
        guess = [alias] if alias in records else difflib.get_close_matches(name, records, n=1)
        hint = f"; did you mean {guess[0]!r}?" if guess else ""
        if alias not in records and (extra := EXTRAS.get((YIELDING[hook], alias))):
            hint = f"; it comes with: pip install 'lightningrl[{extra}]'"
        raise PluginError(
            f"no {YIELDING[hook]} named {name!r}; installed: {', '.join(sorted(records)) or 'none'}{hint}"
        )

    def _collect(self, hook: str) -> Mapping[str, Plugin]:
        collected: dict[str, Plugin] = {}
        for implementation in getattr(self._pluggy.hook, hook).get_hookimpls():
            distribution = implementation.plugin_name.partition(":")[0]
            try:
                for record in _read_records(hook, implementation.function, distribution):
                    if record.name in collected:
                        raise PluginError(
                            f"two {YIELDING[hook]}s are named {record.name!r}: from "
                            f"{collected[record.name].distribution} and "
                            f"{distribution}; uninstall one"
                        )
                    collected[record.name] = record
            except PluginError as error:
                self._report(error)
        return MappingProxyType(collected)


def _read_records(hook: str, function: Callable[[], Iterable[object]], distribution: str) -> Iterator[Plugin]:
    try:
        records = list(function())
    except Exception as error:
        raise PluginError(
            f"plugin from {distribution}: {hook} raised {describe_raised(error)}; fix or uninstall it"
        ) from error
    for record in records:
        if not isinstance(record, Plugin):
            raise PluginError(
                f"plugin from {distribution}: {hook} yielded {type(record).__name__}, not Plugin; "
                "yield Plugin(name=…, summary=…, factory=…)"
            )
        if not callable(record.factory):
            raise PluginError(
                f"plugin from {distribution}: {hook} yielded {record.name!r} with a factory that is no function; "
                "write one in it"
            )
        yield replace(record, distribution=distribution)


def _describe_plugin(implementation: pluggy.HookImpl) -> str:
    """Describe a plugin as in `'Watcher' of the recipe`."""
    plugin = implementation.plugin
    name = getattr(plugin, "__name__", type(plugin).__name__)
    return f"{name!r} of {implementation.plugin_name.partition(':')[0]}"


def load_plugins(report: Callable[[PluginError], object] = _raise) -> PluginManager:
    """Make a manager of everything installed. `report` is told of a broken entry point, by its distribution; by default
    it raises."""
    manager = PluginManager(report)
    for entry_point in sorted(importlib.metadata.entry_points(group=PROJECT), key=lambda point: point.name):
        source = f"{entry_point.dist.name} {entry_point.dist.version}" if entry_point.dist else entry_point.value
        try:
            manager.register(_load(entry_point, source), distribution=source)
        except PluginError as error:
            report(error)
    return manager


def _load(entry_point: importlib.metadata.EntryPoint, source: str) -> object:
    try:
        return entry_point.load()
    except Exception as error:
        raise PluginError(
            f"plugin {entry_point.name!r} of {source} cannot be loaded: {describe_raised(error)}; "
            f"reinstall or uninstall {source.split(' ')[0]}"
        ) from error
