"""`lightningrl sweep`: a recipe's runs over seeds and settings, and what they show."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Column

from lightningrl.console import RunsOption, cancel_on_signals, escape, write_json
from lightningrl.errors import ConfigError, Interruption, LightningError, RunFolderError
from lightningrl.plugins import load_plugins
from lightningrl_client.commands import RecipeArgument
from lightningrl_training.commands.printing import Page, make_table, shown
from lightningrl_training.commands.train import StopAtOption

if TYPE_CHECKING:
    from lightningrl.figures import Interval
    from lightningrl.recipe import Recipe
    from lightningrl_training.sweeps.comparison import SettingResult, SweepResult
    from lightningrl_training.sweeps.plan import Point, SweepPlan
    from lightningrl_training.sweeps.runner import ShowRun

__all__ = ["sweep"]

logger = logging.getLogger(__name__)

Seeds = typer.Option(help="Runs of each setting; by default one.", min=1, show_default=False)
Settings = typer.Option(
    "--set",
    help="A key of the recipe with one value, or with several to compare, e.g. "
    "--set learner.learning_rate=1e-5,1e-4. May be repeated.",
    metavar="KEY=VALUE,…",
)
Folder = typer.Option("--sweep", help="The sweep's folder; by default one below --runs, which the same command finds.")


def sweep(
    recipe: RecipeArgument,
    seeds: Annotated[int | None, Seeds] = None,
    settings: Annotated[list[str] | None, Settings] = None,
    stop_at: StopAtOption = None,
    jobs: Annotated[int, typer.Option(help="Runs at a time.", min=1)] = 1,
    sweep: Annotated[Path | None, Folder] = None,
    runs: RunsOption = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="The result as one JSON object.")] = False,
) -> None:
    """Train a recipe with each of several settings and seeds, and say which setting is better, or that no difference is
    shown.

    Killed at any time, the same command goes on: runs that have ended are not run again, one that was interrupted is
    resumed. Exit status 1 where a run failed.

    Examples:
      [bold]lightningrl sweep my_recipe.toml --seeds 3[/]
      [bold]lightningrl sweep my_recipe.toml --seeds 3 --set loop.group_size=4,8[/]
      [bold]lightningrl sweep my_recipe.toml --seeds 5 --stop-at 0.9[/]
    """
    from lightningrl.files import write_durably
    from lightningrl_training.run_folder import explain_name, take_lock
    from lightningrl_training.sweeps.comparison import compare_sweep
    from lightningrl_training.sweeps.plan import default_sweep, make_plan, open_plan

    page = Page()
    target = [] if stop_at is None else [f"loop.stop_at={stop_at!r}"]
    plan = make_plan(recipe, [*(settings or ()), *target], seeds=seeds)
    first = plan.read_recipe(plan.points[0])
    if (problem := explain_name(first.name)) is not None:
        raise ConfigError(problem)
    folder = sweep or default_sweep(runs, plan, first.name)
    _check(plan, folder)
    is_old = open_plan(plan, folder)
    lock = take_lock(folder, kind="sweep", option="--sweep")
    try:
        if not as_json:
            _introduce(page, plan, folder, is_old=is_old)
        _run(plan, folder, jobs=jobs)
        result = compare_sweep(plan, folder, first)
        write_durably(folder / "sweep.json", json.dumps(result.numbers(), indent=1, ensure_ascii=False) + "\n")
        picture = _draw(result, folder, first)
    finally:
        lock.close()
    if as_json:
        write_json(result.numbers())
    else:
        _print(page, result, folder, picture)
    if result.failures:
        raise LightningError(
            f"{len(result.failures)} of {len(plan.points)} runs failed; mend that, then give the same command again"
        )


def _check(plan: SweepPlan, folder: Path) -> None:
    """Raise ConfigError, before the first run, for what is wrong with any setting that has a run to come."""
    from lightningrl_training.checks import build_checked
    from lightningrl_training.sweeps.runner import read_finished
    from lightningrl_training.warm_start import explain_warm_start, is_tuned

    finished, plugins = read_finished(folder), load_plugins()
    first = {point.setting: point for point in reversed(plan.points) if finished.get(point.name) != ""}
    for setting, point in first.items():
        try:
            recipe = plan.read_recipe(point)
            mistakes = [] if is_tuned(folder / point.name) else explain_warm_start(recipe)
            build_checked(recipe, plugins, will_work=True, wrong=mistakes)
        except ConfigError as error:
            raise ConfigError(*(f"{setting}: {sentence}" if setting else sentence for sentence in error.args)) from None


def _run(plan: SweepPlan, folder: Path, *, jobs: int) -> None:
    import asyncio

    from lightningrl_training.sweeps.runner import SweepRunner

    async def work(show: ShowRun) -> None:
        cancel_on_signals()
        await SweepRunner(plan=plan, folder=folder, jobs=jobs, show=show).run()

    with _showing(plan) as show:
        try:
            asyncio.run(work(show))
        except asyncio.CancelledError:
            raise Interruption("stopped; nothing is lost: the same command goes on with the sweep") from None
        except ExceptionGroup as group:
            error = group.exceptions[0]
            raise (error if isinstance(error, LightningError) else group) from None


@contextmanager
def _showing(plan: SweepPlan) -> Iterator[ShowRun]:
    """Show a bar of the whole sweep and one of each run that goes on; where nobody looks, a line as a run ends."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    steps, bars, ended = plan.read_recipe(plan.points[0]).loop.steps, dict[str, TaskID](), set[str]()
    with Progress(*columns, console=console, transient=True) as progress:
        whole = progress.add_task("runs", total=len(plan.points))

        def show(point: Point, what: str, made: int) -> None:
            is_end = what not in {"starting", "training"} and not what.endswith("waiting")
            if is_end and point.name not in ended:
                ended.add(point.name)
                progress.advance(whole)
                if point.name in bars:
                    progress.remove_task(bars.pop(point.name))
                    line = f"{len(ended)}/{len(plan.points)} {point.name}: {what}"
                    progress.console.print(escape(line), highlight=False, soft_wrap=True)
            elif not is_end:
                if point.name not in bars:
                    bars[point.name] = progress.add_task(escape(point.name), total=steps)
                progress.update(bars[point.name], description=f"{escape(point.name)}: {what}", completed=made)

        yield show


def _introduce(page: Page, plan: SweepPlan, folder: Path, *, is_old: bool) -> None:
    from lightningrl_training.sweeps.runner import read_finished

    seeds = f"seeds {', '.join(map(str, plan.seeds))}" if len(plan.seeds) > 1 else f"seed {plan.seeds[0]}"
    page.print(f"{len(plan.settings)} settings × {seeds}: {len(plan.points)} runs in {shown(str(folder))}")
    if is_old:
        done = sum(why == "" for why in read_finished(folder).values())
        page.print(f"going on: {done} of {len(plan.points)} runs have ended, and are not run again")


def _draw(result: SweepResult, folder: Path, recipe: Recipe) -> Path | None:
    from lightningrl_training.sweeps.curves import draw_sweep

    try:
        return draw_sweep(result, folder, title=f"{recipe.name}: {result.measure}")
    except (ConfigError, RunFolderError) as error:
        logger.warning("%s", error)
        return None


def _print(page: Page, result: SweepResult, folder: Path, picture: Path | None) -> None:
    table = make_table(
        Column("setting", overflow="fold"), numbers=("seeds", "before", "after", "95 %", "steps", "minutes", "tokens")
    )
    for setting in result.settings:
        table.add_row(*_cells(setting))
    page.table(table)
    for name, problem in result.failures.items():
        page.print(f"failed: {shown(name)}: {shown(problem)}")
    page.print(f"[bold]{shown(result.verdict)}[/]")
    page.print(f"  numbers {shown(str(folder / 'sweep.json'))}")
    if picture is not None:
        page.print(f"  curves  {shown(str(picture))}")
    page.print(f"  look    lightningrl view {shown(shlex.quote(str(folder)))}")


def _cells(result: SettingResult) -> list[str]:
    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    return [
        shown(result.setting) or "all seeds",
        str(len(result.runs)),
        number(result.before, ".3f"),
        number(result.after.mean if result.after else None, ".3f"),
        _ends(result.after),
        number(result.steps, ".4g"),
        number(result.minutes, ".1f"),
        number(result.tokens, ",.0f"),
    ]


def _ends(interval: Interval | None) -> str:
    if interval is None or interval.low is None or interval.high is None:
        return "-"
    return f"{interval.low:.3f} to {interval.high:.3f}"
