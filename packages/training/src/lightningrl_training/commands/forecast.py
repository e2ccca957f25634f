"""`lightningrl forecast` and `lightningrl forecasts`: will a recipe learn, and what were such forecasts worth?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Column

from lightningrl.console import write_json
from lightningrl.errors import ConfigError
from lightningrl_training.commands.printing import Page, make_table, show_warnings, shown
from lightningrl_training.commands.stopping import stoppable
from lightningrl_training.forecast.history import PastRun, make_account, read_runs
from lightningrl_training.forecast.prediction import GainForecast, load_calibration
from lightningrl_training.forecast.record import FORECAST
from lightningrl_training.forecast.trial import RecipeForecast, forecast_recipe
from lightningrl_training.run_sync import run_sync
from lightningrl_training.start import read_source

__all__ = ["forecast_command", "forecasts_command"]

WIDTH: Final = 41
"""Columns of a picture from the least to the most."""


def forecast_command(
    source: Path, *, rollouts: int, is_rehearsed: bool, as_json: bool, settings: Mapping[str, Any]
) -> None:
    show_warnings()
    recipe, wrong = read_source(source, settings)
    with stoppable("stopped"), Console(stderr=True).status("starting") as status:
        made = run_sync(
            forecast_recipe(
                recipe,
                rollouts=rollouts,
                is_rehearsed=is_rehearsed,
                wrong=wrong,
                starting=lambda what: status.update(f"trying {what}"),
            )
        )
    if as_json:
        write_json(
            {
                "forecast": made.forecast.model_dump(),
                "evidence": made.evidence.model_dump(),
                "changes": [
                    {
                        "what": change.what,
                        "why": change.why,
                        "forecast": change.forecast and change.forecast.model_dump(),
                    }
                    for change in made.changes
                ],
                "unlearned": made.unlearned or None,
            }
        )
    else:
        _print_forecast(Page(), made)


def forecasts_command(folders: Sequence[Path], *, as_json: bool) -> None:
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{str(folder)!r} is no folder; name run folders, or a folder above them")
    runs = read_runs(folders)
    if not runs:
        raise ConfigError(
            f"no {FORECAST!r} below {', '.join(repr(str(folder)) for folder in folders)}; each run writes one in its "
            "first steps"
        )
    account = make_account(runs)
    if as_json:
        made = [{"run": str(run.folder), **run.made.model_dump(), "holds": run.holds} for run in runs]
        write_json({**asdict(account), "forecasts": made})
        return
    page = Page()
    ends = [end for run in runs for end in (run.made.forecast.low, run.made.forecast.high)]
    gains = [run.made.outcome.gain for run in runs if run.made.outcome is not None]
    least, most = min(*ends, *gains, 0.0), max(*ends, *gains, 0.0)
    names = ("forecast", "90 %", "gain")
    table = make_table(Column("run", overflow="fold"), numbers=names)
    table.add_column("")
    table.add_column("┄ interval, ● forecast, ◆ gain", no_wrap=True)
    for run in runs:
        table.add_row(*_cells(run), _picture(run, least, most))
    page.table(table)
    if account.coverage is None:
        page.print("no run has ended yet")
        return
    rank = "-" if account.spearman is None else f"{account.spearman:.2f}"
    page.print(
        f"{account.runs} runs have ended: rank correlation {rank}, {100 * account.coverage:.0f} % of the gains within "
        f"their 90 % interval, median error {account.error:.3f}"
    )


def _print_forecast(page: Page, made: RecipeForecast) -> None:
    evidence, calibration = made.evidence, load_calibration().of(made.evidence)
    page.print(
        f"[bold]gain over {evidence.steps} steps: {_signed(made.forecast)}[/], from a mean reward of "
        f"{evidence.reward:.3f} (rewards scaled to 0 to 1)"
    )
    table = make_table(Column("evidence", no_wrap=True), "")
    passes = ", ".join(f"@{k} {share:.3f}" for k, share in evidence.pass_at.items())
    best = ", ".join(f"@{k} {reward:.3f}" for k, reward in evidence.best_at.items())
    form = {"malformed tool calls": evidence.malformed, "cut off": evidence.cut_off, "failed": evidence.failed}
    snr = "-" if evidence.snr is None else f"{evidence.snr:.2f}"
    moved = "not known"
    if evidence.moved is not None:
        moved = (
            f"a rollout {evidence.moved:.3g} nats where it should; what earned is {evidence.raised:+.3g} nats likelier"
        )
    likeliest = "-" if evidence.likeliest is None else f"{evidence.likeliest:.3f}"
    table.add_row("rollouts", f"{evidence.rollouts} in {evidence.groups} groups")
    table.add_row("pass", passes)
    table.add_row("best reward", best)
    table.add_row("reward of a group's likeliest rollout", likeliest)
    if (greedy := evidence.greedy) is not None:
        of = f"greedy answers to {greedy.tasks} validation tasks"
        table.add_row(of, f"{greedy.reward:.3f}")
    table.add_row("surer where right", f"{evidence.knows:+.3f}")
    table.add_row("groups with signal", f"{100 * evidence.signal:.0f} %")
    table.add_row("gradient's signal to noise", snr)
    table.add_row("a step moves", moved)
    if (after := evidence.rehearsed) is not None:
        earned = f"{after.greedy:.3f} greedily, {after.sampled:.3f} sampled"
        table.add_row(f"reward within {after.steps} rehearsed steps", earned)
    table.add_row("form", ", ".join(f"{name} {100 * share:.0f} %" for name, share in form.items()))
    page.table(table)
    if made.unlearned:
        page.print(shown(f"a step was not learned: {made.unlearned}"))
    if made.changes:
        page.print("\nwhat would change it:")
    for change in made.changes:
        then = "" if change.forecast is None else f" → {_signed(change.forecast)}"
        page.print(f"  {shown(change.what)}{then}  [dim]{shown(change.why)}[/]")
    better = calibration.rehearsed
    page.print(
        f"\n[dim]calibrated on {calibration.runs} runs of {calibration.families} tasks; on tasks that it had not seen: "
        f"rank correlation {calibration.spearman:.2f}, {100 * calibration.coverage:.0f} % of the gains within the "
        f"interval{f'; with --rehearse {better.spearman:.2f}' if better else ''}[/]"
    )


def _signed(forecast: GainForecast) -> str:
    return f"{forecast.gain:+.3f} (90 %: {forecast.low:+.3f} to {forecast.high:+.3f})"


def _cells(run: PastRun) -> tuple[str, str, str, str, str]:
    forecast, outcome = run.made.forecast, run.made.outcome
    return (
        shown(run.folder.name),
        f"{forecast.gain:+.3f}",
        f"{forecast.low:+.3f} to {forecast.high:+.3f}",
        "-" if outcome is None else f"{outcome.gain:+.3f}",
        {None: "", True: "within", False: "outside"}[run.holds],
    )


def _picture(run: PastRun, least: float, most: float) -> str:
    def place(value: float) -> int:
        return round((value - least) / max(1e-9, most - least) * (WIDTH - 1))

    forecast, outcome = run.made.forecast, run.made.outcome
    low, high = place(forecast.low), place(forecast.high)
    marks = ["┄" if low <= column <= high else " " for column in range(WIDTH)]
    marks[place(forecast.gain)] = "●"
    if outcome is not None:
        marks[place(outcome.gain)] = "◆"
    return "".join(marks)
