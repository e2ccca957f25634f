"""`lightningrl tune`: from rows to a tuned policy, in a run folder of its own."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from lightningrl.console import RunsOption
from lightningrl.errors import ConfigError, LightningError
from lightningrl.plugins import load_plugins
from lightningrl_client.commands import OptionalRecipeArgument, SetOption, read_settings
from lightningrl_training.commands.printing import Page, show_warnings
from lightningrl_training.commands.train import NewRunOption, OverwriteOption

if TYPE_CHECKING:
    from lightningrl.recipe import Recipe
    from lightningrl_training.run_folder import RunFolder

__all__ = ["tune"]

Data = typer.Option(help="Rows, a .jsonl file or a folder of `lightningrl curate` (tune.data).")
Method = typer.Option(help="How it learns from them (tune.method).", metavar="sft|dpo|kto")


def tune(
    recipe: OptionalRecipeArgument = None,
    data: Annotated[Path | None, Data] = None,
    method: Annotated[str | None, Method] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an earlier run of tune.")] = False,
    overwrite: OverwriteOption = False,
    run: NewRunOption = None,
    runs: RunsOption = Path("runs"),
    policy: Annotated[str | None, typer.Option(help="Hub name or folder of the model to tune (policy.model).")] = None,
    settings: SetOption = None,
) -> None:
    """Tune the policy of RECIPE on rows, without a rollout: on answers to imitate (sft), on pairs (dpo), or on answers
    that are good or bad (kto).

    Examples:
      [bold]lightningrl tune my_recipe.toml --data rows[/]
      [bold]lightningrl tune my_recipe.toml --data rows --method dpo --set tune.epochs=1[/]
      [bold]lightningrl tune --resume --run runs/my-tune[/]
    The tuned policy is a folder in the run, which `lightningrl train --policy` goes on from.
    """
    from lightningrl.recipe_keys import recipe_path
    from lightningrl_runs.origin import newest_run
    from lightningrl_training.models import resolve_model
    from lightningrl_training.run_folder import RunFolder, default_run
    from lightningrl_training.start import read_source
    from lightningrl_training.tuning.settings import TuneSettings

    shortcuts = {"policy.model": policy, "tune.data": None if data is None else str(data), "tune.method": method}
    chosen = read_settings(settings, shortcuts)
    console = Console()
    show_warnings(console)
    if resume:
        folder, tuned = RunFolder.resume(run or newest_run(runs), chosen, recipe, tunes=True)
        try:
            _tune(console, tuned, folder, _find_model(tuned))
        finally:
            folder.close()
        return
    if recipe is None:
        raise ConfigError("no recipe given; write `lightningrl tune RECIPE --data ROWS`")
    tuned, wrong = read_source(recipe, chosen)
    if wrong:
        raise ConfigError(*wrong)
    TuneSettings.read(tuned.tune, tuned.folder)
    model = _find_model(tuned)
    path = run if run is not None else default_run(runs, f"{tuned.name}-tune")
    origin, models = str(recipe_path(recipe).resolve()), {tuned.policy.name: model}
    models |= {name: resolve_model(name, other, tuned.folder) for name, other in tuned.policies.items()}
    folder = RunFolder.create(path, tuned, origin, chosen, models=models, overwrite=overwrite)
    try:
        (folder.path / "tune").mkdir(exist_ok=True)
        _tune(console, tuned, folder, model)
    except LightningError:
        if folder.latest() is None:
            folder.discard()
        raise
    finally:
        folder.close()


def _find_model(recipe: Recipe) -> str:
    from lightningrl_training.models import check_on_hub, check_rendering, resolve_model

    name, policy = recipe.policy.name, recipe.policy
    model = resolve_model(name, policy, recipe.folder)
    check_on_hub(name, model)
    check_rendering(name, policy, model, recipe.folder)
    return model


def _tune(console: Console, recipe: Recipe, folder: RunFolder, model: str) -> None:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from lightningrl_runs.origin import RunOrigin
    from lightningrl_training.tuning.loss_curve import draw_losses
    from lightningrl_training.tuning.session import build_backend, make_renderer, read_data, tune_policy
    from lightningrl_training.tuning.settings import TuneSettings

    page, settings, plugins = Page(), TuneSettings.read(recipe.tune, recipe.folder), load_plugins()
    renderer = make_renderer(recipe, model)
    data = read_data(settings, renderer)
    steps = data.steps(settings)
    page.print(
        f"[bold]{recipe.name}[/]: {settings.method} on {len(data.training)} rows, {len(data.validation)} held out; "
        f"{steps} updates, backend {recipe.backend}\nrun folder {folder.path}"
    )
    for reason, count in data.left_out.most_common():
        page.print(f"left out: {count} × {reason}", markup=False)
    backend = build_backend(recipe, plugins, model, settings, data)
    columns = (TextColumn("update"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[said]}"))
    try:
        with Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal) as bars:
            bar = bars.add_task("update", total=steps, said="")
            began: list[tuple[float, int]] = []

            def show(step: int, of: int, metrics: Mapping[str, float]) -> None:
                values = ", ".join(
                    f"{name.removeprefix('learn/')} {metrics[name]:.4g}"
                    for name in ("learn/loss", "learn/accuracy", "validation/loss", "validation/accuracy")
                    if name in metrics
                )
                values = ", ".join(filter(None, (values, _pace(began, step, of))))
                bars.update(bar, completed=step, said=values)
                if not console.is_terminal and values:
                    page.print(f"update {step}/{of}: {values}")

            result = tune_policy(recipe, folder, backend, data, settings, renderer, show)
    finally:
        backend.close()
    draw_losses(folder.metrics, folder.curve, title=f"{recipe.name}: {settings.method}")
    typed, run = shlex.quote(str(result.policy)), shlex.quote(str(folder.path))
    source = RunOrigin.read(folder.path).source
    of = "RECIPE" if source is None else shlex.quote(os.path.relpath(source))
    which = "" if result.loss is None else f", the best by validation (loss {result.loss:.4g})"
    page.print(f"\n[bold]done:[/] weights after update {result.step}{which}")
    page.print(f"  curve    {folder.curve}\n  look     lightningrl view {run}")
    page.print(f"  next     lightningrl train {of} --policy {typed}")
    page.print(f"  measure  lightningrl eval {typed} --recipe {of}")
    page.print(f"  weights  lightningrl export weights --run {run}")


def _pace(began: list[tuple[float, int]], step: int, of: int) -> str:
    """Say the rate of updates and the time left, from the second call on. `began`: when which update was the first."""
    began += [] if began else [(time.monotonic(), step)]
    seconds, updates = time.monotonic() - began[0][0], step - began[0][1]
    if not updates:
        return ""
    minutes, rest = divmod(round(seconds / updates * (of - step)), 60)
    return f"{seconds / updates:.2g} s an update, left {minutes}:{rest:02d}"
