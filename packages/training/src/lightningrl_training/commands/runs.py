"""`lightningrl runs`: the runs of a folder in a list, two of them compared, tags and notes."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.table import Column

from lightningrl.console import RunsOption, write_json
from lightningrl.errors import ConfigError, RunFolderError
from lightningrl.sanitize import one_line
from lightningrl_training.commands.printing import Page, make_table, shown

if TYPE_CHECKING:
    from lightningrl.figures import Interval
    from lightningrl_runs.notes import RunNotes
    from lightningrl_runs.runs import RunLine

__all__ = ["runs_group"]

MANY: Final = 1_000_000
LONGEST_MODEL: Final = 40
WIDE: Final = 100
"""Columns of a terminal that has room for recipe and model."""
RunNameArgument = Annotated[str, typer.Argument(help="A run's folder, or its name below --runs.", metavar="RUN")]

runs_group = typer.Typer(
    name="runs",
    invoke_without_command=True,
    help="List the runs of a folder: when, recipe, model, steps, held-out reward before and after, state, tags.",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _RunRow:
    """A run as the list has it."""

    name: str
    line: RunLine
    notes: RunNotes
    state: str

    @property
    def steps(self) -> str:
        return "-" if self.line.is_import else f"{self.line.steps}/{self.line.recipe.get('loop.steps', '?')}"

    @property
    def recipe(self) -> str:
        return str(self.line.recipe.get("name", "-"))

    @property
    def model(self) -> str:
        return one_line(str(self.line.recipe.get("policy.model", "-")), LONGEST_MODEL)

    def numbers(self) -> dict[str, Any]:
        validations = self.line.validations
        return {
            "run": self.name,
            "folder": str(self.line.folder),
            "changed": self.line.changed_at,
            "recipe": self.line.recipe.get("name"),
            "model": self.line.recipe.get("policy.model"),
            "steps": self.line.steps,
            "of_steps": self.line.recipe.get("loop.steps"),
            "before": validations[0] if validations else None,
            "after": validations[-1] if len(validations) > 1 else None,
            "minutes": self.line.minutes,
            "state": self.state,
            "tags": list(self.notes.tags),
            "note": self.notes.note,
        }


@runs_group.callback()
def list_runs(
    context: typer.Context,
    runs: RunsOption = Path("runs"),
    tag: Annotated[str | None, typer.Option(help="Only runs that have this tag.", metavar="NAME")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object for each run.")] = False,
) -> None:
    context.obj = runs
    if context.invoked_subcommand is not None:
        return
    if not runs.is_dir():
        raise RunFolderError(f"no folder {str(runs)!r}; give one with --runs, or start a run: lightningrl train RECIPE")
    listed = [each for each in _list_runs(runs) if tag is None or tag in each.notes.tags]
    if as_json:
        for each in listed:
            write_json(each.numbers())
        return
    page = Page()
    if not listed:
        which = f"has the tag {tag!r}" if tag else "is there"
        page.print(f"no run {which} below {shown(str(runs))}")
        return
    has_notes = any(each.notes.tags or each.notes.note for each in listed)
    beside = ("recipe", "model") if page.width >= WIDE else ()
    columns = [
        Column(name, overflow="fold", no_wrap=name in {"when", "state"}) for name in ("run", "when", *beside, "state")
    ]
    table = make_table(*columns, numbers=("steps", "held out"))
    if has_notes:
        table.add_column("tags and note", overflow="fold")
    for each in listed:
        first_line = each.notes.note.partition("\n")[0]
        remark = " ".join([*(f"+{name}" for name in each.notes.tags), *([first_line] if first_line else [])])
        cells = [each.name, each.line.day, *((each.recipe, each.model) if beside else ()), each.state]
        cells += [each.steps, _held_out(each.line)]
        table.add_row(*map(shown, [*cells, *([remark] if has_notes else [])]))
    page.table(table)
    for each in listed:
        for problem in filter(None, (each.line.problem, each.notes.problem)):
            page.print(f"{shown(each.name)}: {shown(problem)}")


@runs_group.command("compare")
def compare_runs(
    context: typer.Context,
    first: RunNameArgument,
    second: RunNameArgument,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Say in which settings two runs differ, their numbers side by side, and which is better on the held-out tasks."""
    from lightningrl_runs.runs import differences

    folders = [_find(name, context.obj) for name in (first, second)]
    if folders[0].resolve() == folders[1].resolve():
        raise ConfigError(f"both are run {str(folders[0])!r}; name two runs")
    lines = [_line_of(folder) for folder in folders]
    differing = differences(lines)
    left, right = map(_metrics, folders, lines)
    metrics = {name: [left[name], right[name]] for name in left}
    difference, verdict = _judge(folders, lines)
    if as_json:
        interval = (
            None if difference is None else {"mean": difference.mean, "low": difference.low, "high": difference.high}
        )
        names = [str(folder) for folder in folders]
        write_json(
            {"runs": names, "settings": differing, "metrics": metrics, "difference": interval, "verdict": verdict}
        )
        return
    page, names = Page(), [shown(line.name) for line in lines]
    table = make_table("", numbers=tuple(names))
    for key, values in differing.items():
        table.add_row(shown(key), *(shown(one_line("-" if value is None else str(value), 60)) for value in values))
    for name, numbers in metrics.items():
        table.add_row(name, *("-" if value is None else f"{value:,.4g}" for value in numbers))
    page.table(table)
    if not differing:
        page.print("their recipes do not differ, names and places aside")
    page.print(f"[bold]{shown(verdict)}[/]")


@runs_group.command("tag", context_settings={"ignore_unknown_options": True})
def tag_run(
    context: typer.Context,
    run: RunNameArgument,
    changes: Annotated[
        list[str] | None, typer.Argument(help="Tags to add and to remove; none = say them.", metavar="+NAME -NAME")
    ] = None,
) -> None:
    """Put tags on a run, and take some off: lightningrl runs tag RUN +baseline -draft."""
    from lightningrl_runs.notes import write_notes

    folder, notes = _notes_of(run, context.obj)
    tags = set(notes.tags)
    for change in changes or ():
        sign, name = change[:1], change[1:]
        if sign not in {"+", "-"} or not name:
            raise ConfigError(
                f"{change!r} neither adds nor removes a tag; write +{change or 'NAME'} or -{change or 'NAME'}"
            )
        if sign == "-" and name not in tags:
            has = f"it has: {', '.join(sorted(tags))}" if tags else "it has none"
            raise ConfigError(f"run {str(folder)!r} has no tag {name!r}; {has}")
        tags = tags | {name} if sign == "+" else tags - {name}
    if changes:
        write_notes(folder, replace(notes, tags=tuple(sorted(tags))))
    Page().print(f"{shown(str(folder))}: {shown(' '.join(sorted(tags))) or 'no tags'}")


@runs_group.command("note")
def note_run(
    context: typer.Context,
    run: RunNameArgument,
    text: Annotated[str | None, typer.Argument(help='The note; "" removes it, none = say it.', metavar="TEXT")] = None,
) -> None:
    """Write a run's note, which its pages show, too."""
    from lightningrl_runs.notes import write_notes

    folder, notes = _notes_of(run, context.obj)
    if text is not None:
        notes = replace(notes, note=text)
        write_notes(folder, notes)
    Page().print(shown(notes.note.strip()) or f"{shown(str(folder))} has no note")


def _notes_of(run: str, runs: Path) -> tuple[Path, RunNotes]:
    """A run's folder and its notes. Raises RunFolderError."""
    from lightningrl_runs.notes import read_notes

    folder = _find(run, runs)
    notes = read_notes(folder)
    if notes.problem is not None:
        raise RunFolderError(notes.problem)
    return folder, notes


def _metrics(folder: Path, line: RunLine) -> dict[str, float | None]:
    from lightningrl_runs.metrics import read_rows

    validations, last = line.validations, line.rewards[-max(1, len(line.rewards) // 4) :]
    return {
        "steps": line.steps,
        "minutes": line.minutes,
        "tokens": float(sum(row.get("completion_tokens", 0.0) for row in read_rows(folder) if "rollouts" in row)),
        "held-out reward before": validations[0] if validations else None,
        "held-out reward after": validations[-1] if len(validations) > 1 else None,
        "training reward, last quarter": sum(last) / len(last) if last else None,
    }


def _judge(folders: Sequence[Path], lines: Sequence[RunLine]) -> tuple[Interval | None, str]:
    """The difference of the last validations, with a sentence: by seed where both settings have several, else task by
    task, which speaks of these two policies alone."""
    from lightningrl.figures import mean_interval
    from lightningrl_runs.runs import differences

    different = differences(lines)
    if other := [key for key in different if key.startswith("rewards.")]:
        return None, f"not compared: their rewards differ ({', '.join(other[:3])})"
    scores = [_last_validation(folder) for folder in folders]
    common = sorted(scores[0].keys() & scores[1].keys())
    if len(common) < 2:
        return (
            None,
            "not compared: they were not validated on the same tasks; lightningrl eval RUN --against RUN measures it",
        )
    seeds = [_scores_of_seeds(line) for line in lines]
    if not different.keys() <= {"seed"} and all(len(each) > 1 for each in seeds):
        return _judge_by_seed(seeds, lines, tasks=len(common))
    difference = mean_interval([scores[0][task] - scores[1][task] for task in common])
    more = "of these two policies alone: for the setting compare several seeds of each, lightningrl sweep"
    if difference.low is None or difference.high is None:
        how = "alike" if not difference.mean else f"{difference.mean:+.3f} apart on each"
        return difference, f"no difference in chance: {len(common)} held-out tasks are {how}; {more}"
    interval = f"{_shown(difference)}, {len(common)} tasks)"
    if difference.low <= 0.0 <= difference.high:
        return difference, f"no difference shown in held-out reward: {interval}; {more}"
    better = lines[0 if difference.mean > 0 else 1].name
    return difference, f"the policy of {better} is better in held-out reward: {interval}; {more}"


def _judge_by_seed(seeds: Sequence[Sequence[float]], lines: Sequence[RunLine], *, tasks: int) -> tuple[Interval, str]:
    from lightningrl.figures import welch_interval

    difference = welch_interval(seeds[0], seeds[1], grain=1.0 / tasks)
    interval = f"{_shown(difference)}, {len(seeds[0])} and {len(seeds[1])} seeds)"
    if difference.low is None or difference.high is None or difference.low <= 0.0 <= difference.high:
        return difference, f"no difference of the settings shown in held-out reward: {interval}"
    better = lines[0 if difference.mean > 0 else 1].name
    return difference, f"the setting of {better} is better in held-out reward: {interval}"


def _shown(difference: Interval) -> str:
    return f"{difference.mean:+.3f} (95 %: {difference.low:+.3f} to {difference.high:+.3f}"


def _scores_of_seeds(line: RunLine) -> list[float]:
    """The last held-out rewards of a run and of those beside it that differ in their seed alone, one of each seed."""
    from lightningrl_runs.runs import differences, read_runs

    beside = [
        each
        for each in read_runs(line.folder.resolve().parent)
        if each.steps == line.steps and each.validations and differences([line, each]).keys() <= {"seed"}
    ]
    return list({each.recipe.get("seed"): each.validations[-1] for each in (*beside, line)}.values())


def _last_validation(folder: Path) -> dict[str, float]:
    """Mean reward of each task in the last validation, by the task's id and input."""
    import asyncio

    from lightningrl.records import RolloutFilter
    from lightningrl.types import RolloutMode
    from lightningrl_runs.metrics import read_rows
    from lightningrl_runs.reader import ask_run

    steps = [int(row["step"]) for row in read_rows(folder) if "validation/reward" in row]
    if not steps:
        return {}
    where = RolloutFilter(mode=RolloutMode.VALIDATION, step=steps[-1], limit=MANY)
    records = asyncio.run(ask_run(folder, lambda run: run.list_rollouts(where)))
    rewards: dict[str, list[float]] = {}
    for record in records:
        if record.reward is not None:
            rewards.setdefault(f"{record.task.id}\n{record.task.input!r}", []).append(record.reward)
    return {task: sum(values) / len(values) for task, values in rewards.items()}


def _list_runs(runs: Path) -> list[_RunRow]:
    """Runs right below a folder, and those of the sweeps below it, newest first."""
    from lightningrl_runs.notes import read_notes
    from lightningrl_runs.runs import read_runs
    from lightningrl_training.sweeps.plan import PLAN

    homes = [runs, *(path.parent for path in runs.glob(f"*/{PLAN}"))]
    lines = [(home, line) for home in homes for line in read_runs(home)]
    lines.sort(key=lambda pair: -pair[1].changed_at)
    return [
        _RunRow(
            name=line.name if home == runs else f"{home.name}/{line.name}",
            line=line,
            notes=read_notes(line.folder),
            state=_state(line),
        )
        for home, line in lines
    ]


def _state(line: RunLine) -> str:
    from lightningrl.recipe import LoopConfig
    from lightningrl_runs.origin import read_values
    from lightningrl_training.checkpoints import checkpoints

    if line.is_live or line.is_import:
        return "running" if line.is_live else "imported"
    made = checkpoints(line.folder)
    if not made:
        return "not begun"
    values = {
        key.removeprefix("loop."): value for key, value in read_values(line.folder).items() if key.startswith("loop.")
    }
    loop, state = LoopConfig.model_validate(values), made[-1].state
    is_late = loop.minutes is not None and state.seconds > loop.minutes * 60
    is_done = state.step >= loop.steps or is_late or state.has_reached(loop) or state.has_lost_patience(loop)
    return "done" if is_done else "stopped"


def _held_out(line: RunLine) -> str:
    validations = line.validations
    if not validations:
        return "-"
    return f"{validations[0]:.3f}" + (f" → {validations[-1]:.3f}" if len(validations) > 1 else "")


def _find(run: str, runs: Path) -> Path:
    """A run by its folder, or by its name in a list. Raises RunFolderError."""
    from lightningrl_runs.origin import is_own

    for folder in (Path(run), runs / run):
        if is_own(folder):
            return folder
    raise RunFolderError(
        f"no run {run!r}, neither here nor below {str(runs)!r}; `lightningrl runs --runs {shlex.quote(str(runs))}` "
        "lists them"
    )


def _line_of(folder: Path) -> RunLine:
    from lightningrl_runs.runs import read_runs

    line = next((line for line in read_runs(folder.resolve().parent) if line.name == folder.resolve().name), None)
    if line is None:
        raise RunFolderError(f"run {str(folder)!r} never began; there is nothing to compare")
    return line
