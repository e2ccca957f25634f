"""`lightningrl train`: from a recipe to a run folder with weights, metrics and a curve."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from lightningrl.console import RunsOption, cancel_on_signals
from lightningrl.errors import ConfigError, Interruption
from lightningrl_client.commands import OptionalRecipeArgument, SetOption, WorkersOption, read_settings
from lightningrl_training.commands.printing import Page, show_warnings

if TYPE_CHECKING:
    from lightningrl.recipe import Recipe
    from lightningrl_training.build import Parts
    from lightningrl_training.checkpoints import LoopState
    from lightningrl_training.serving import Address
    from lightningrl_training.start import OpenRun

__all__ = ["NewRunOption", "OverwriteOption", "StopAtOption", "train"]

NewRunOption = Annotated[Path | None, typer.Option("--run", help="The run folder; by default a new one below --runs.")]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Write over the run that the folder holds.")]
StopAtOption = Annotated[
    float | None,
    typer.Option(help="Stop once a validation's mean reward is at least this (loop.stop_at).", metavar="REWARD"),
]
Resume = typer.Option("--resume", help="Go on with an earlier run: nothing is lost, nothing is trained twice.")
Host = typer.Option(help="Address to listen on; 0.0.0.0 where other machines' workers take part (runtime.server_host).")


def train(
    recipe: OptionalRecipeArgument = None,
    resume: Annotated[bool, Resume] = False,
    overwrite: OverwriteOption = False,
    run: NewRunOption = None,
    runs: RunsOption = Path("runs"),
    policy: Annotated[str | None, typer.Option(help="Hub name or folder of the model to train (policy.model).")] = None,
    backend: Annotated[str | None, typer.Option(help="Trainer backend, by name (see `lightningrl plugins`).")] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps (loop.steps).")] = None,
    minutes: Annotated[float | None, typer.Option(help="Stop training after so many minutes (loop.minutes).")] = None,
    stop_at: StopAtOption = None,
    seed: Annotated[int | None, typer.Option(help="Seed of tasks, sampling and weights (loop.seed).")] = None,
    workers: WorkersOption = None,
    host: Annotated[str | None, Host] = None,
    settings: SetOption = None,
) -> None:
    """Train the policy of RECIPE: run the agent in parallel, record every call, reward, assign credit, learn, serve the
    new weights.

    Examples:
      [bold]lightningrl train examples/text_to_sql[/]
      [bold]lightningrl train my_recipe.toml --steps 50 --set learner.learning_rate=1e-5[/]
      [bold]lightningrl train my_recipe.toml --workers ray:16 --host 0.0.0.0[/]
      [bold]lightningrl train --resume[/]
    What is wrong, and what it will take, `lightningrl doctor` says before.
    """
    import asyncio

    from lightningrl_training.start import begin_run

    shortcuts: dict[str, Any] = {
        "policy.model": policy,
        "backend": backend,
        "loop.steps": steps,
        "loop.minutes": minutes,
        "loop.stop_at": stop_at,
        "loop.seed": seed,
        "runtime.server_host": host,
    }
    chosen = read_settings(settings, shortcuts, workers=workers)
    console, page = Console(), Page()
    show_warnings(console)
    if recipe is None and not resume:
        raise ConfigError(
            "no recipe given; write `lightningrl train RECIPE`, or `lightningrl train --resume` to go on with the "
            "newest run"
        )
    with begin_run(recipe, run=run, resume=resume, overwrite=overwrite, settings=chosen, runs=runs) as opened:
        _describe(page, opened)
        try:
            state = asyncio.run(_train(console, opened))
        except asyncio.CancelledError:
            shown = shlex.quote(str(_relative(opened.folder.path)))
            raise Interruption(
                f"stopped; nothing is lost: go on with `lightningrl train --resume --run {shown}`"
            ) from None
        _summarize(page, opened, state)


async def _train(console: Console, opened: OpenRun) -> LoopState:
    def say(sentence: str) -> None:
        console.print(sentence, highlight=False, soft_wrap=True)

    def announce(address: Address) -> None:
        say(f"look on: {address.view}")
        if opened.recipe.runtime.workers == 0:
            say(f"no workers here; they join with:  {address.join}")

    cancel_on_signals(lambda: say("stopping: what runs is ended, which takes some seconds"))
    return await opened.train(console, announce)


def _summarize(page: Page, opened: OpenRun, state: LoopState) -> None:
    from lightningrl_training.checkpoints import best_checkpoint

    recipe, shown = opened.recipe, _relative(opened.folder.path)
    typed = shlex.quote(str(shown))
    page.print(f"\n[bold]done:[/] {state.step} steps in {state.seconds / 60:.1f} minutes")
    if opened.folder.curve.is_file():
        page.print(f"  curve    {shown / 'curve.png'}")
    page.print(f"  look     lightningrl view {typed}")
    page.print(f"  rollouts lightningrl rollouts list --run {typed}")
    best = best_checkpoint(opened.folder.path)
    if best is not None:
        whose = f"after step {best.state.step}" if best.state.step else "the policy that it started from"
        page.print(f"  best     {whose}: validation {best.state.score:.3f}")
    for name, policy in recipe.all_policies.items():
        if policy.trainable:
            which = f" --policy {name}" if recipe.policies else ""
            page.print(f"  weights  lightningrl export FOLDER --run {typed}{which}")


def _describe(console: Console, opened: OpenRun) -> None:
    recipe, parts = opened.recipe, opened.parts
    unseen = parts.tasks.validation and not recipe.validation.every
    held_out = f"{len(parts.tasks.validation)} held out{' (validation.every = 0: not looked at)' if unseen else ''}"
    models = ", ".join(_shown_model(name, parts, recipe) for name in parts.models)
    console.print(
        f"[bold]{recipe.name}[/]: {'going on with' if opened.is_resumed else 'training'} {models}"
        f" on {len(parts.tasks.train)} tasks, {held_out}; "
        f"{recipe.loop.tasks_per_step} × {recipe.loop.group_size} rollouts a step, backend {recipe.backend}"
    )
    console.print(f"run folder {_relative(opened.folder.path)}")


def _shown_model(name: str, parts: Parts, recipe: Recipe) -> str:
    model = parts.models[name]
    shown = str(_relative(Path(model))) if Path(model).is_absolute() else model
    if len(parts.models) == 1:
        return shown
    return f"{name} ({shown}{'' if recipe.all_policies[name].trainable else ', frozen'})"


def _relative(path: Path) -> Path:
    """Path relative to here, where it lies below."""
    try:
        return path.resolve().relative_to(Path.cwd())
    except ValueError:
        return path
