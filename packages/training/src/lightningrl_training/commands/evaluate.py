"""`lightningrl eval`: how good a policy is, and which of two is better."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lightningrl.console import write_json
from lightningrl_client.commands import SetOption, WorkersOption, read_settings
from lightningrl_training.commands.printing import Page, make_table, show_warnings, shown
from lightningrl_training.commands.stopping import progress_bar

if TYPE_CHECKING:
    from lightningrl.figures import Interval
    from lightningrl_training.evaluation.examination import EvaluationReport
    from lightningrl_training.evaluation.result import Comparison, Evaluation

__all__ = ["evaluate"]

Policy = typer.Argument(
    help="RUN, RUN@best, RUN@40; a model folder or GGUF file; MODEL@https://… of a provider.", metavar="POLICY"
)
Against = typer.Option(help="Another policy on the same tasks, or a file of an earlier evaluation.")
RecipeOption = typer.Option(help="Agent, tasks and rewards; by default the run's.", metavar="RECIPE")
Tasks = typer.Option(
    help="A file, hf:NAME:SPLIT, or a loader, file.py:name (docs/how-to/tasks.md); by default the validation tasks."
)
Limit = typer.Option(help="So many of the tasks, at random.")
Samples = typer.Option(help="Rollouts of each task; several give pass@k.")
Temperature = typer.Option(help="By default as validation samples; several samples as training does.")
Passes = typer.Option(help="The least reward that passes; by default the most.")
Slices = typer.Option("--slice", help="Means by this key of the tasks' metadata; may be repeated.")
StopEvery = typer.Option(help="Look at the difference after so many tasks, and stop once it is decided.", metavar="N")
ApiKeyEnv = typer.Option(help="Environment variable with the provider's key.", metavar="NAME")
Price = typer.Option(help="Of a million prompt and of a million completion tokens of POLICY.", metavar="IN OUT")
AgainstPrice = typer.Option(help="The same of the other policy.", metavar="IN OUT")
Out = typer.Option(help="The results' .json file; by default in the run's evaluations/.")


def evaluate(
    policy: Annotated[str, Policy],
    against: Annotated[str | None, Against] = None,
    recipe: Annotated[Path | None, RecipeOption] = None,
    tasks: Annotated[str | None, Tasks] = None,
    limit: Annotated[int | None, Limit] = None,
    samples: Annotated[int, Samples] = 1,
    temperature: Annotated[float | None, Temperature] = None,
    passes: Annotated[float | None, Passes] = None,
    slices: Annotated[list[str] | None, Slices] = None,
    stop_every: Annotated[int | None, StopEvery] = None,
    api_key_env: Annotated[str | None, ApiKeyEnv] = None,
    price: Annotated[tuple[float, float] | None, Price] = None,
    against_price: Annotated[tuple[float, float] | None, AgainstPrice] = None,
    out: Annotated[Path | None, Out] = None,
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
    from lightningrl_training.evaluation.examination import evaluate as evaluate_policy

    chosen = read_settings(settings, workers=workers)
    show_warnings()
    with progress_bar("stopped; what has run lies in the folder of its rollouts, without results") as show:
        report = evaluate_policy(
            policy,
            recipe=recipe,
            against=against,
            tasks=tasks,
            limit=limit,
            samples=samples,
            temperature=temperature,
            passes=passes,
            slices=slices or (),
            stop_every=stop_every,
            api_key_env=api_key_env,
            price=price,
            against_price=against_price,
            out=out,
            settings=chosen,
            show=show,
        )
    if as_json:
        write_json(report.numbers())
        return
    _print(Page(), report)


def _print(page: Page, report: EvaluationReport) -> None:
    table = make_table("", numbers=tuple(shown(evaluation.policy) for evaluation in report.evaluations))
    for name, cell in _rows(report.evaluations[0]):
        table.add_row(name, *map(cell, report.evaluations))
    for key in report.slices:
        columns = [evaluation.slice_rewards(key) for evaluation in report.evaluations]
        for value in columns[0]:
            table.add_row(f"  {shown(key)} = {shown(value)}", *(_interval(column.get(value)) for column in columns))
    page.table(table)
    if report.comparison is not None:
        _print_comparison(page, report.comparison, report.evaluations[0].asked)
    for evaluation in report.evaluations:
        if evaluation.chosen_by:
            page.print(shown(_explain_choice(evaluation)))
    page.print(f"kept in {report.path}")
    for evaluation in report.evaluations:
        page.print(f"rollouts: lightningrl rollouts list --run {shlex.quote(str(evaluation.rollouts))}")


def _explain_choice(evaluation: Evaluation) -> str:
    """A sentence for a policy whose number is partly luck."""
    which = "these" if evaluation.chosen_by == evaluation.asked else f"{evaluation.chosen_by} of these"
    return (
        f"{evaluation.policy}: {which} tasks chose this checkpoint among {evaluation.chosen_among} validations, so the "
        "number is partly luck; give a third set that chose nothing: --tasks FILE"
    )


def _rows(first: Evaluation) -> list[tuple[str, Callable[[Evaluation], str]]]:
    return [
        ("tasks × samples", lambda result: f"{len(result.tasks)} × {result.samples}"),
        (
            "sampled at",
            lambda result: (
                "as the agent asks" if result.sampling is None else f"temperature {result.sampling.temperature:g}"
            ),
        ),
        *(
            (f"pass@{k}", lambda result, k=k: _interval(result.pass_at(k)) if k <= result.samples else "-")
            for k in first.ks
        ),
        ("mean reward", lambda result: _interval(result.reward)),
        ("failed (lowest reward)", lambda result: str(result.failed)),
        ("without a result", lambda result: str(result.without_result)),
        (
            "tokens of a rollout",
            lambda result: "-" if result.tokens is None else f"{result.tokens[0]:.0f} + {result.tokens[1]:.0f}",
        ),
        ("seconds of a rollout", lambda result: f"{result.seconds:.2f}"),
        ("cost of all", lambda result: "-" if result.cost is None else f"{result.cost:.4f}"),
    ]


def _print_comparison(page: Page, comparison: Comparison, asked: int) -> None:
    from lightningrl.figures import Verdict

    page.print(f"\ndifference on {comparison.tasks} of {asked} tasks (above 0: the first is better)")
    if comparison.tasks == asked:
        page.print(f"  {_interval(comparison.difference, '+')}  95 %, for one look after all tasks")
    bet = comparison.sequential
    if bet is None:
        page.print(
            "  no sequential verdict: rewards lie outside the range that the recipe gives them, which the test stands "
            "on; set rewards.NAME.range"
        )
    else:
        page.print(f"  {_interval(bet.interval, '+')}  95 %, for a look after every task")
        after = "" if bet.decided_after is None else f", decided after {bet.decided_after} tasks"
        verdict = "the first is " if bet.verdict is not Verdict.NOT_ENOUGH else ""
        page.print(f"  [bold]{verdict}{bet.verdict.value}[/]{after}")
    if comparison.slices:
        table = make_table("slice", numbers=("tasks", "difference", "p", ""))
        for part in comparison.slices:
            verdict = "" if part.verdict is Verdict.NOT_ENOUGH else part.verdict.value
            name = f"{shown(part.key)} = {shown(part.value)}"
            table.add_row(name, str(part.tasks), _interval(part.difference, "+"), f"{part.p:.3f}", verdict)
        page.table(table)
        page.print("  p: corrected for the number of slices (Holm)")


def _interval(interval: Interval | None, sign: str = "") -> str:
    if interval is None:
        return "-"
    if interval.low is None or interval.high is None:
        return f"{interval.mean:{sign}.3f}"
    return f"{interval.mean:{sign}.3f} \\[{interval.low:{sign}.3f}, {interval.high:{sign}.3f}]"
