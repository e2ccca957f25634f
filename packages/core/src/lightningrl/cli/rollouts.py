"""`lightningrl rollouts`: a run's rollouts as a person reads them, straight from its store."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from lightningrl.errors import ConfigError, RunFolderError
from lightningrl.store import SqlStore
from lightningrl.store.protocol import RolloutFilter, RolloutRecord, Score
from lightningrl.training.run_folder import newest_run
from lightningrl.types import OtherCall, Outcome, RolloutMode, Trajectory, Transition

__all__ = ["list_command", "show_command"]

Answer = TypeVar("Answer")
ALL = 1_000_000
Decode = Callable[[Sequence[int]], str]


def list_command(
    *,
    run: Path | None,
    runs: Path,
    step: int | None = None,
    task: str | None = None,
    mode: str | None = None,
    outcome: str | None = None,
    limit: int = 20,
    sort: str = "newest",
    as_json: bool = False,
) -> None:
    folder = run or newest_run(runs)
    if sort not in {"newest", "reward"}:
        raise ConfigError(f"rollouts cannot be sorted by {sort!r}; choose of: newest, reward")
    where = RolloutFilter(
        mode=_choice("mode", mode, RolloutMode),
        outcome=_choice("outcome", outcome, Outcome),
        task_id=task,
        limit=limit if sort == "newest" else ALL,
    )
    records = _ask(folder, lambda store: _of_step(store, where, step))
    if sort == "reward":
        records = sorted((record for record in records if record.reward is not None), key=lambda record: record.reward or 0.0)
    records = records[:limit]
    if as_json:
        for record in records:
            sys.stdout.write(json.dumps(_json(record), ensure_ascii=False) + "\n")
        return
    whole = (Column(name, no_wrap=True) for name in ("rollout", "task", "mode", "outcome"))
    numbers = (Column(name, justify="right") for name in ("reward", "calls", "attempts", "trained"))
    table = Table(*whole, *numbers, title=f"Rollouts of {folder}", title_justify="left", box=None, padding=(0, 1, 0, 0))
    for record in records:
        table.add_row(*_row(record))
    Console().print(table if records else f"no rollouts in {folder} match; leave out a filter", highlight=False)


def show_command(rollout_id: str, *, run: Path | None, runs: Path, full: bool) -> None:
    folder = run or newest_run(runs)
    record, trajectory, score = _ask(folder, lambda store: _load(store, rollout_id))
    console = Console()
    console.print(_heading(record, trajectory))
    decode = _decoders(folder)
    several = len({call.policy for call in trajectory.transitions}) > 1
    for call in trajectory.transitions:
        advantages = score.advantages.get(call.id) if score else None
        rewards = score.transition_rewards.get(call.id, {}) if score else {}
        console.print(_call_panel(call, decode(call.policy), advantages, rewards, full=full, shows_policy=several))
        for tool in trajectory.tool_calls:
            if tool.transition_id == call.id:
                console.print(Text(f"  tool {tool.name}({tool.arguments}) → [{tool.status.value}] {tool.result}"[:400], style="magenta"))
    for tool in trajectory.tool_calls:
        if tool.transition_id is None:
            console.print(Text(f"tool {tool.name}({tool.arguments}) → [{tool.status.value}] {tool.result}"[:400], style="magenta"))
    for other in trajectory.other_calls:
        console.print(_other_line(other))
    console.print(_ending(trajectory, score))


async def _of_step(store: SqlStore, where: RolloutFilter, step: int | None) -> Sequence[RolloutRecord]:
    """Newest first. Steps are counted from 1, as everywhere on screen: step 1 trains the rollouts that were planned at 0; the
    validation after it has its own number."""
    if step is None:
        return await store.list_rollouts(where)
    found: list[RolloutRecord] = []
    for mode, planned in ((RolloutMode.VALIDATION, step), (RolloutMode.TRAIN, step - 1)):
        if where.mode in {None, mode}:
            found += await store.list_rollouts(replace(where, mode=mode, step=planned))
    return found


async def _load(store: SqlStore, rollout_id: str) -> tuple[RolloutRecord, Trajectory, Score | None]:
    record = await store.rollout(rollout_id)
    (trajectory,) = await store.trajectories([rollout_id])
    scores = await store.scores([rollout_id])
    return record, trajectory, scores[0] if scores else None


def _ask(folder: Path, question: Callable[[SqlStore], Awaitable[Answer]]) -> Answer:
    path = folder / "store.sqlite"
    if not path.is_file():
        raise RunFolderError(f"no store in {str(folder)!r}; name a run folder with --run")

    async def ask() -> Answer:
        store = await SqlStore.open(f"sqlite:///{path.resolve()}", read_only=True)
        try:
            return await question(store)
        finally:
            await store.close()

    return asyncio.run(ask())


def _choice(what: str, text: str | None, kind: Any) -> Any:
    if text is None:
        return None
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"no {what} {text!r}; choose of: {', '.join(member.value for member in kind)}") from None


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _json(record: RolloutRecord) -> dict[str, Any]:
    return {
        "rollout": record.spec.id,
        "task": record.spec.task.id,
        "mode": record.spec.mode.value,
        "state": record.state.value,
        "outcome": record.outcome.value if record.outcome else None,
        "reward": record.reward,
        "calls": record.attempts[-1].calls if record.attempts else 0,
        "attempts": len(record.attempts),
        "trained_step": record.trained_step,
    }


def _row(record: RolloutRecord) -> tuple[str, ...]:
    return (
        escape(record.spec.id),
        escape(record.spec.task.id),
        record.spec.mode.value,
        record.outcome.value if record.outcome else record.state.value,
        _number(record.reward),
        str(record.attempts[-1].calls if record.attempts else 0),
        str(len(record.attempts)),
        "-" if record.trained_step is None else str(record.trained_step),
    )


def _heading(record: RolloutRecord, trajectory: Trajectory) -> Panel:
    lines = [
        f"task      {record.spec.task.id}",
        f"input     {_short(record.spec.task.input)}",
        f"answer    {_short(record.spec.task.answer)}",
        f"group     {record.spec.group_id}   mode {record.spec.mode.value}   attempt {trajectory.attempt} of {len(record.attempts)}",
    ]
    return Panel(Text("\n".join(lines)), title=Text(f"rollout {record.spec.id}"), title_align="left", border_style="blue")


def _call_panel(call: Transition, decode: Decode, advantages: Any, rewards: Any, *, full: bool, shows_policy: bool) -> Panel:
    prompt = decode(call.prompt_ids.tolist())
    if not full and len(prompt) > 900:
        prompt = f"{prompt[:300]} … {prompt[-600:]}"
    body = Text(prompt, style="dim")
    body.append("\n")
    body.append(decode(call.completion_ids.tolist()), style="bold green")
    credit = "not scored" if advantages is None else f"advantage {float(np.mean(advantages)):+.3f}"
    parts = [
        f"{len(call.prompt_ids)} → {len(call.completion_ids)} tokens",
        f"logprob {float(np.sum(call.logprobs)):.2f}",
        f"version {call.policy_version}",
        call.finish_reason.value,
        credit,
        *(f"{name} {_number(value)}" for name, value in rewards.items()),
        *(f"reported {name} {_number(value)}" for name, value in call.reported.items()),
    ]
    if call.parent_id:
        parts.append("extends an earlier call")
    policy = f" · {call.policy}" if shows_policy else ""
    if call.is_break:
        parts.append("BREAK: history re-rendered")
    return Panel(
        body,
        title=Text(f"call {call.index} · {call.agent or 'no role'}{policy}"),
        title_align="left",
        subtitle=Text(" · ".join(parts)),
        subtitle_align="left",
        border_style="green" if advantages is not None else "white",
    )


def _other_line(call: OtherCall) -> Text:
    answered = " ".join(str(part) for part in (call.status, call.code, call.message) if part not in (None, ""))
    where = f"{call.path} {call.model}".strip()
    return Text(f"{call.kind.value} call · {call.agent or 'no role'} · {where} → {answered or 'not seen'}"[:400], style="yellow")


def _ending(trajectory: Trajectory, score: Score | None) -> Panel:
    rewards = score.rewards if score else trajectory.rewards
    total = score.reward if score else trajectory.reward
    lines = [f"outcome   {trajectory.outcome.value}", f"output    {_short(trajectory.output)}"]
    if trajectory.error:
        lines.append(f"error     {_short(trajectory.error)}")
    lines.append(f"reward    {_number(total)}   ({_named(rewards) or 'none'})")
    if trajectory.unrewarded:
        lines.append(f"failed    {_short(trajectory.unrewarded)}")
    if trajectory.reported:
        lines.append(f"reported  {_named(trajectory.reported)}")
    return Panel(Text("\n".join(lines)), title="ending", title_align="left", border_style="blue")


def _named(values: Mapping[str, float | None]) -> str:
    return ", ".join(f"{name} {_number(value)}" for name, value in values.items())


def _short(value: Any, limit: int = 600) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= limit else f"{text[:limit]} …"


def _decoders(folder: Path) -> Callable[[str], Decode]:
    """By policy: token ids → text by its own tokenizer; the bare ids where the run names none."""
    from lightningrl.rendering.tokenizer import load_tokenizer

    models: dict[str, str] = json.loads((folder / "run.json").read_text(encoding="utf-8")).get("models", {})

    @cache
    def decoder(policy: str) -> Decode:
        if policy not in models:
            return lambda ids: " ".join(map(str, ids))
        tokenizer = load_tokenizer(models[policy])
        return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))

    return decoder
