"""Commands that look at what a run learned, and their options: evaluation, certificate, branches, X-ray, another
reward."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lightningrl.commands import describe_command
from lightningrl.console import RunsOption
from lightningrl_client.commands import SetOption, WorkersOption, read_settings
from lightningrl_training.commands.declarations import RecipeArgument, RunArgument, StopAtOption

__all__ = ["COMMANDS"]

StepsOption = Annotated[str | None, typer.Option(help="Only of these steps: 3, 3-7 or 1,4,9.")]


def branch(
    run: RunArgument,
    rollout_id: Annotated[str, typer.Argument(help="A rollout's id, from `rollouts list`.", metavar="ROLLOUT")],
    at: Annotated[
        list[int] | None, typer.Option(help="After so many calls; may be given again. By default after each.")
    ] = None,
    samples: Annotated[int, typer.Option(help="Branches at each.")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object for each state.")] = False,
    workers: WorkersOption = None,
    settings: SetOption = None,
) -> None:
    """Say what each state of a rollout is worth: run its agent anew, answer its first calls as they were, sample the
    rest.

    Each call is then worth the difference of the states before and after it. What the agent does not ask again (a
    clock, a random id, a tool that changed) ends its branch as `diverged`, with the reason. The run stays as it is.

    Examples:
      [bold]lightningrl branch runs/mine g000017-003[/]
      [bold]lightningrl branch runs/mine g000017-003 --at 2 --samples 16[/]
    """
    from lightningrl_training.commands.branch import branch_command

    branch_command(
        run, rollout_id, at=at, samples=samples, as_json=as_json, settings=read_settings(settings, workers=workers)
    )


def sweep(
    recipe: RecipeArgument,
    seeds: Annotated[
        int | None,
        typer.Option(help="Runs of each setting; by default one.", min=1, show_default=False),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="A key of the recipe with one value, or with several to compare, e.g. "
            "--set learner.learning_rate=1e-5,1e-4. May be repeated.",
            metavar="KEY=VALUE,…",
        ),
    ] = None,
    stop_at: StopAtOption = None,
    jobs: Annotated[int, typer.Option(help="Runs at a time.", min=1)] = 1,
    sweep: Annotated[
        Path | None,
        typer.Option("--sweep", help="The sweep's folder; by default one below --runs, which the same command finds."),
    ] = None,
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
    from lightningrl_training.commands.sweep import sweep_command

    target = [] if stop_at is None else [f"loop.stop_at={stop_at!r}"]
    sweep_command(
        recipe, settings=[*(settings or ()), *target], seeds=seeds, jobs=jobs, sweep=sweep, runs=runs, as_json=as_json
    )


PolicyArgument = Annotated[
    str,
    typer.Argument(
        help="RUN, RUN@best, RUN@40; a model folder or GGUF file; MODEL@https://… of a provider.", metavar="POLICY"
    ),
]
AgainstOption = Annotated[
    str | None, typer.Option(help="Another policy on the same tasks, or a file of an earlier evaluation.")
]
RecipeOption = Annotated[
    Path | None, typer.Option(help="Agent, tasks and rewards; by default the run's.", metavar="RECIPE")
]
TasksOption = Annotated[
    str | None,
    typer.Option(
        help="A file, hf:NAME:SPLIT, or a loader, file.py:name (docs/how-to/tasks.md); by default the validation tasks."
    ),
]
TemperatureOption = Annotated[
    float | None, typer.Option(help="By default as validation samples; several samples as training does.")
]
SlicesOption = Annotated[
    list[str] | None, typer.Option("--slice", help="Means by this key of the tasks' metadata; may be repeated.")
]
StopEveryOption = Annotated[
    int | None,
    typer.Option(
        "--stop-every", help="Look at the difference after so many tasks, and stop once it is decided.", metavar="N"
    ),
]
ApiKeyEnvOption = Annotated[
    str | None, typer.Option(help="Environment variable with the provider's key.", metavar="NAME")
]
PriceOption = Annotated[
    tuple[float, float] | None,
    typer.Option(help="Of a million prompt and of a million completion tokens of POLICY.", metavar="IN OUT"),
]
AgainstPriceOption = Annotated[
    tuple[float, float] | None, typer.Option(help="The same of the other policy.", metavar="IN OUT")
]
OutOption = Annotated[Path | None, typer.Option(help="The results' .json file; by default in the run's evaluations/.")]


def evaluate(
    policy: PolicyArgument,
    against: AgainstOption = None,
    recipe: RecipeOption = None,
    tasks: TasksOption = None,
    limit: Annotated[int | None, typer.Option(help="So many of the tasks, at random.")] = None,
    samples: Annotated[int, typer.Option(help="Rollouts of each task; several give pass@k.")] = 1,
    temperature: TemperatureOption = None,
    passes: Annotated[float | None, typer.Option(help="The least reward that passes; by default the most.")] = None,
    slices: SlicesOption = None,
    stop_every: StopEveryOption = None,
    api_key_env: ApiKeyEnvOption = None,
    price: PriceOption = None,
    against_price: AgainstPriceOption = None,
    out: OutOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    workers: WorkersOption = None,
    settings: SetOption = None,
) -> None:
    """Say how good a policy is on held-out tasks, with the run's agent and rewards, and which of two is better: better,
    worse, or not enough tasks.

    Examples:
      [bold]lightningrl eval runs/mine[/]
      [bold]lightningrl eval runs/mine --samples 8 --slice difficulty[/]
      [bold]lightningrl eval runs/mine@best --against runs/mine@newest --stop-every 25[/]
      [bold]lightningrl eval runs/mine --against gpt-5-mini@https://api.openai.com/v1 --api-key-env OPENAI_API_KEY[/]
    """
    from lightningrl_training.commands.evaluate import evaluate_command

    evaluate_command(
        policy,
        recipe=recipe,
        against=against,
        tasks=tasks,
        limit=limit,
        samples=samples,
        temperature=temperature,
        passes=passes,
        slices=slices or [],
        stop_every=stop_every,
        api_key_env=api_key_env,
        price=price,
        against_price=against_price,
        out=out,
        as_json=as_json,
        settings=read_settings(settings, workers=workers),
    )


def certify_run(
    run: RunArgument, as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False
) -> None:
    """Say whether a run trained what was sampled: each trained token sampled, once, after the same tokens, and as
    probable to the trainer as to the engine, by version, call and position. Ends with status 1 where it did not.

    Example:
      [bold]lightningrl certify runs/mine[/]
    """
    from lightningrl_training.commands.certify import certify_command

    certify_command(run, as_json=as_json)


def xray(
    run: RunArgument,
    rollout: Annotated[
        str | None, typer.Option(help="Of its group alone, with a heat map of this rollout: turns by methods.")
    ] = None,
    steps: StepsOption = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="Another method to show: a name with its reference or its options, as in a recipe. May be repeated.",
            metavar="NAME=USE",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as one JSON object.")] = False,
) -> None:
    """Say what every installed method of credit makes of a run's rollouts: where they disagree, and which of them are
    the same here.

    From the record alone: nobody is asked, nothing is trained, the run stays as it is. The run's own method comes
    first, and is compared with what the run used.

    Examples:
      [bold]lightningrl xray runs/mine[/]
      [bold]lightningrl xray runs/mine --rollout g000017-003[/]
      [bold]lightningrl xray runs/mine --method mine=credit.py:Mine[/]
      [bold]lightningrl xray runs/mine --method 'steep={use = "turns", options = {gamma = 0.5}}'[/]
    """
    from lightningrl_training.commands.xray import xray_command

    xray_command(run, rollout=rollout, steps=steps, methods=read_settings(method), as_json=as_json)


def rescore(
    run: RunArgument,
    reward: Annotated[
        str | None,
        typer.Option(help='The reward to try: "file.py:new", or an installed one\'s name.', metavar="REFERENCE"),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Which of the recipe's rewards it stands for; needed where there are several.")
    ] = None,
    steps: StepsOption = None,
    write: Annotated[bool, typer.Option("--write", help="Keep the rewards: of an imported run alone.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as one JSON object.")] = False,
    settings: SetOption = None,
) -> None:
    """Try a reward on a run's stored rollouts: which would have earned otherwise, which groups would have taught, whose
    credit turns.

    The new reward is called for every trained rollout; what else was computed is taken from the record. Nothing is
    trained, the run stays as it is, but an imported one with --write.

    Examples:
      [bold]lightningrl rescore runs/mine --reward rewards.py:stricter[/]
      [bold]lightningrl rescore runs/mine --set rewards.brief.weight=0.2[/]
    """
    from lightningrl_training.commands.rescore import rescore_command

    chosen = read_settings(settings)
    rescore_command(run, reward=reward, name=name, steps=steps, settings=chosen, as_json=as_json, write=write)


RunNameArgument = Annotated[str, typer.Argument(help="A run's folder, or its name below --runs.", metavar="RUN")]

runs_group = typer.Typer(
    name="runs",
    invoke_without_command=True,
    help="List the runs of a folder: when, recipe, model, steps, held-out reward before and after, state, tags.",
)


@runs_group.callback()
def list_runs(
    context: typer.Context,
    runs: RunsOption = Path("runs"),
    tag: Annotated[str | None, typer.Option(help="Only runs that have this tag.", metavar="NAME")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object for each run.")] = False,
) -> None:
    context.obj = runs
    if context.invoked_subcommand is None:
        from lightningrl_training.commands.runs import list_command

        list_command(runs, tag=tag, as_json=as_json)


@runs_group.command("compare")
def compare_runs(
    context: typer.Context,
    first: RunNameArgument,
    second: RunNameArgument,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Say in which settings two runs differ, their numbers side by side, and which is better on the held-out tasks."""
    from lightningrl_training.commands.runs import compare_command

    compare_command(first, second, runs=context.obj, as_json=as_json)


@runs_group.command("tag", context_settings={"ignore_unknown_options": True})
def tag_run(
    context: typer.Context,
    run: RunNameArgument,
    changes: Annotated[
        list[str] | None, typer.Argument(help="Tags to add and to remove; none = say them.", metavar="+NAME -NAME")
    ] = None,
) -> None:
    """Put tags on a run, and take some off: lightningrl runs tag RUN +baseline -draft."""
    from lightningrl_training.commands.runs import tag_command

    tag_command(run, changes or (), runs=context.obj)


@runs_group.command("note")
def note_run(
    context: typer.Context,
    run: RunNameArgument,
    text: Annotated[str | None, typer.Argument(help='The note; "" removes it, none = say it.', metavar="TEXT")] = None,
) -> None:
    """Write a run's note, which its pages show, too."""
    from lightningrl_training.commands.runs import note_command

    note_command(run, text, runs=context.obj)


COMMANDS = (
    describe_command(sweep),
    describe_command(runs_group),
    describe_command(evaluate, "eval"),
    describe_command(certify_run, "certify"),
    describe_command(branch),
    describe_command(xray),
    describe_command(rescore),
)
