"""The commands and their options; each one's work sits in a module of its own, imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["app"]

HELP = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(
    name="lightningrl",
    no_args_is_help=True,
    context_settings=HELP,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Train the language model inside any agent with reinforcement learning; the agent's code does not change.",
)
rollouts = typer.Typer(
    no_args_is_help=True, context_settings=HELP, help="Look at the rollouts of a run: what was asked, called, answered, earned."
)
recipes = typer.Typer(no_args_is_help=True, context_settings=HELP, help="Look at a recipe.")
new = typer.Typer(
    no_args_is_help=True, context_settings=HELP, help="Start a plugin of your own, from a template that passes its conformance suite."
)
app.add_typer(rollouts, name="rollouts")
app.add_typer(recipes, name="recipe")
app.add_typer(new, name="new")

RecipeArgument = Annotated[
    Path | None, typer.Argument(help="A recipe (.toml or .py), or a folder with a recipe.toml.", metavar="RECIPE", show_default=False)
]
RunOption = Annotated[Path | None, typer.Option("--run", help="The run folder; by default the newest below --runs.", show_default=False)]
RunsOption = Annotated[Path, typer.Option("--runs", help="Where run folders lie.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override one key of the recipe, e.g. --set loop.steps=20. May be repeated.", metavar="KEY=VALUE"),
]
FolderOption = Annotated[Path | None, typer.Option(help="Where to put the package; by default a folder named like it.", show_default=False)]


WorkersOption = Annotated[
    str | None,
    typer.Option(
        help="How many processes run the agent, and where: [bold]4[/] (runtime.workers), [bold]ray[/] = over a Ray cluster "
        "(runtime.launcher), [bold]ray:16[/] = both.",
        metavar="N|WHERE|WHERE:N",
        show_default=False,
    ),
]


def _say_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"lightningrl {version('lightningrl')}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", "-V", help="Say which version this is.", callback=_say_version, is_eager=True)
    ] = False,
) -> None:
    """Train the language model inside any agent with reinforcement learning; the agent's code does not change."""


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="Where to put it.", metavar="FOLDER")] = Path("my-agent"),
) -> None:
    """Write a small agent of your own, its reward, a recipe and a tiny policy made on this machine: it learns in about a minute."""
    from lightningrl.cli.new import init_command

    init_command(folder)


@app.command("try")
def try_recipe(
    recipe: Annotated[Path, typer.Argument(help="A recipe (.toml or .py), or a folder with a recipe.toml.", metavar="RECIPE")],
    task: Annotated[str | None, typer.Option(help="Id of the task; by default the first one.", show_default=False)] = None,
    full: Annotated[bool, typer.Option("--full", help="Whole prompts, special tokens included.")] = False,
    settings: SetOption = None,
) -> None:
    """Run the agent once, on one task, and show every call and the reward. Nothing is trained, nothing is left behind."""
    from lightningrl.cli.try_one import try_command

    try_command(recipe, task=task, full=full, settings=_settings(settings, {}))


@app.command()
def doctor(
    recipe: Annotated[Path, typer.Argument(help="A recipe (.toml or .py), or a folder with a recipe.toml.", metavar="RECIPE")],
    as_json: Annotated[bool, typer.Option("--json", help="All findings and the bill as one JSON object.")] = False,
    is_brief: Annotated[bool, typer.Option("--brief", help="Warnings, failures and the bill alone.")] = False,
    rehearse: Annotated[
        float,
        typer.Option(
            min=0.0, metavar="SECONDS", help="For steps after the first, which show how rollouts change as the policy learns; 0 = none."
        ),
    ] = 40.0,
    runs: RunsOption = Path("runs"),
    settings: SetOption = None,
) -> None:
    """Look before you train: run the agent a few times, take some learning steps on a copy of the weights, say what is wrong and what the
    whole run will cost.

    Each check says pass, warn or fail, by what it was seen and what to do. The bill is of tokens, minutes, memory and disk. Nothing is left
    behind. Exit status 1 where a check failed.

    Examples:
      [bold]lightningrl doctor examples/text_to_sql[/]
      [bold]lightningrl doctor my_recipe.toml --set loop.steps=500 --json[/]
    """
    from lightningrl.cli.doctor import doctor_command

    if status := doctor_command(recipe, as_json=as_json, is_brief=is_brief, runs=runs, rehearse=rehearse, settings=_settings(settings, {})):
        raise typer.Exit(status)


@app.command()
def train(
    recipe: RecipeArgument = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an earlier run: nothing is lost, nothing is trained twice.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Write over the run that the folder holds.")] = False,
    run: Annotated[
        Path | None, typer.Option("--run", help="The run folder; by default a new one below --runs.", show_default=False)
    ] = None,
    runs: RunsOption = Path("runs"),
    policy: Annotated[str | None, typer.Option(help="Hub name or folder of the model to train (policy.model).", show_default=False)] = None,
    backend: Annotated[str | None, typer.Option(help="Trainer backend, by name (see `lightningrl plugins`).", show_default=False)] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps (loop.steps).", show_default=False)] = None,
    minutes: Annotated[float | None, typer.Option(help="Stop training after so many minutes (loop.minutes).", show_default=False)] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of tasks, sampling and weights (loop.seed).", show_default=False)] = None,
    workers: WorkersOption = None,
    host: Annotated[
        str | None,
        typer.Option(
            help="Address to listen on; 0.0.0.0 where other machines' workers take part (runtime.server_host).", show_default=False
        ),
    ] = None,
    settings: SetOption = None,
) -> None:
    """Train the policy of RECIPE: run the agent in parallel, record every call, reward, assign credit, learn, serve the new weights.

    Examples:
      [bold]lightningrl train examples/text_to_sql[/]
      [bold]lightningrl train my_recipe.toml --steps 50 --set learner.learning_rate=1e-5[/]
      [bold]lightningrl train my_recipe.toml --workers ray:16 --host 0.0.0.0[/]
      [bold]lightningrl train --resume[/]
    What is wrong, and what it will take, `lightningrl doctor` says before.
    """
    from lightningrl.cli.train import train_command

    shortcuts: dict[str, Any] = {
        "policy.model": policy,
        "backend": backend,
        "loop.steps": steps,
        "loop.minutes": minutes,
        "loop.seed": seed,
        "runtime.server_host": host,
        **_workers(workers),
    }
    train_command(recipe, resume=resume, overwrite=overwrite, run=run, runs=runs, settings=_settings(settings, shortcuts))


@app.command()
def serve(
    recipe: RecipeArgument = None,
    run: Annotated[Path | None, typer.Option("--run", help="Serve the newest checkpoint of this run folder.", show_default=False)] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 = any free one.", min=0, max=65535)] = 8600,
    store_url: Annotated[
        str | None, typer.Option(help="A PostgreSQL database for what is served, in a schema of its own that goes in the end.")
    ] = None,
    settings: SetOption = None,
) -> None:
    """Serve the policy behind an OpenAI-compatible endpoint without training it, and print a base URL and key to try it with.

    Workers on this or other machines join with `lightningrl work`.
    """
    from lightningrl.cli.serve import serve_command

    serve_command(recipe, run=run, host=host, port=port, settings=_settings(settings, {"store_url": store_url}))


@app.command()
def work(
    recipe: Annotated[Path, typer.Argument(help="The recipe whose agent these workers run.", metavar="RECIPE")],
    server: Annotated[str, typer.Option(help="URL of the Lightning Server.")],
    key: Annotated[str, typer.Option(help="The worker key that `train` prints (or the run's).", envvar="LIGHTNINGRL_KEY")],
    workers: WorkersOption = None,
    settings: SetOption = None,
) -> None:
    """Run agents for a Lightning Server that runs elsewhere, until it is stopped: the recipe's workers, or those that --workers says."""
    from lightningrl.cli.work import work_command

    work_command(recipe, server=server, key=key, settings=_settings(settings, _workers(workers)))


@app.command()
def branch(
    run: Annotated[Path, typer.Argument(help="The run folder.", metavar="RUN")],
    rollout_id: Annotated[str, typer.Argument(help="A rollout's id, from `rollouts list`.", metavar="ROLLOUT")],
    at: Annotated[
        list[int] | None, typer.Option(help="After so many calls; may be given again. By default after each.", show_default=False)
    ] = None,
    samples: Annotated[int, typer.Option(help="Branches at each.")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object for each state.")] = False,
    workers: WorkersOption = None,
    settings: SetOption = None,
) -> None:
    """Say what each state of a rollout is worth: run its agent anew, answer its first calls as they were, sample the rest.

    Each call is then worth the difference of the states before and after it. What the agent does not ask again (a clock, a random id, a
    tool that changed) ends its branch as `diverged`, with the reason. The run stays as it is.

    Examples:
      [bold]lightningrl branch runs/mine g000017-003[/]
      [bold]lightningrl branch runs/mine g000017-003 --at 2 --samples 16[/]
    """
    from lightningrl.cli.branch import branch_command

    branch_command(run, rollout_id, at=at, samples=samples, as_json=as_json, settings=_settings(settings, _workers(workers)))


@app.command("eval")
def evaluate(
    policy: Annotated[
        str, typer.Argument(help="RUN, RUN@best, RUN@40; a transformers folder; MODEL@https://… of a provider.", metavar="POLICY")
    ],
    against: Annotated[
        str | None, typer.Option(help="Another policy on the same tasks, or a file of an earlier evaluation.", show_default=False)
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option(help="Agent, tasks and rewards; by default the run's.", metavar="RECIPE", show_default=False)
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            help="A file, hf:NAME:SPLIT, or a loader, file.py:name (docs/tasks.md); by default the validation tasks.", show_default=False
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="So many of the tasks, at random.", show_default=False)] = None,
    samples: Annotated[int, typer.Option(help="Rollouts of each task; several give pass@k.")] = 1,
    temperature: Annotated[
        float | None, typer.Option(help="By default as validation samples; several samples as training does.", show_default=False)
    ] = None,
    passes: Annotated[float | None, typer.Option(help="The least reward that passes; by default the most.", show_default=False)] = None,
    slices: Annotated[
        list[str] | None, typer.Option("--slice", help="Means by this key of the tasks' metadata; may be repeated.", show_default=False)
    ] = None,
    stop_every: Annotated[
        int | None,
        typer.Option(
            "--stop-every", help="Look at the difference after so many tasks, and stop once it is decided.", metavar="N", show_default=False
        ),
    ] = None,
    api_key_env: Annotated[
        str | None, typer.Option(help="Environment variable with the provider's key.", metavar="NAME", show_default=False)
    ] = None,
    price: Annotated[
        tuple[float, float] | None,
        typer.Option(help="Of a million prompt and of a million completion tokens of POLICY.", metavar="IN OUT", show_default=False),
    ] = None,
    against_price: Annotated[
        tuple[float, float] | None, typer.Option(help="The same of the other policy.", metavar="IN OUT", show_default=False)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The results' .json file; by default in the run's evaluations/.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    workers: WorkersOption = None,
    settings: SetOption = None,
) -> None:
    """Say how good a policy is on held-out tasks, with the run's agent and rewards, and which of two is better: better, worse, or not
    enough tasks.

    Examples:
      [bold]lightningrl eval runs/mine[/]
      [bold]lightningrl eval runs/mine --samples 8 --slice difficulty[/]
      [bold]lightningrl eval runs/mine@best --against runs/mine@newest --stop-every 25[/]
      [bold]lightningrl eval runs/mine --against gpt-5-mini@https://api.openai.com/v1 --api-key-env OPENAI_API_KEY[/]
    """
    from lightningrl.cli.evaluate import evaluate_command

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
        settings=_settings(settings, _workers(workers)),
    )


@app.command("certify")
def certify_run(
    run: Annotated[Path, typer.Argument(help="The run folder.", metavar="RUN")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Say whether a run trained what was sampled: each trained token sampled, once, after the same tokens, and as probable to the trainer
    as to the engine, by version, call and position. Ends with status 1 where it did not.

    Example:
      [bold]lightningrl certify runs/mine[/]
    """
    from lightningrl.cli.certify import certify_command

    certify_command(run, as_json=as_json)


@app.command()
def view(
    folder: Annotated[
        Path | None,
        typer.Argument(
            help="A run folder, or a folder of runs; by default the newest run below --runs.", metavar="RUN", show_default=False
        ),
    ] = None,
    runs: RunsOption = Path("runs"),
    port: Annotated[int, typer.Option(help="Port to listen on, on this machine only; 0 = any free one.", min=0, max=65535)] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
) -> None:
    """Look at a run in a browser, while it trains or afterwards: curve, alarms, rollouts, tokens, credit. Nothing is changed.

    Examples:
      [bold]lightningrl view[/]                 the newest run
      [bold]lightningrl view runs/mine[/]       one run, live or ended
      [bold]lightningrl view runs[/]            all of them, and how they compare
    """
    from lightningrl.cli.view import view_command

    view_command(folder, runs=runs, port=port, browser=browser)


@app.command()
def report(
    folder: Annotated[
        Path | None, typer.Argument(help="A run; by default the newest below --runs.", metavar="RUN", show_default=False)
    ] = None,
    html: Annotated[Path, typer.Option("--html", help="The file to write.", metavar="FILE")] = Path("report.html"),
    runs: RunsOption = Path("runs"),
) -> None:
    """Write a run's page, and the rollouts worth reading, as one HTML file that needs nothing else: to be sent to a colleague.

    Example:
      [bold]lightningrl report runs/mine --html mine.html[/]
    """
    from lightningrl.cli.report import report_command

    report_command(folder, html=html, runs=runs)


@app.command()
def xray(
    run: Annotated[Path, typer.Argument(help="The run folder.", metavar="RUN")],
    rollout: Annotated[
        str | None, typer.Option(help="Of its group alone, with a heat map of this rollout: turns by methods.", show_default=False)
    ] = None,
    steps: Annotated[str | None, typer.Option(help="Only of these steps: 3, 3-7 or 1,4,9.", show_default=False)] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="Another method to show: a name with its reference or its options, as in a recipe. May be repeated.",
            metavar="NAME=USE",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as one JSON object.")] = False,
) -> None:
    """Say what every installed method of credit makes of a run's rollouts: where they disagree, and which of them are the same here.

    From the record alone: nobody is asked, nothing is trained, the run stays as it is. The run's own method comes first, and is compared
    with what the run used.

    Examples:
      [bold]lightningrl xray runs/mine[/]
      [bold]lightningrl xray runs/mine --rollout g000017-003[/]
      [bold]lightningrl xray runs/mine --method mine=credit.py:Mine --method 'steep={use = "turns", options = {gamma = 0.5}}'[/]
    """
    from lightningrl.cli.xray import xray_command

    xray_command(run, rollout=rollout, steps=steps, methods=_settings(method, {}), as_json=as_json)


@app.command()
def rescore(
    run: Annotated[Path, typer.Argument(help="The run folder.", metavar="RUN")],
    reward: Annotated[
        str | None,
        typer.Option(help='The reward to try: "file.py:new", or an installed one\'s name.', metavar="REFERENCE", show_default=False),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Which of the recipe's rewards it stands for; needed where there are several.", show_default=False)
    ] = None,
    steps: Annotated[str | None, typer.Option(help="Only of these steps: 3, 3-7 or 1,4,9.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as one JSON object.")] = False,
    settings: SetOption = None,
) -> None:
    """Try a reward on a run's stored rollouts: which would have earned otherwise, which groups would have taught, whose credit turns.

    The new reward is called for every trained rollout; what else was computed is taken from the record. Nothing is trained, the run stays
    as it is.

    Examples:
      [bold]lightningrl rescore runs/mine --reward rewards.py:stricter[/]
      [bold]lightningrl rescore runs/mine --set rewards.brief.weight=0.2[/]
    """
    from lightningrl.cli.rescore import rescore_command

    rescore_command(run, reward=reward, name=name, steps=steps, settings=_settings(settings, {}), as_json=as_json)


@app.command()
def plugins() -> None:
    """List what is installed: adapters, trainer backends, rewards, credit assigners."""
    from lightningrl.cli.plugins import plugins_command

    plugins_command()


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(help="Where to write the transformers folder.", metavar="FOLDER")],
    run: RunOption = None,
    runs: RunsOption = Path("runs"),
    policy: Annotated[str | None, typer.Option(help="Which policy, where the run has several.", show_default=False)] = None,
    step: Annotated[
        str | None,
        typer.Option(
            help="Whose weights; by default the best by validation, where there was any.", metavar="best|newest|STEP", show_default=False
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="By default that of the run's starting folder.", metavar="float32|bfloat16|float16", show_default=False),
    ] = None,
) -> None:
    """Write a run's best or newest weights as an ordinary transformers folder (LoRA merged), which stops where the run's answers ended."""
    from lightningrl.cli.export import export_command

    export_command(folder, run=run, runs=runs, policy=policy, step=step, dtype=dtype)


@rollouts.command("list")
def list_rollouts(
    run: RunOption = None,
    runs: RunsOption = Path("runs"),
    step: Annotated[
        int | None, typer.Option(help="Only of this step, counted from 1; validation: after this step.", show_default=False)
    ] = None,
    task: Annotated[str | None, typer.Option(help="Only of the task with this id.", show_default=False)] = None,
    mode: Annotated[str | None, typer.Option(help="train or validation.", show_default=False)] = None,
    outcome: Annotated[str | None, typer.Option(help="Only with this outcome, e.g. agent_error.", show_default=False)] = None,
    limit: Annotated[int, typer.Option(help="Show at most so many.", min=1)] = 20,
    sort: Annotated[str, typer.Option(help="newest first, or by reward, worst first.", metavar="newest|reward")] = "newest",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
) -> None:
    """List rollouts with their outcome, reward and calls."""
    from lightningrl.cli.rollouts import list_command

    list_command(run=run, runs=runs, step=step, task=task, mode=mode, outcome=outcome, limit=limit, sort=sort, as_json=as_json)


@rollouts.command("show")
def show_rollout(
    rollout_id: Annotated[str, typer.Argument(help="A rollout's id, from `rollouts list`.", metavar="ROLLOUT")],
    run: RunOption = None,
    runs: RunsOption = Path("runs"),
    full: Annotated[bool, typer.Option("--full", help="Each call's whole row, markup included.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The trace as one JSON object.")] = False,
) -> None:
    """Show one rollout: who said what, the sampled tokens in the colour of their advantage, tools, other calls, rewards, outcome."""
    from lightningrl.cli.rollouts import show_command

    show_command(rollout_id, run=run, runs=runs, full=full, as_json=as_json)


@recipes.command("show")
def show_recipe(
    recipe: Annotated[Path, typer.Argument(help="A recipe (.toml or .py), or a folder with a recipe.toml.", metavar="RECIPE")],
    settings: SetOption = None,
) -> None:
    """Show every value that a run of RECIPE would have, and where it is from: the file, --set, or a default."""
    from lightningrl.cli.recipe import show_command

    show_command(recipe, settings=_settings(settings, {}))


@new.command("adapter")
def new_adapter(name: Annotated[str, typer.Argument(help="Name of the framework, e.g. haystack.")], folder: FolderOption = None) -> None:
    """An adapter for an agent framework, here a toy one: roles, spans and tools."""
    _new("adapter", name, folder)


@new.command("backend")
def new_backend(name: Annotated[str, typer.Argument(help="Its name in recipes, e.g. mlx.")], folder: FolderOption = None) -> None:
    """A trainer backend, here a policy of one table in numpy: engine, learner, checkpoints, export."""
    _new("backend", name, folder)


@new.command("credit")
def new_credit(name: Annotated[str, typer.Argument(help="Its name in recipes, e.g. last_call.")], folder: FolderOption = None) -> None:
    """A credit assigner: how a rollout's return is spread over its calls."""
    _new("credit", name, folder)


@new.command("reward")
def new_reward(name: Annotated[str, typer.Argument(help="Its name in recipes, e.g. brevity.")], folder: FolderOption = None) -> None:
    """A terminal reward: a number for what a rollout came to."""
    _new("reward", name, folder)


def _new(kind: str, name: str, folder: Path | None) -> None:
    from lightningrl.cli.new import new_command

    new_command(kind, name, folder)


def _settings(given: list[str] | None, shortcuts: dict[str, Any]) -> dict[str, Any]:
    from lightningrl.recipe_file import parse_setting

    settings = dict(parse_setting(text) for text in given or [])
    settings.update({key: value for key, value in shortcuts.items() if value is not None})
    return settings


def _workers(text: str | None) -> dict[str, Any]:
    from lightningrl.cli.work import parse_workers

    return {} if text is None else parse_workers(text)
