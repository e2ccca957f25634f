"""Policies evaluated on tasks: the same agent and rewards, the real server and workers, as validation has them.

<folder>/evaluations/<name>.json          the results
<folder>/evaluations/<name>/<policy>/     store and logs: `lightningrl rollouts list --run`

One policy runs after the other. Where the comparison may stop early, both run batch by batch, each with a test.

Candidates are found by what a user writes:

RUN  RUN@best  RUN@newest  RUN@40      a run's checkpoint
RUN@base  RUN@0                        the weights that it started from
FOLDER                                 an exported transformers folder, or any other
MODEL@https://api.openai.com/v1        a model of an OpenAI-compatible provider

Agent, tasks and rewards are one recipe's for all of them; a run brings its policies, backend, learner, credit.
"""

from __future__ import annotations

import math
import random
import re
import shlex
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pydantic

from lightningrl.errors import ConfigError, LightningError, RunFolderError
from lightningrl.figures import Verdict
from lightningrl.files import create_private
from lightningrl.loading import refuse_in_import
from lightningrl.plugins import load_plugins
from lightningrl.recipe import Recipe
from lightningrl.recipe_tables import NamedUpstreamConfig, UpstreamConfig
from lightningrl.types import SamplingSettings, Task, Trajectory
from lightningrl_client.recipe_file import load_recipe, with_settings
from lightningrl_credit.scoring import score_of
from lightningrl_runs.metrics import read_rows
from lightningrl_runs.model_files import find_model
from lightningrl_runs.origin import RunOrigin
from lightningrl_training.build import Parts
from lightningrl_training.checkpoints import Checkpoint, best_checkpoint, find_checkpoint
from lightningrl_training.checks import build_checked
from lightningrl_training.collector import fetch_ended
from lightningrl_training.evaluation.result import (
    Comparison,
    EvaluatedTask,
    Evaluation,
    compare,
    read_evaluation,
    sample_of,
)
from lightningrl_training.explanations import explain_no_rewards
from lightningrl_training.run_sync import Show, run_sync, show_nobody
from lightningrl_training.serving import RunningServices, serve_recipe
from lightningrl_training.task_files import task_source
from lightningrl_training.tasks import columns_of, count_validated, plan_evaluation, read_tasks

__all__ = ["Candidate", "EvaluationReport", "Examination", "evaluate", "find_candidate"]

AT_ONCE = 64
"""Rollouts per request."""
LONGEST_SLICE = 60
"""Characters of a value that tasks are grouped by."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationReport:
    """The results of one policy, or of two on the same tasks."""

    evaluations: tuple[Evaluation, ...]
    comparison: Comparison | None
    """None = there was one policy."""
    slices: tuple[str, ...] = ()
    """Keys of slices that were asked for."""
    path: Path
    """File of the report."""

    def numbers(self) -> dict[str, Any]:
        """Values for JSON, with what is computed from the evaluations."""
        rows = [{**msgspec.to_builtins(one), "summary": _summary(one, self.slices)} for one in self.evaluations]
        if self.comparison is None:
            return {"evaluations": rows, "comparison": None}
        parts = self.comparison.slices
        slices = [{**msgspec.to_builtins(part), "verdict": part.verdict.value} for part in parts]
        verdict = self.comparison.verdict.value
        comparison = {**msgspec.to_builtins(self.comparison), "slices": slices, "verdict": verdict}
        return {"evaluations": rows, "comparison": comparison}


def evaluate(
    policy: str,
    *,
    recipe: str | Path | Recipe | None = None,
    against: str | None = None,
    tasks: str | None = None,
    limit: int | None = None,
    samples: int = 1,
    temperature: float | None = None,
    passes: float | None = None,
    slices: Sequence[str] = (),
    stop_every: int | None = None,
    api_key_env: str | None = None,
    price: tuple[float, float] | None = None,
    against_price: tuple[float, float] | None = None,
    out: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    show: Show = show_nobody,
) -> EvaluationReport:
    """Measure a policy on held-out tasks, or compare two. Raises LightningError.

    policy        `"runs/mine"`, `"runs/mine@best"`, `"runs/mine@40"`; a transformers folder; `"MODEL@https://…/v1"`
    recipe        agent, tasks and rewards; None = the run's
    against       another policy on the same tasks, or a file of an earlier evaluation
    tasks         a file of tasks (docs/how-to/tasks.md), `"hf:NAME:SPLIT"`, `"file.py:name"`; None = validation tasks
    limit         so many of them, at random
    samples       of each task; several give pass@k
    temperature   None = as validation samples; several samples as training does
    passes        the least reward that passes; None = the most that there is
    slices        keys of the tasks' metadata to give means by
    stop_every    look after so many tasks, and stop once the comparison is decided; None = run all
    price         of a million prompt tokens, and of a million completion tokens
    out           the results' file; None = in `evaluations` of the run
    show          told what is being done, and how much of how much is
    """
    refuse_in_import("lightningrl.evaluate")
    how = Examination(
        tasks=tasks, limit=limit, samples=samples, temperature=temperature, passes=passes, batch=stop_every
    )
    shared = load_recipe(Path(recipe)) if isinstance(recipe, str | Path) else recipe

    def find(text: str, shared: Recipe | None) -> Candidate:
        candidate = find_candidate(text, shared, api_key_env=api_key_env)
        return replace(candidate, recipe=with_settings(candidate.recipe, settings)) if settings else candidate

    candidates = [find(policy, shared)]
    earlier = _read_earlier(against)
    if stop_every is not None and against is None:
        raise ConfigError("only a comparison can be decided before all tasks have run; name another policy: --against")
    if against is not None and earlier is None:
        candidates.append(find(against, candidates[0].recipe))
    path = _place(policy, None if out is None else Path(out))
    prices = price, against_price
    evaluations, comparison = run_sync(
        _examine(candidates, how, path.with_suffix(""), slices=slices, prices=prices, earlier=earlier, show=show)
    )
    report = EvaluationReport(evaluations=tuple(evaluations), comparison=comparison, slices=tuple(slices), path=path)
    with create_private(path) as file:
        file.write(msgspec.json.format(msgspec.json.encode(report.numbers()), indent=1) + b"\n")
    return report


def _read_earlier(against: str | None) -> Evaluation | None:
    """Read the evaluation in the file that the text names; None where it names none."""
    return read_evaluation(Path(against)) if against is not None and Path(against).is_file() else None


def _place(policy: str, out: Path | None) -> Path:
    """Choose a new file for the results."""
    run = _run_of(policy)
    path = out or (run or Path()) / "evaluations" / f"{time.strftime('%Y%m%d-%H%M%S')}.json"
    while out is None and path.exists():
        path = path.with_name(f"{path.stem}-again.json")
    if path.suffix != ".json":
        raise ConfigError(
            f"--out {str(path)!r} is no .json file; results are JSON, and rollouts go into a folder beside them"
        )
    if path.exists() or path.with_suffix("").exists():
        raise RunFolderError(f"{str(path)!r} or the folder of its rollouts is there already; give another --out")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError(
            f"folder {str(path.parent)!r} cannot be written: {error.strerror}; give another --out"
        ) from error
    return path


def _summary(evaluation: Evaluation, slices: Sequence[str]) -> dict[str, Any]:
    return {
        "reward": msgspec.to_builtins(evaluation.reward),
        "pass_at": {str(k): msgspec.to_builtins(evaluation.pass_at(k)) for k in evaluation.ks},
        "slices": {key: msgspec.to_builtins(evaluation.slice_rewards(key)) for key in slices},
        "failed": evaluation.failed,
        "without_result": evaluation.without_result,
        "seconds": evaluation.seconds,
        "tokens": evaluation.tokens,
        "cost": evaluation.cost,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Examination:
    """Settings of an evaluation."""

    tasks: str | None = None
    """File of tasks or a loader (`lightningrl_training.task_files`); None = the recipe's validation tasks."""
    limit: int | None = None
    """Number of tasks, chosen at random; None = all."""
    samples: int = 1
    """Rollouts of each task."""
    temperature: float | None = None
    """Temperature; None = as validation samples, or with several samples as training does."""
    passes: float | None = None
    """Least reward that passes; None = the most that there is."""
    batch: int | None = None
    """Tasks between two looks at the comparison, which stops once it is decided; None = run all."""

    def __post_init__(self) -> None:
        for name in ("samples", "limit", "batch"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"{name} is {value}; give 1 or more")
        if self.temperature is not None and not 0.0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature is {self.temperature:g}; give 0 (greedy) or more")

    def sampling(self, recipe: Recipe) -> SamplingSettings:
        chosen = recipe.validation_sampling if self.samples == 1 else recipe.sampling.settings()
        chosen = chosen if self.temperature is None else replace(chosen, temperature=self.temperature)
        if self.samples > 1 and chosen.temperature == 0.0:
            raise ConfigError(
                f"{self.samples} samples of a greedy policy are one and the same; give a temperature, or take 1 sample"
            )
        return chosen

    def choose(self, recipe: Recipe, parts: Parts) -> list[Task]:
        """Choose tasks and put them into a random order, always the same: tasks that an early stop leaves out are like
        the others. Raises ConfigError."""
        tasks = list(parts.tasks.validation if self.tasks is None else _read(self.tasks, recipe))
        if not tasks:
            raise ConfigError(
                "the recipe has no validation tasks; name tasks to evaluate on: --tasks held_out.jsonl, or "
                "data.py:held_out"
            )
        random.Random(0).shuffle(tasks)  # noqa: S311 - an order, not a secret
        return tasks[: self.limit]


async def _examine(
    candidates: Sequence[Candidate],
    how: Examination,
    folder: Path,
    *,
    slices: Sequence[str] = (),
    prices: Sequence[tuple[float, float] | None] = (),
    earlier: Evaluation | None = None,
    show: Show = show_nobody,
) -> tuple[list[Evaluation], Comparison | None]:
    """Evaluate one or two policies on the same tasks, and compare the first with the second or with `earlier`. Rollouts
    and logs go below `folder`. Raises LightningError, for what can be refused before anything runs."""
    opened: list[_Candidate] = []

    def evaluations() -> list[Evaluation]:
        return [*(candidate.evaluation for candidate in opened), *([] if earlier is None else [earlier])]

    async with AsyncExitStack() as both:
        for number, candidate in enumerate(candidates):
            stack = await both.enter_async_context(AsyncExitStack())
            opening = _open(candidate, how, folder / str(number + 1), slices, earlier, show)
            serving = await stack.enter_async_context(opening)
            opened.append(serving)
            if how.batch is None:
                await serving.run(len(serving.tasks), show)
                await stack.aclose()  # its memory is the next one's
        while how.batch is not None and len(opened[0].done) < len(opened[0].tasks):
            for serving in opened:
                await serving.run(how.batch, show)
            if _is_decided(evaluations()):
                break
    priced = zip(evaluations(), [*prices, None, None], strict=False)
    results = [replace(result, price=price or result.price) for result, price in priced]
    return results, compare(results[0], results[1], slices) if len(results) > 1 else None


def _is_decided(evaluations: Sequence[Evaluation]) -> bool:
    if len(evaluations) < 2 or not evaluations[0].means().keys() & evaluations[1].means().keys():
        return False
    return compare(evaluations[0], evaluations[1]).verdict is not Verdict.NOT_ENOUGH


@dataclass(kw_only=True, slots=True)
class _Candidate:
    """A candidate that is being served."""

    candidate: Candidate
    how: Examination
    parts: Parts
    served: RunningServices
    tasks: list[Task]
    folder: Path
    done: list[EvaluatedTask]

    async def run(self, count: int, show: Show) -> None:
        """Run the next `count` tasks."""
        numbers = range(len(self.done), min(len(self.done) + count, len(self.tasks)))
        specs = plan_evaluation(
            {number: self.tasks[number] for number in numbers},
            self.candidate.recipe,
            samples=self.how.samples,
            sampling=self.how.sampling(self.candidate.recipe),
            step=self.step or 0,
        )
        await self.served.client.create_rollouts(specs)
        await self.served.start_workers()
        had, total = len(self.done) * self.how.samples, len(self.tasks) * self.how.samples
        trajectories = await self._collect(
            [spec.id for spec in specs], lambda ended: show(self.candidate.name, had + ended, total)
        )
        for place, number in enumerate(numbers):
            mine = trajectories[place * self.how.samples : (place + 1) * self.how.samples]
            task = self.tasks[number]
            samples = tuple(sample_of(rollout, self.candidate.recipe.outcomes) for rollout in mine)
            self.done.append(EvaluatedTask(id=task.id, slices=_slices(task), samples=samples))

    async def _collect(self, ids: Sequence[str], show: Callable[[int], None]) -> list[Trajectory]:
        client, evaluator, trajectories = self.served.client, self.parts.evaluator, list[Trajectory]()
        for start in range(0, len(ids), AT_ONCE):
            ended = await fetch_ended(client, ids[start : start + AT_ONCE], lambda more: show(len(trajectories) + more))
            rewarded = await evaluator.evaluate(ended, client.set_scores)
            await client.set_scores([score_of(trajectory) for trajectory in rewarded])
            trajectories.extend(rewarded)
            self._refuse_no_results(trajectories)
        return trajectories

    def _refuse_no_results(self, trajectories: Sequence[Trajectory]) -> None:
        """Raise LightningError where none of many rollouts, or of all, has a result: no answers, or a broken reward."""
        ran, so_far = len(self.done) * self.how.samples + len(trajectories), self.evaluation
        has_result = so_far.values() or any(rollout.reward is not None for rollout in trajectories)
        if not has_result and ran >= min(AT_ONCE, len(self.tasks) * self.how.samples):
            where = f"`lightningrl rollouts list --run {shlex.quote(str(self.folder))}` lists them"
            raise LightningError(f"{self.candidate.name}: {explain_no_rewards(trajectories)}; {where}")

    @property
    def step(self) -> int | None:
        if self.candidate.checkpoint is None:
            return None if self.candidate.run is None else 0
        return self.candidate.checkpoint.state.step

    @property
    def evaluation(self) -> Evaluation:
        recipe = self.candidate.recipe
        bounds = recipe.reward_bounds
        return Evaluation(
            policy=self.candidate.name,
            step=self.step,
            recipe=recipe.name,
            samples=self.how.samples,
            sampling=None if self.candidate.upstream else self.how.sampling(recipe),
            bounds=bounds,
            passes=bounds[1] if self.how.passes is None else self.how.passes,
            tasks=tuple(self.done),
            asked=len(self.tasks),
            rollouts=str(self.folder),
            at=time.time(),
            chosen_among=self.candidate.chosen_among,
            chosen_by=self.candidate.count_choosing(self.tasks),
        )


@asynccontextmanager
async def _open(
    candidate: Candidate, how: Examination, folder: Path, slices: Sequence[str], earlier: Evaluation | None, show: Show
) -> AsyncIterator[_Candidate]:
    recipe = candidate.recipe
    how.sampling(recipe)
    show("checking the recipe", 0, 0)
    parts = build_checked(recipe, load_plugins())
    tasks = how.choose(recipe, parts)
    _check_tasks(tasks, slices, earlier)
    changes: dict[str, Any] = {}
    if candidate.upstream is not None:
        parts = replace(parts, backends={})
        changes = {"policies": {}, "default_policy": None, "upstream": UpstreamConfig(models={"*": candidate.upstream})}
    weights = None if candidate.checkpoint is None else candidate.checkpoint.folder
    async with serve_recipe(
        recipe, parts, folder, weights, changes=changes, starting=lambda what: show(what, 0, 0)
    ) as (recipe, served):
        candidate = replace(candidate, recipe=recipe)
        yield _Candidate(candidate=candidate, how=how, parts=parts, served=served, tasks=tasks, folder=folder, done=[])


def _check_tasks(tasks: Sequence[Task], slices: Sequence[str], earlier: Evaluation | None) -> None:
    """Raise ConfigError for a slice that no task is in, and for an earlier evaluation of other tasks."""
    there = {key for task in tasks for key in _slices(task)}
    for key in slices:
        if key not in there:
            names = ", ".join(sorted(there)) or "none"
            raise ConfigError(
                f"no task has {key!r} in its metadata or its input, so there is no such slice; there are: {names}"
            )
    if earlier is not None and not {task.id for task in tasks} & earlier.means().keys():
        raise ConfigError(
            f"the earlier evaluation, of {earlier.policy!r}, has no result of these tasks; evaluate both on the same"
        )


def _read(source: str, recipe: Recipe) -> tuple[Task, ...]:
    """Read tasks from a file, here or beside the recipe, or from a loader."""
    folder = Path.cwd() if Path(source).exists() else recipe.folder
    return read_tasks("eval", source, {}, lambda reference: task_source(reference, folder), columns_of(recipe))


def _slices(task: Task) -> dict[str, str]:
    """Values that tasks may be grouped by: short ones of the metadata, and of an input that is a table."""
    data = {**(task.input if isinstance(task.input, Mapping) else {}), **task.metadata}
    return {
        str(key): str(value)
        for key, value in data.items()
        if isinstance(value, str | int | float) and len(str(value)) <= LONGEST_SLICE
    }


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
    """Weights; None = the models as the recipe, or the run at its start, has them."""
    upstream: NamedUpstreamConfig | None = None
    """Provider that answers in place of any policy."""
    run: Path | None = None
    """Folder of the run whose weights they are."""
    chosen_among: int = 0
    """Validations whose best chose the checkpoint; 0 = it was not chosen."""

    def count_choosing(self, tasks: Sequence[Task]) -> int:
        """Count the tasks that chose the checkpoint. Raises RunFolderError."""
        return count_validated(self.run, tasks) if self.run is not None and self.chosen_among else 0


def _run_of(text: str) -> Path | None:
    """Run folder that the text names; None where it names none."""
    path = Path(text if _is_run(Path(text)) else text.rpartition("@")[0] or text)
    return path if _is_run(path) else None


def _is_run(path: Path) -> bool:
    return (path / "run.json").is_file() and (path / "recipe.json").is_file()


def find_candidate(text: str, recipe: Recipe | None, *, api_key_env: str | None = None) -> Candidate:
    """Find the candidate that the text names. `recipe` None = the run's own. Raises ConfigError, RunFolderError."""
    if (provider := re.fullmatch(r"(?s)(.*?)@(https?://.*)", text)) is not None:
        model, place = provider.groups()
        if not model:
            raise ConfigError(
                "an address without a model; write MODEL@URL, for example gpt-5-mini@https://api.openai.com/v1"
            )
        try:
            upstream = NamedUpstreamConfig(base_url=place, api_key_env=api_key_env, model=model)
        except pydantic.ValidationError as error:  # its text would show the address
            raise ConfigError(f"the address of model {model!r}: {error.errors()[0]['msg']}") from None
        return Candidate(name=f"{model} at {place}", recipe=_wanted(recipe, text), upstream=upstream)
    if (run := _run_of(text)) is not None:
        place = "" if Path(text) == run else text.rpartition("@")[2]
        if place in ("0", "base"):  # whatever checkpoints were kept
            return Candidate(name=f"{run} after step 0", recipe=_of_run(run, recipe), run=run)
        saved = find_checkpoint(run, place or None)
        return Candidate(
            name=f"{run} after step {saved.state.step}",
            recipe=_of_run(run, recipe),
            checkpoint=saved,
            run=run,
            chosen_among=_count_choices(run, saved),
        )
    weights = find_model(text, (Path.cwd(),)) or Path(text)
    if weights.is_file() or (weights / "config.json").is_file():
        settings = {"policy.model": str(weights.absolute())}
        return Candidate(name=text, recipe=with_settings(_wanted(recipe, text), settings))
    raise ConfigError(
        f"{text!r} is no run folder, no model's file or folder and no model of a provider; write RUN, RUN@best, "
        "RUN@40, RUN@base, a folder with a config.json, a GGUF file, or MODEL@https://…"
    )


def _count_choices(run: Path, saved: Checkpoint) -> int:
    """Count the validations that a checkpoint is the best of; 0 = it is not the best, or there is no other."""
    best = best_checkpoint(run)
    validations = sum("validation/reward" in row for row in read_rows(run))
    return validations if best is not None and best.state.step == saved.state.step and validations > 1 else 0


def _wanted(recipe: Recipe | None, text: str) -> Recipe:
    if recipe is None:
        raise ConfigError(
            f"{text!r} says nothing of agent, tasks and rewards; name the recipe: --recipe examples/text_to_sql"
        )
    return recipe


def _of_run(run: Path, recipe: Recipe | None) -> Recipe:
    origin = RunOrigin.read(run)
    tables = {name: f'policies."{name}"' for name in origin.models} | {origin.recipe.policy.name: "policy"}
    models = {f"{tables[name]}.model": model for name, model in origin.models.items()}
    own = with_settings(origin.recipe, {"store_url": None, "runtime.servers": 1, **models})
    if recipe is None:
        return own
    return own.model_copy(update={**{name: getattr(recipe, name) for name in EXAMINED}, "folder": recipe.folder})
