"""Training's commands and their options; the work of each lies in a module of its own, imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lightningrl.commands import describe_command
from lightningrl.console import NewestRunOption, RunsOption
from lightningrl.errors import ConfigError
from lightningrl_client.commands import SetOption, WorkersOption, read_settings

__all__ = ["COMMANDS"]

RECIPE_HELP = "A recipe (.toml or .py), or a folder with a recipe.toml."
RecipeArgument = Annotated[Path, typer.Argument(help=RECIPE_HELP, metavar="RECIPE")]
RunArgument = Annotated[Path, typer.Argument(help="The run folder.", metavar="RUN")]
StopAtOption = Annotated[
    float | None,
    typer.Option(help="Stop once a validation's mean reward is at least this (loop.stop_at).", metavar="REWARD"),
]
OptionalRecipeArgument = Annotated[Path | None, typer.Argument(help=RECIPE_HELP, metavar="RECIPE")]


def init(
    folder: Annotated[Path, typer.Argument(help="Where to put it.", metavar="FOLDER")] = Path("my-agent"),
    stack: Annotated[
        str,
        typer.Option(
            "--from",
            help="What the agent is written with, or the traces that it left.",
            metavar="openai|langgraph|openai-agents|autogen|traces",
        ),
    ] = "openai",
    rows: Annotated[
        Path | None,
        typer.Option(help="With --from traces: a folder of `lightningrl curate`.", metavar="ROWS", show_default=False),
    ] = None,
) -> None:
    """Write a small agent of your own, its reward, a recipe and a tiny policy made on this machine: it learns in about
    a minute."""
    from lightningrl_training.commands.init import init_command

    init_command(folder, stack, rows)


def try_recipe(
    recipe: Annotated[
        str | None, typer.Argument(help=f"{RECIPE_HELP} With --harness: what it is to do.", metavar="RECIPE|TEXT")
    ] = None,
    task: Annotated[str | None, typer.Option(help="Id of the task; by default the first one.")] = None,
    harness: Annotated[
        str | None,
        typer.Option(
            help="Try a coding harness without a recipe: [bold]pi[/], [bold]codex[/], … "
            "(docs/how-to/agents/harnesses.md). It works on an empty folder.",
            metavar="NAME",
        ),
    ] = None,
    policy: Annotated[str | None, typer.Option(help="Hub name or folder of the model (policy.model).")] = None,
    full: Annotated[bool, typer.Option("--full", help="Whole prompts, special tokens included.")] = False,
    settings: SetOption = None,
) -> None:
    """Run the agent once, on one task, and show every call and the reward; twice at once where the recipe runs several
    rollouts in a worker. Nothing is trained, nothing is left behind.

    Examples:
      [bold]lightningrl try my_recipe.toml[/]
      [bold]lightningrl try --harness pi "Write answer.txt" --policy Qwen/Qwen2.5-0.5B-Instruct[/]
    """
    from lightningrl_training.commands.try_one import try_command, try_harness

    more = read_settings(settings, {"policy.model": policy})
    if harness is not None:
        try_harness(harness, recipe, full=full, settings=more)
    elif recipe is None:
        raise ConfigError('name a recipe; or a harness and what it is to do: lightningrl try --harness pi "Write it"')
    else:
        try_command(Path(recipe), task=task, full=full, settings=more)


def doctor(
    recipe: RecipeArgument,
    as_json: Annotated[bool, typer.Option("--json", help="All findings and the bill as one JSON object.")] = False,
    is_brief: Annotated[bool, typer.Option("--brief", help="Warnings, failures and the bill alone.")] = False,
    rehearse: Annotated[
        float,
        typer.Option(
            min=0.0,
            metavar="SECONDS",
            help="For steps after the first, which show how rollouts change as the policy learns; 0 = none.",
        ),
    ] = 40.0,
    runs: RunsOption = Path("runs"),
    settings: SetOption = None,
) -> None:
    """Look before you train: run the agent a few times, take some learning steps on a copy of the weights, say what is
    wrong and what the whole run will cost.

    Each check says pass, warn or fail, by what it was seen and what to do. The bill is of tokens, minutes, memory and
    disk. Nothing is left behind. Exit status 1 where a check failed.

    Examples:
      [bold]lightningrl doctor examples/text_to_sql[/]
      [bold]lightningrl doctor my_recipe.toml --set loop.steps=500 --json[/]
    """
    from lightningrl_training.commands.doctor import doctor_command

    doctor_command(
        recipe, as_json=as_json, is_brief=is_brief, runs=runs, rehearse=rehearse, settings=read_settings(settings)
    )


def redteam(
    recipe: RecipeArgument,
    tasks: Annotated[
        int | None,
        typer.Option(help="So many tasks, at random; by default 32, of an async reward 3.", min=1, show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of their choice.")] = 0,
    seconds: Annotated[float, typer.Option(help="The most that it may take.", min=1.0)] = 120.0,
    gold: Annotated[
        str | None,
        typer.Option(
            help="A function from a task to its best output, file.py:name; by default the answers.", metavar="USE"
        ),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="One mutator by name; may be repeated.", metavar="NAME")
    ] = None,
    search: Annotated[
        int, typer.Option(help="Look through so many rollouts of the recipe's own policy, too; it is loaded.", min=0)
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as one JSON object.")] = False,
    settings: SetOption = None,
) -> None:
    """Attack the rewards before a policy does: reward empty, wrong, forged and right outputs, and say which earn what
    they should not.

    Nothing is trained, and without --search no policy is loaded. Exit status 1 where something was found.

    Examples:
      [bold]lightningrl redteam examples/text_to_sql[/]
      [bold]lightningrl redteam my_recipe.toml --gold gold.py:best --tasks 100[/]
    """
    from lightningrl_training.commands.redteam import redteam_command

    options = {"tasks": tasks, "seed": seed, "seconds": seconds, "gold": gold, "only": only or ()}
    redteam_command(recipe, as_json=as_json, search=search, settings=read_settings(settings), **options)


def train(
    recipe: OptionalRecipeArgument = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an earlier run: nothing is lost, nothing is trained twice.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Write over the run that the folder holds.")] = False,
    run: Annotated[
        Path | None, typer.Option("--run", help="The run folder; by default a new one below --runs.")
    ] = None,
    runs: RunsOption = Path("runs"),
    policy: Annotated[str | None, typer.Option(help="Hub name or folder of the model to train (policy.model).")] = None,
    backend: Annotated[str | None, typer.Option(help="Trainer backend, by name (see `lightningrl plugins`).")] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps (loop.steps).")] = None,
    minutes: Annotated[float | None, typer.Option(help="Stop training after so many minutes (loop.minutes).")] = None,
    stop_at: StopAtOption = None,
    seed: Annotated[int | None, typer.Option(help="Seed of tasks, sampling and weights (loop.seed).")] = None,
    workers: WorkersOption = None,
    host: Annotated[
        str | None,
        typer.Option(
            help="Address to listen on; 0.0.0.0 where other machines' workers take part (runtime.server_host)."
        ),
    ] = None,
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
    from lightningrl_training.commands.train import train_command

    shortcuts: dict[str, Any] = {
        "policy.model": policy,
        "backend": backend,
        "loop.steps": steps,
        "loop.minutes": minutes,
        "loop.stop_at": stop_at,
        "loop.seed": seed,
        "runtime.server_host": host,
    }
    train_command(
        recipe,
        resume=resume,
        overwrite=overwrite,
        run=run,
        runs=runs,
        settings=read_settings(settings, shortcuts, workers=workers),
    )


def tune(
    recipe: OptionalRecipeArgument = None,
    data: Annotated[
        Path | None, typer.Option(help="Rows, a .jsonl file or a folder of `lightningrl curate` (tune.data).")
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="How it learns from them (tune.method).", metavar="sft|dpo|kto")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an earlier run of tune.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Write over the run that the folder holds.")] = False,
    run: Annotated[
        Path | None, typer.Option("--run", help="The run folder; by default a new one below --runs.")
    ] = None,
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
    from lightningrl_training.commands.tune import tune_command

    shortcuts = {"policy.model": policy, "tune.data": None if data is None else str(data), "tune.method": method}
    tune_command(
        recipe, resume=resume, overwrite=overwrite, run=run, runs=runs, settings=read_settings(settings, shortcuts)
    )


def serve(
    recipe: OptionalRecipeArgument = None,
    run: Annotated[Path | None, typer.Option("--run", help="Serve the newest checkpoint of this run folder.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 = any free one.", min=0, max=65535)] = 8600,
    store_url: Annotated[
        str | None,
        typer.Option(help="A PostgreSQL database for what is served, in a schema of its own that goes in the end."),
    ] = None,
    settings: SetOption = None,
) -> None:
    """Serve the policy behind an OpenAI-compatible endpoint without training it, and print a base URL and key to try it
    with.

    Workers on this or other machines join with `lightningrl work`.
    """
    from lightningrl_training.commands.serve import serve_command

    serve_command(recipe, run=run, host=host, port=port, settings=read_settings(settings, {"store_url": store_url}))


def export(
    target: Annotated[Path, typer.Argument(help="Where to write the folder, or with --gguf the file.")],
    run: NewestRunOption = None,
    runs: RunsOption = Path("runs"),
    policy: Annotated[str | None, typer.Option(help="Which policy, where the run has several.")] = None,
    step: Annotated[
        str | None,
        typer.Option(
            help="Whose weights; by default the best by validation, where there was any.", metavar="best|newest|STEP"
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="By default that of the run's starting folder.", metavar="float32|bfloat16|float16"),
    ] = None,
    gguf: Annotated[
        str | None,
        typer.Option(
            help="Write a file for llama.cpp and Ollama instead, in this precision.", metavar="f16|q8_0|bf16|f32"
        ),
    ] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="Write what LoRA learned alone, for peft.")] = False,
    push_to_hub: Annotated[
        str | None,
        typer.Option(help="Send it to the Hugging Face hub, too, to a private repository.", metavar="OWNER/NAME"),
    ] = None,
    check: Annotated[
        int,
        typer.Option(
            min=0,
            help="Ask what was written so many validation calls again, by transformers, vLLM or llama.cpp; fail at the "
            "first token that differs.",
            metavar="N",
        ),
    ] = 0,
) -> None:
    """Write a run's best or newest weights as an ordinary transformers folder (LoRA merged), which asks, samples and
    stops as the run did; as a GGUF file; or as an adapter."""
    from lightningrl_training.commands.export import export_command

    form = {
        "policy": policy,
        "dtype": dtype,
        "gguf": gguf,
        "adapter": adapter,
        "push_to_hub": push_to_hub,
        "check": check,
    }
    export_command(target, run=run, runs=runs, step=step, **form)


def show_recipe(recipe: RecipeArgument, settings: SetOption = None) -> None:
    """Show every value that a run of RECIPE would have, and where it is from: the file, --set, or a default."""
    from lightningrl_training.commands.recipe import show_command

    show_command(recipe, settings=read_settings(settings))


recipes = typer.Typer(name="recipe", no_args_is_help=True, help="Look at a recipe.")
recipes.command("show")(show_recipe)

COMMANDS = (
    describe_command(init),
    describe_command(try_recipe, "try"),
    describe_command(doctor),
    describe_command(redteam),
    describe_command(train),
    describe_command(tune),
    describe_command(serve),
    describe_command(export),
    describe_command(recipes),
)
