"""Tasks of a run, loaded once, and the rollouts planned of them, in an order that the seed alone decides; and their
digests, eight bytes each, as a run that goes on must be given the same ones.

tasks ─► digests of id, input and answer, in their order ─► <run>/tasks.npz        3 MB for 300,000 tasks
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import numbers
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightningrl.errors import ConfigError, RunFolderError, describe_raised
from lightningrl.recipe import Recipe
from lightningrl.recipe_keys import check_options
from lightningrl.sanitize import DEEPEST, NotPlain, kind_of, to_plain
from lightningrl.types import BranchPoint, RolloutMode, RolloutSpec, SamplingSettings, Task, Trajectory
from lightningrl_training.part_checks import gather
from lightningrl_training.task_files import Columns, Row

__all__ = [
    "TASKS_FILE",
    "TaskSets",
    "TaskStream",
    "columns_of",
    "count_validated",
    "decode_digests",
    "digest_tasks",
    "encode_digests",
    "explain_few_tasks",
    "explain_other_tasks",
    "input_key",
    "make_tasks",
    "plan_branches",
    "plan_evaluation",
    "plan_group",
    "plan_validation",
    "read_tasks",
    "refuse_shared",
]

DEEPEST_VALUE = DEEPEST - 10
"""Levels of lists and dicts in a task's value: the request that carries it to a worker has some levels, too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskSets:
    """The data of a run."""

    train: tuple[Task, ...]
    validation: tuple[Task, ...]
    notes: tuple[str, ...] = ()
    """Sentences about them for whoever starts the run."""

    @classmethod
    def load(cls, recipe: Recipe, resolve: Callable[[Any], Callable[..., Any]]) -> TaskSets:
        """Call the recipe's sources. Raises ConfigError for an empty source, a repeated id, or a task or an input
        in both sets."""
        tasks, columns = recipe.tasks, columns_of(recipe)
        train, validation = gather(
            lambda: read_tasks("train", tasks.train, tasks.options, resolve, columns),
            lambda: (
                read_tasks("validation", tasks.validation, tasks.options, resolve, columns) if tasks.validation else ()
            ),
        )
        # a harness may have its task's files, too
        is_whole = isinstance(recipe.agent, Mapping) and bool(recipe.agent.get("from_task"))
        refuse_shared(train, validation, partial(input_key, with_metadata=is_whole))
        if recipe.validation.tasks is not None:
            validation = validation[: recipe.validation.tasks]
        return cls(train=train, validation=validation)


def input_key(task: Task, *, with_metadata: bool = False) -> str:
    """Text that is the same for tasks that an agent cannot tell apart: its input, where it sees no more of one."""
    seen = [task.input, task.metadata] if with_metadata else task.input
    return json.dumps(seen, sort_keys=True, default=repr)


def refuse_shared(train: Sequence[Task], validation: Sequence[Task], key: Callable[[Task], str]) -> None:
    """Raise ConfigError for a task in both sets, by its id or its key."""
    if not validation:
        return
    if shared := {task.id for task in train} & {task.id for task in validation}:
        raise ConfigError(
            f"task {min(shared)!r} is in the training and the validation set; a held-out task must not be trained on"
        )
    trained = {key(task): task.id for task in train}
    same = [(task.id, trained[key(task)]) for task in validation if key(task) in trained]
    if same:
        many = f"{len(same)} of {len(validation)} validation tasks have"
        raise ConfigError(
            f"{many} the input of a training task, as {same[0][0]!r} has that of {same[0][1]!r}; take them out of one "
            "of the sets"
        )


class TaskStream:
    """Positions in the stream of tasks, whose groups may be done with out of order.

        0  1  2  3  4  5  6          position = 2, done_beyond = (3, 5), the next to be ordered = 6
        ✓  ✓  ·  ✓  ·  ✓             2 and 4 are out

    A resumed run orders 2 and 4 again, and 6; never 3 or 5.
    """

    def __init__(self, position: int, done_beyond: Iterable[int]) -> None:
        self._position = self._next = position
        self._done = set(done_beyond)

    def take_next(self) -> int:
        """The next position to be ordered."""
        while self._next in self._done:
            self._next += 1
        self._next += 1
        return self._next - 1

    def finish(self, position: int) -> None:
        """Note that the step under way is done with a position."""
        self._done.add(position)

    def reopen(self, positions: Iterable[int]) -> None:
        """Take positions back, whose groups are run again."""
        self._done.difference_update(positions)

    def advance(self) -> tuple[int, tuple[int, ...]]:
        """The first position that is not done with, and those after it that are."""
        while self._position in self._done:
            self._done.remove(self._position)
            self._position += 1
        self._next = max(self._next, self._position)
        return self._position, tuple(sorted(self._done))


def explain_few_tasks(recipe: Recipe, train: Sequence[Task]) -> str | None:
    """The reason why a step asks the same thing again; None = it need not."""
    asked, there = recipe.loop.tasks_per_step, len(train)
    if asked <= there:
        return None
    exist = "is 1 training task" if there == 1 else f"are {there} training tasks"
    return (
        f"loop.tasks_per_step is {asked}, but there {exist}: each step asks for some more than once; give more tasks, "
        f"or set loop.tasks_per_step={there} (loop.group_size says how often a task is tried)"
    )


def plan_group(tasks: Sequence[Task], recipe: Recipe, position: int) -> list[RolloutSpec]:
    """The rollouts of the task at `position` of the endless stream of training tasks: all of them, shuffled afresh in
    each epoch. Their `step` takes them if all are taken in order; which one trained them, the ledger says."""
    epoch, offset = divmod(position, len(tasks))
    task = tasks[_order(recipe.loop.seed, epoch, len(tasks))[offset]]
    group, step = f"g{position:06d}", position // recipe.loop.tasks_per_step
    return [
        _spec(f"{group}-{member:03d}", task, group, RolloutMode.TRAIN, step, recipe)
        for member in range(recipe.loop.group_size)
    ]


def plan_branches(recipe: Recipe, source: Trajectory, point: BranchPoint, samples: int) -> list[RolloutSpec]:
    """So many rollouts that leave `source` at `point`, a group of their own: `g000017-003.after-2-01`."""
    group = f"{source.rollout_id}.after-{point.calls}"
    spec = _spec(group, source.task, group, RolloutMode.BRANCH, source.step, recipe)
    return [replace(spec, id=f"{group}-{number:02d}", branch=point) for number in range(samples)]


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, count: int) -> NDArray[np.int64]:
    return np.random.default_rng((seed, epoch)).permutation(count)


def plan_validation(tasks: Sequence[Task], recipe: Recipe, step: int) -> list[RolloutSpec]:
    """Plan a rollout of each validation task, sampled as `[validation.sampling]` says."""
    return [
        _spec(f"v{step:06d}-{index:04d}", task, f"v{step:06d}-{index:04d}", RolloutMode.VALIDATION, step, recipe)
        for index, task in enumerate(tasks)
    ]


def plan_evaluation(
    tasks: Mapping[int, Task], recipe: Recipe, *, samples: int, sampling: SamplingSettings, step: int
) -> list[RolloutSpec]:
    """Plan `samples` rollouts of each task, by its number: `e00017-003`."""
    return [
        replace(
            _spec(f"e{number:05d}-{sample:03d}", task, f"e{number:05d}", RolloutMode.VALIDATION, step, recipe),
            sampling=sampling,
        )
        for number, task in tasks.items()
        for sample in range(samples)
    ]


def _spec(rollout_id: str, task: Task, group: str, mode: RolloutMode, step: int, recipe: Recipe) -> RolloutSpec:
    return RolloutSpec(
        id=rollout_id,
        task=task,
        group_id=group,
        mode=mode,
        step=step,
        sampling=recipe.validation_sampling if mode is RolloutMode.VALIDATION else recipe.sampling.settings(),
        max_attempts=recipe.runtime.max_attempts,
        timeout_s=recipe.runtime.limit_s,
    )


def columns_of(recipe: Recipe) -> Columns:
    """Columns that the recipe names."""
    return Columns(input=recipe.tasks.input, answer=recipe.tasks.answer, id=recipe.tasks.id)


def read_tasks(
    which: str,
    reference: Any,
    options: Mapping[str, Any],
    resolve: Callable[[Any], Callable[..., Any]],
    columns: Columns = Columns(),  # noqa: B008  frozen
) -> tuple[Task, ...]:
    """Call a source of tasks, a function or a file (`task_source`). Raises ConfigError."""
    what = f"tasks.{which} {reference!r}"
    source = resolve(reference)
    check_options(source, options, what=what)
    try:
        loaded = source(**options)
        # a data frame, which iterates over its columns
        is_table = hasattr(loaded, "columns") and not isinstance(loaded, Sequence)
        items = (
            list(loaded)
            if isinstance(loaded, Iterable) and not isinstance(loaded, str | bytes | Mapping) and not is_table
            else None
        )
    except ConfigError as error:
        raise ConfigError(f"tasks.{which}: {error}") from error
    except Exception as error:
        raise ConfigError(f"{what} raised {describe_raised(error)}") from error
    if items is None:
        rows = ", of a data frame: frame.to_dict('records')" if is_table else ""
        raise ConfigError(
            f"{what} returned {type(loaded).__name__}; return an iterable of Task or of dicts with its fields{rows}"
        )
    tasks = tuple(make_tasks(what, which, items, columns))
    if not tasks:
        raise ConfigError(f"{what} returned no tasks; check its path and filters")
    seen: set[str] = set()
    for task in tasks:
        if task.id in seen:
            raise ConfigError(f"{what}: two tasks have the id {task.id!r}; ids must differ")
        seen.add(task.id)
    return tasks


def make_tasks(
    what: str,
    which: str,
    items: Iterable[Any],
    columns: Columns = Columns(),  # noqa: B008  frozen
) -> Iterator[Task]:
    """Yield a Task for each item of a source, lazily. The first row decides which column is the input of all. Raises
    ConfigError."""
    input_name: str | None = None
    for index, item in enumerate(items):
        place, value = (item.place, item.value) if isinstance(item, Row) else (f"task {index}", item)
        try:
            if isinstance(value, Mapping) and (isinstance(item, Row) or columns.are_named):
                input_name = input_name or columns.input_of(value)
                value = columns.of(value, input_name)
            yield _task(value, default_id=f"{which}-{index}")
        except ValueError as problem:
            raise ConfigError(f"{what}: {place} {problem}") from problem


def _task(item: Any, *, default_id: str) -> Task:
    """Make a Task of a Task, of a dict with its fields, or of a text, its input. A number as id becomes text; without
    an id it has the default. Values are JSON's (`lightningrl.sanitize`). Raises ValueError, whose text goes on from
    the place of the task."""
    if isinstance(item, str):
        item = {"input": item}
    if isinstance(item, Mapping):
        try:
            item = Task(**{"id": default_id, **item})
        except TypeError as error:
            raise ValueError(
                f"is not a Task: {error}; give input, and optionally id, answer, metadata; or name the columns: "
                "tasks.input, tasks.answer"
            ) from error
    if not isinstance(item, Task):
        raise ValueError(f"is {kind_of(item)}; give a Task, a dict with its fields, or a text")
    task_id = _id(item.id)
    if not task_id:
        raise ValueError(f"has the id {item.id!r}; give a text or a whole number, or leave it out")
    if not isinstance(item.metadata, Mapping):
        raise ValueError(f"has a {type(item.metadata).__name__} as metadata; give a dict")
    try:
        values = {
            name: to_plain(getattr(item, name), name, levels=DEEPEST_VALUE) for name in ("input", "answer", "metadata")
        }
    except NotPlain as problem:
        raise ValueError(f"(id {task_id!r}): {problem}") from problem
    return replace(item, id=task_id, **values)


def _id(given: Any) -> str:
    """The text of an id, also of a whole number as pandas has them (3.0); empty where it is no id."""
    if isinstance(given, str):
        return str.__str__(given)
    if isinstance(given, numbers.Integral) and not isinstance(given, bool):
        return str(int(given))
    if not isinstance(given, numbers.Real) or isinstance(given, bool) or not math.isfinite(given):
        return ""
    whole = math.floor(given)
    return str(whole) if whole == given else ""


TaskDigests = Mapping[str, NDArray[np.uint64]]
"""Digests in the order of the tasks, by set."""


def digest_tasks(tasks: TaskSets) -> TaskDigests:
    return {"training": _digest(tasks.train), "validation": _digest(tasks.validation)}


def explain_other_tasks(before: TaskDigests, now: TaskDigests) -> str | None:
    """The difference of a run's tasks from those it started with; None = they are the same."""
    return (
        "; ".join(_explain(key, before[key], now[key]) for key in now if not np.array_equal(before[key], now[key]))
        or None
    )


TASKS_FILE = "tasks.npz"
"""Name of the digests' file in a run's folder."""


def count_validated(run: Path, tasks: Sequence[Task]) -> int:
    """Count the tasks that stand in the validation set of the run in this folder; 0 where it kept no digests. Raises
    RunFolderError."""
    path = run / TASKS_FILE
    return int(np.isin(_digest(tasks), decode_digests(path)["validation"]).sum()) if path.is_file() else 0


def encode_digests(digests: TaskDigests) -> bytes:
    file = io.BytesIO()
    np.savez(file, training=digests["training"], validation=digests["validation"])
    return file.getvalue()


def decode_digests(path: Path) -> TaskDigests:
    """Raises RunFolderError."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in ("training", "validation")}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise RunFolderError(
            f"{str(path)!r} cannot be read ({error}); restore it, or remove it to go on with the tasks there are"
        ) from error


def _digest(tasks: Iterable[Task]) -> NDArray[np.uint64]:
    parts = (json.dumps([task.id, task.input, task.answer], sort_keys=True).encode() for task in tasks)
    return np.frombuffer(b"".join(hashlib.blake2b(part, digest_size=8).digest() for part in parts), np.uint64)


def _explain(name: str, before: NDArray[np.uint64], now: NDArray[np.uint64]) -> str:
    new, gone = int(np.isin(now, before, invert=True).sum()), int(np.isin(before, now, invert=True).sum())
    if not new and not gone:
        return f"the {len(now)} {name} tasks are in another order"
    return f"of {len(now)} {name} tasks {new} are new or changed, and of the {len(before)} before {gone} are gone"
