"""The credit X-ray of a run: its recorded rollouts, credited by every installed method that their evidence allows.

Nobody is asked, nothing is trained, nothing is written; rewards and judge are not even loaded.

each step of the ledger ─► trajectories, branches ─┬► the run's own method ─┐
                                                   └► every other method    ┴► CreditTable ─► XRay
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from os.path import exists
from pathlib import Path
from typing import Any, Final

import numpy as np

from lightningrl.errors import ConfigError, LightningError, PluginError, describe_raised
from lightningrl.plugins import PluginManager, load_plugins
from lightningrl.protocols import Need
from lightningrl.recipe import Recipe
from lightningrl.records import RolloutFilter
from lightningrl.types import Advantages, RolloutMode, Trajectory, TrajectoryGroup
from lightningrl_credit.needs import NEEDS, find_unrecorded, installed_needs
from lightningrl_credit.scoring import Scorer
from lightningrl_credit.trained_calls import trained_calls_of
from lightningrl_credit.xray import CreditTable, MissingMethod, XRay, join_tables, make_table, read_table
from lightningrl_runs.origin import RunOrigin
from lightningrl_runs.reader import StoredRun, open_run
from lightningrl_training.build import build_assigner, build_scorer, with_kl
from lightningrl_training.evaluator import classify_tools
from lightningrl_training.lab.recredit import check_steps, find_measured, read_measured, read_rollouts
from lightningrl_training.part_checks import required_settings

__all__ = ["RunXRay", "TriedMethod", "open_xray"]

EVIDENCE = frozenset({"judge", "logprobs", "values"})
"""Needs that an assigner's `score` meets by asking."""
MOST = 20
"""Most rollouts that are shown of a run."""
_VARIANTS: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "by role": ("compared within each role's calls", {"compare": "role"}),
    "whitened": ("its group's tokens with mean 0 and deviation 1", {"whiten": True}),
}
"""Variants of the run's own method: summaries, and keys of a part of `sum`."""


@dataclass(kw_only=True, slots=True)
class TriedMethod:
    """A method of credit that is tried on the run."""

    name: str
    summary: str
    scorer: Scorer | None = None
    requires: frozenset[str] = frozenset()
    needs: Mapping[str, Need] = field(default_factory=lambda: NEEDS)
    """Needs that are installed."""
    why: str = ""
    """The reason why it cannot be computed."""

    def credit(self, groups: Sequence[TrajectoryGroup]) -> list[Advantages] | None:
        """Credit a step's rollouts, as it would have been trained. None = these groups do not allow it."""
        unmet = find_unrecorded(self.requires, groups, self.needs)
        if self.scorer is None or unmet is not None:
            self.why = self.why or unmet or ""
            return None
        try:
            assigned, _ = self.scorer.finish([self.scorer.credit_group(group) for group in groups])
            return [credit[: len(group.trajectories)] for credit, group in zip(assigned, groups, strict=True)]
        except Exception as error:  # noqa: BLE001  the boundary to a plugin
            is_unheard = all(rollout.evidence is None for group in groups for rollout in group.trajectories)
            asked = next(iter(sorted(self.requires & EVIDENCE)), None) if is_unheard else None
            if asked is not None:
                self.why = f"needs {asked!r}; {NEEDS[asked].remedy}"
            else:
                self.why = str(error) if isinstance(error, LightningError) else describe_raised(error)
            return None


@dataclass(kw_only=True, slots=True)
class RunXRay:
    """X-rays of one run. A step's table is computed once, as a step does not change."""

    run: StoredRun
    folder: Path
    recipe: Recipe
    plugins: PluginManager
    methods: Mapping[str, Any]
    """Others to show beside those installed, by name: a name, `"file.py:Class"`, `{"use": …, "options": …}`, a class or
    an object."""
    tables: dict[Any, CreditTable] = field(default_factory=dict[Any, CreditTable])
    why: dict[str, str] = field(default_factory=dict[str, str])
    """Reasons why methods cannot be computed, by name."""

    async def trained(self) -> tuple[int, int]:
        """The first and the last step that was trained. Raises LightningError where none was."""
        steps = [record.step for record in await self.run.look.steps()]
        if not steps:
            raise self._untrained
        return steps[0], steps[-1]

    async def of_run(self, steps: Collection[int] | None = None, *, most: int | None = MOST) -> XRay:
        """X-ray all steps, or these. Raises LightningError where none was trained, or a step's rollouts are gone."""
        if not trained_calls_of(self.recipe):
            raise self._untrained
        records = await self.run.look.steps()
        check_steps(self.folder, records, steps or ())
        methods = self._methods()
        remembers = any(method.scorer is not None and method.scorer.remembers for method in methods)
        if remembers:
            self.tables.clear()
        tables: list[CreditTable] = []
        for record in records:
            if steps is not None and record.step > max(steps, default=0):
                break
            is_shown = steps is None or record.step in steps
            if is_shown or remembers:
                table = await self._table(record.step, record.rollout_ids, methods)
                tables += [table] if is_shown else []
        return self._read(tables, methods, most=most)

    async def of_group(self, group_id: str) -> XRay:
        """X-ray the rollouts of one task that were trained together. Raises ConfigError where there are none."""
        records = await self.run.list_rollouts(RolloutFilter(group_id=group_id, mode=RolloutMode.TRAIN, limit=1000))
        members = [record.spec.id for record in reversed(records) if record.trained_step is not None]
        step = next((record.trained_step for record in records if record.trained_step is not None), None)
        if step is None:
            raise ConfigError(
                f"no group {group_id!r} was trained in run {str(self.folder)!r}; `lightningrl rollouts list` has "
                "those there are"
            )
        methods = self._methods()
        scorers = [method.scorer for method in methods if method.scorer is not None]
        if any(scorer.needs_whole_steps or scorer.remembers for scorer in scorers):
            whole = await self.of_run([step], most=None)
            return replace(whole, rollouts=tuple(rollout for rollout in whole.rollouts if rollout.group_id == group_id))
        return self._read([await self._table(step, members, methods)], methods)

    async def of_rollout(self, rollout_id: str) -> XRay:
        """X-ray a rollout's group, with this rollout alone. Raises LightningError where it was not trained."""
        record = await self.run.look.rollout(rollout_id)
        if not trained_calls_of(self.recipe):
            raise self._untrained
        if record.trained_step is None or record.spec.branch is not None:
            mode = f"of mode {record.spec.mode.value!r} and not trained"
            kind = "a branch" if record.spec.branch is not None else mode
            raise ConfigError(
                f"rollout {rollout_id!r} is {kind}, so it has no credit of its own; choose one that a step trained"
            )
        xray = await self.of_group(record.spec.group_id)
        return replace(xray, rollouts=tuple(rollout for rollout in xray.rollouts if rollout.rollout_id == rollout_id))

    @property
    def _untrained(self) -> LightningError:
        if not trained_calls_of(self.recipe):
            return LightningError(
                f"run {str(self.folder)!r} trains no policy, as its traces were imported, so no call has credit; "
                "`lightningrl rescore` tries a reward on its rollouts"
            )
        return LightningError(f"run {str(self.folder)!r} has trained no step yet; there is no credit to look at")

    # ------------------------------------------------------------------ a step

    async def _table(self, step: int, rollout_ids: Sequence[str], methods: Sequence[TriedMethod]) -> CreditTable:
        measured = find_measured(self.folder, rollout_ids)
        key = step, tuple(rollout_ids), tuple((path / "store.sqlite").stat().st_mtime_ns for path in measured.values())
        if key not in self.tables:
            rollouts, branches = await read_rollouts(self.run, rollout_ids)
            scores = await self.run.look.scores([rollout.rollout_id for rollout in rollouts])
            by_hand = [branch for path in measured.values() for branch in await read_measured(path)]
            used = {
                rollout.rollout_id: [score.advantages.get(call.id) for call in rollout.transitions]
                for rollout, score in zip(rollouts, scores, strict=True)
            }

            def compute() -> CreditTable:
                groups = self._scorer.group([classify_tools(rollout, self.plugins) for rollout in rollouts], branches)
                measured = [replace(group, branches=(*group.branches, *_left(group, by_hand))) for group in groups]
                credit = [method.credit(groups) for method in methods]
                return make_table(step, groups, credit, used, measured if by_hand else ())

            self.tables[key] = await asyncio.to_thread(compute)
            self.why |= {method.name: method.why for method in methods if method.why}
        return self.tables[key]

    def _read(self, tables: Sequence[CreditTable], methods: Sequence[TriedMethod], *, most: int | None = None) -> XRay:
        if not tables:
            raise self._untrained
        table = join_tables(tables)
        missing = [
            MissingMethod(name=method.name, summary=method.summary, why=method.why or self.why.get(method.name, ""))
            for number, method in enumerate(methods)
            if not table.tokens[number] or (number == 0 and not np.isfinite(table.own_difference))
        ]
        return read_table(table, [(method.name, method.summary) for method in methods], missing, most=most)

    # ------------------------------------------------------------------ methods

    @property
    def _scorer(self) -> Scorer:
        """A scorer of rollouts that were rewarded before: rewards are not loaded."""
        return build_scorer(self.recipe, build_assigner(self.plugins, "grpo", {}, self.recipe.folder))

    def _methods(self) -> list[TriedMethod]:
        """Built anew for each X-ray: one that remembers begins with the first step. The run's own first."""
        scorer, installed, credit = self._scorer, self.plugins.credit_assigners, self.recipe.credit
        own = {"use": credit.use, "options": credit.options}
        is_plain = credit.use in installed and not credit.options
        summary = f"credit.use = {credit.use!r}, as the run was trained"
        methods = [self._method(scorer, credit.use if is_plain else "run", summary, own, is_own=True)]
        for name, plugin in installed.items():
            if is_plain and name == credit.use:
                continue
            if missing := [key for key in required_settings(plugin.factory) if key != "build"]:
                example = f"--method {name}='{{use = \"{name}\", options = …}}'"
                why = f"needs the setting {missing[0]!r}; give it with its options: {example}"
                methods.append(TriedMethod(name=name, summary=plugin.summary, why=why))
            else:
                methods.append(self._method(scorer, name, plugin.summary, {"use": name}))
        for name, (summary, keys) in _VARIANTS.items():
            part = {"use": "sum", "options": {"parts": [{**own, **keys}]}}
            methods.append(self._method(scorer, f"{methods[0].name} {name}", f"the run's own, {summary}", part))
        for name, part in self.methods.items():
            if any(method.name == name and method.scorer is not None for method in methods):
                raise ConfigError(f"there is a method {name!r} already; give yours another name")
            methods = [method for method in methods if method.name != name]
            whole = part if isinstance(part, Mapping) else {"use": part}
            added = self._method(scorer, name, f"credit.use = {whole.get('use')!r}", whole)
            if added.scorer is None:
                raise ConfigError(f"method {name!r}: {added.why}")
            methods.append(added)
        return methods

    def _method(
        self, scorer: Scorer, name: str, summary: str, part: Mapping[str, Any], *, is_own: bool = False
    ) -> TriedMethod:
        method = TriedMethod(name=name, summary=summary)
        if _lies_in(self.folder.resolve(), part, self.recipe.folder):
            return replace(method, why="its code lies in the run's own folder; move it out, if it is yours")
        try:
            assigner = build_assigner(self.plugins, part["use"], part.get("options", {}), self.recipe.folder)
            if is_own:
                assigner = with_kl(self.recipe, assigner)
            by_role = {"agents"} if self.recipe.credit.compare == "role" else set[str]()
            requires, needs = assigner.requires | by_role, installed_needs(self.plugins)
            return replace(method, scorer=scorer.with_credit(assigner), requires=requires, needs=needs)
        except (ConfigError, PluginError) as error:
            return replace(method, why=str(error))


def _lies_in(run: Path, part: Any, home: Path) -> bool:
    """True where a file or a module that a part of a recipe names lies in the run's folder. `home`: the recipe's."""
    if isinstance(part, Mapping | list | tuple):
        return any(_lies_in(run, inner, home) for inner in (part.values() if isinstance(part, Mapping) else part))
    source = part.rpartition(":")[0] if isinstance(part, str) else ""
    places = (home / place for place in (source, f"{source}.py", source.partition(".")[0]) if source)
    return any(exists(place) and place.resolve().is_relative_to(run) for place in places)  # noqa: PTH110 - long texts


@asynccontextmanager
async def open_xray(folder: Path, methods: Mapping[str, Any] | None = None) -> AsyncIterator[RunXRay]:
    """Raises RunFolderError where no run lies there."""
    recipe = RunOrigin.read(folder).recipe
    async with open_run(folder) as run:
        yield RunXRay(run=run, folder=folder, recipe=recipe, plugins=load_plugins(), methods=methods or {})


def _left(group: TrajectoryGroup, branches: Sequence[Trajectory]) -> list[Trajectory]:
    names = {rollout.rollout_id for rollout in group.trajectories}
    return [branch for branch in branches if branch.branch is not None and branch.branch.rollout_id in names]
