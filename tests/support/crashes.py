"""A `lightningrl train` run that is killed, stopped and starved: what a test does to it, and what must hold afterwards.

agent ─► journal: every answer it received, every result that was acknowledged      (fsync before it goes on)
test  ─► kill -9, again and again; `--resume` after a trainer's death
      ─► journal ⊆ store, an attempt that succeeded = its journal, ledger = the plan, weights = one pass over the stored
      rollouts
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from processes import ROLES, Role, TrainRun, wait_for
from safetensors.torch import load_file

from lightningrl.plugins import load_plugins
from lightningrl.recipe import Recipe
from lightningrl.records import RolloutFilter, RolloutRecord
from lightningrl.types import Outcome, RolloutMode, RolloutState
from lightningrl_server.records import CallRecord
from lightningrl_server.rendering.completion import CompletionText
from lightningrl_server.rendering.renderer import PolicyRenderer
from lightningrl_server.store import SqlStore
from lightningrl_server.store.location import find_store
from lightningrl_training.build import Parts
from lightningrl_training.policies import load_backend
from lightningrl_training.run_folder import RunFolder
from lightningrl_training.tasks import plan_group

RECIPE = Path(__file__).parent / "crash" / "recipe.toml"
Victim = Literal["trainer", "all"] | Role
V = TypeVar("V", bound=str)


# ------------------------------------------------------------------ acting


def begin(run: TrainRun, policy: Path, *arguments: str, steps: int) -> None:
    run.start(str(RECIPE), "--policy", str(policy), "--steps", str(steps), *arguments)
    wait_for(lambda: (run.folder / "recipe.json").exists() or run.trainer.poll() is not None, run.describe)


def wait_for_answers(run: TrainRun, count: int) -> None:
    """Until agents have received `count` more answers; the run must still be going."""
    aim = len(run.lines()) + count
    run.wait_for(lambda: len(run.lines()) >= aim)


def draw(counts: Mapping[V, int], chance: random.Random) -> list[V]:
    """So many of each, in any order."""
    victims = [victim for victim, count in counts.items() for _ in range(count)]
    chance.shuffle(victims)
    return victims


def kill(run: TrainRun, victim: Victim, chance: random.Random) -> None:
    """And go on: without a trainer with `--resume`."""
    if victim == "trainer":
        kill_trainer_and_resume(run)
    elif victim == "all":
        kill_all(run, chance)
        resume(run)
    else:
        kill_one(run, victim, chance)


def tell_kills(victims: Sequence[str], found: Found, began: float) -> None:
    """`began`: by the monotonic clock."""
    kills = ", ".join(f"{count} {victim}" for victim, count in Counter(victims).items())
    print(f"{len(victims)} kills ({kills}): {found}, 0 lost, 0 doubled, {(time.monotonic() - began) / 60:.0f} minutes")


def kill_one(run: TrainRun, role: Role, chance: random.Random) -> None:
    """One process of that role, as soon as there is any."""
    run.wait_for(lambda: bool(run.children(role)))
    run.kill(chance.choice(run.children(role)))


def kill_trainer_and_resume(run: TrainRun, *arguments: str) -> None:
    run.kill_trainer()
    resume(run, *arguments)


def kill_all(run: TrainRun, chance: random.Random) -> None:
    """Server, workers and trainer at one moment, in any order."""
    kills: list[Callable[[], None]] = [
        *(partial(run.kill, child) for role in ROLES for child in run.children(role)),
        run.kill_trainer,
    ]
    chance.shuffle(kills)
    for kill in kills:
        kill()


def resume(run: TrainRun, *arguments: str) -> None:
    run.wait_for_orphans()
    run.start("--resume", *arguments)


def finish(run: TrainRun) -> None:
    assert run.wait() == 0, run.describe()
    run.wait_for_orphans()


# ------------------------------------------------------------------ looking


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def last_step(run: TrainRun) -> int:
    return max((line["step"] for line in read_metrics(run.folder)), default=0)


def newest_checkpoint(folder: Path) -> Path:
    return max((folder / "checkpoints").glob("step-*/loop.json")).parent


def read_rollouts(folder: Path) -> tuple[RolloutRecord, ...]:
    async def read() -> tuple[RolloutRecord, ...]:
        store = await SqlStore.open(find_store(folder), read_only=True)
        try:
            return await store.list_rollouts(RolloutFilter(limit=100_000))
        finally:
            await store.close()

    return asyncio.run(read())


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What a checked run had."""

    steps: int
    calls: int
    """Acknowledged to an agent, each of them found in the store."""
    results: int
    """Acknowledged to a worker, likewise."""
    attempts: int


def check_run(run: TrainRun, *, steps: int, max_staleness: int = 0) -> Found:
    """Nothing acknowledged is lost or doubled, everything planned is trained once, and the weights say the same. With
    `max_staleness` the run was asynchronous: what it trained in which step, the ledger says."""
    found = asyncio.run(check_store(run, steps, is_planned=not max_staleness))
    lines = read_metrics(run.folder)
    assert [line["step"] for line in lines if "reward" in line] == list(range(1, steps + 1))
    validated = [line["step"] for line in lines if "validation/reward" in line]
    assert validated == sorted({0, *range(7, steps + 1, 7), steps})
    trained = [line for line in lines if "rows" in line]
    versions = list(accumulate(1 if line["rows"] else 0 for line in trained))
    assert [line["policy_version"] for line in trained] == versions, "each step with a signal made one version"
    assert {line["learn/staleness_max"] for line in lines if "learn/staleness_max" in line} <= {
        *range(max_staleness + 1)
    }
    state = json.loads((newest_checkpoint(run.folder) / "loop.json").read_text())
    assert (state["step"], state["rollouts"]) == (steps, steps * 6)
    return found


async def check_store(run: TrainRun, steps: int, *, is_planned: bool) -> Found:
    folder, recipe = RunFolder.resume(run.folder, {})
    parts = Parts.build(recipe, load_plugins())
    store = await SqlStore.open(folder.store_url)
    try:
        found = await check_journal(run, store, steps)
        ledger = await store.steps()
        assert [record.step for record in ledger] == list(range(1, steps + 1))
        names = [spec.id for position in range(steps * 3) for spec in plan_group(parts.tasks.train, recipe, position)]
        planned = [names[6 * step : 6 * step + 6] for step in range(steps)]
        if not is_planned:
            planned = [sorted(record.rollout_ids) for record in ledger]
        assert [sorted(record.rollout_ids) for record in ledger] == planned
        trained = [name for record in ledger for name in record.rollout_ids]
        assert len(trained) == len(set(trained)) == steps * 6
        counts = await store.counts()
        assert dict(counts.states) == {RolloutState.SUCCEEDED: sum(counts.states.values())}
        await check_weights(folder, recipe, parts, store, planned)
        return found
    finally:
        await store.close()
        folder.close()


async def check_journal(run: TrainRun, store: SqlStore, steps: int) -> Found:
    """What was acknowledged to an agent or a worker is in the store, as it was said; an attempt that succeeded has no
    call besides."""
    heard: dict[tuple[str, int], dict[str, Any]] = defaultdict(dict)
    results = 0
    for kind, *words in run.lines():
        if kind == "call":
            rollout_id, number, name = words[0].split("/")
            calls = heard[rollout_id, int(number)]
            assert name not in calls, f"two answers have the id {name}"
            calls[name] = json.loads(bytes.fromhex(words[1]))
        else:
            outcome = (await store.rollout(words[0])).attempts[int(words[1]) - 1].outcome
            assert outcome is Outcome(words[2]), f"the result of {words[0]}/{words[1]} is lost: {outcome}"
            results += 1
    renderer = PolicyRenderer(json.loads((run.folder / "run.json").read_text())["settings"]["policy.model"])
    for place, calls in heard.items():
        kept = {call.transition.id: read_answer(renderer, call) for call in await store.calls(*place)}
        for name, said in calls.items():
            assert name in kept, f"call {name} is lost"
            assert kept[name] == said, f"call {name} was answered otherwise than it is stored"
    attempts = 0
    for record in await store.list_rollouts(RolloutFilter(limit=100_000)):
        attempts += len(record.attempts)
        if record.state is RolloutState.SUCCEEDED:
            place = record.spec.id, len(record.attempts)
            assert [call.transition.id for call in await store.calls(*place)] == [*heard[place]], (
                f"{place} has calls that nobody made"
            )
    assert heard
    return Found(steps=steps, calls=sum(map(len, heard.values())), results=results, attempts=attempts)


def check_same(run: TrainRun, other: TrainRun) -> None:
    """Both runs sampled the same tokens and came to the same weights, less what another batch of calls rounds
    otherwise."""
    ours, theirs = asyncio.run(read_completions(run.folder)), asyncio.run(read_completions(other.folder))
    assert ours.keys() == theirs.keys()
    assert {name for name in ours if ours[name] != theirs[name]} == set()
    weights, expected = (
        load_file(next(newest_checkpoint(one.folder).rglob("trained.safetensors"))) for one in (run, other)
    )
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], atol=1e-4, rtol=1e-3)


def check_identical(run: TrainRun, other: TrainRun) -> None:
    """Both runs came bit for bit to the same: tokens, evidence, advantages, weights, and what their learners
    remember."""
    ours, theirs = (asyncio.run(read_credit(one.folder)) for one in (run, other))
    assert ours.keys() == theirs.keys()
    assert {name for name in ours if ours[name] != theirs[name]} == set()
    for name in ("trained.safetensors", "state.pt"):
        mine, expected = (read_tensors(next(newest_checkpoint(one.folder).rglob(name))) for one in (run, other))
        assert mine.keys() == expected.keys()
        assert {key for key, value in mine.items() if not _is_equal(value, expected[key])} == set()
    for mine, expected in zip(
        *([_learned(line) for line in read_metrics(one.folder)] for one in (run, other)), strict=True
    ):
        assert mine == expected


def _learned(line: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if key == "step" or key.startswith(("learn/", "credit/"))}


def _is_equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def read_tensors(file: Path) -> dict[str, Any]:
    """What a checkpoint's file holds, by its place. The process's own generators are not the run's."""
    found: dict[str, Any] = {}

    def walk(value: Any, place: str) -> None:
        if isinstance(value, dict):
            for key, one in value.items():
                walk(one, f"{place}/{key}")
        elif isinstance(value, list | tuple):
            for index, one in enumerate(value):
                walk(one, f"{place}/{index}")
        else:
            found[place] = value

    if file.suffix == ".safetensors":
        return dict(load_file(file))
    walk({key: value for key, value in torch.load(file, weights_only=True).items() if key != "generators"}, "")
    return found


async def read_credit(folder: Path) -> dict[str, list[Any]]:
    """By rollout, of each call: its tokens, its evidence, its advantages."""
    store = await SqlStore.open(find_store(folder), read_only=True)
    try:
        names = [record.spec.id for record in await store.list_rollouts(RolloutFilter(limit=100_000))]
        found: dict[str, list[Any]] = {}
        for one, score in zip(await store.trajectories(names), await store.scores(names), strict=True):
            evidence = [] if one.evidence is None else [values for _, values in sorted(one.evidence.calls.items())]
            of_tokens = [] if one.evidence is None else [values for _, values in sorted(one.evidence.tokens.items())]
            advantages = [None if score.advantages is None else score.advantages[call.id] for call in one.transitions]
            told = [
                [call.completion_ids.tolist() for call in one.transitions],
                [values.tolist() for values in evidence],
            ]
            told += [[[values.tolist() for values in calls] for calls in of_tokens]]
            found[one.rollout_id] = [*told, [None if values is None else values.tolist() for values in advantages]]
        return found
    finally:
        await store.close()


async def read_completions(folder: Path) -> dict[str, list[list[int]]]:
    """Token ids by rollout and call, of the attempts that count."""
    store = await SqlStore.open(find_store(folder), read_only=True)
    try:
        names = [record.spec.id for record in await store.list_rollouts(RolloutFilter(limit=100_000))]
        return {
            trajectory.rollout_id: [transition.completion_ids.tolist() for transition in trajectory.transitions]
            for trajectory in await store.trajectories(names)
        }
    finally:
        await store.close()


def read_answer(renderer: PolicyRenderer, call: CallRecord) -> list[Any]:
    """Text and logprobs, as an agent reads them in its answer."""
    transition = call.transition
    text = CompletionText(renderer, transition.prompt_ids.tolist(), allow_tools=False, stop=(), tool_call_ids=())
    text.push(transition.completion_ids.tolist(), transition.logprobs.tolist(), stream=False)
    return [text.finish(transition.finish_reason)[0].content or "", transition.logprobs.tolist()]


async def check_weights(
    folder: RunFolder, recipe: Recipe, parts: Parts, store: SqlStore, planned: list[list[str]]
) -> None:
    """The last checkpoint's weights are those of one undisturbed pass over the stored rollouts."""
    saved = folder.latest()
    found = saved.folder if saved else None
    assert found is not None
    build = parts.backends[recipe.policy.name]
    expected, disturbed = build(), build()
    try:
        load_backend(disturbed, found, recipe.policy.name)
        of_source: defaultdict[str, list[str]] = defaultdict(list)
        for record in await store.list_rollouts(RolloutFilter(mode=RolloutMode.BRANCH, limit=100_000)):
            assert record.spec.branch is not None
            of_source[record.spec.branch.rollout_id].append(record.spec.id)
        for names in planned:
            trajectories = await parts.evaluator.reward(await store.trajectories(names))
            branches = await parts.evaluator.reward(
                await store.trajectories(sorted(one for name in names for one in of_source[name]))
            )
            scored = parts.scorer.build(parts.scorer.credit(trajectories, branches))
            if scored.samples:
                await asyncio.to_thread(expected.learn, scored.samples)
        ours, theirs = (backend.learner.parameters for backend in (expected, disturbed))  # type: ignore[attr-defined]
        assert expected.engine.info.version == disturbed.engine.info.version
        for name, parameter in ours.items():
            torch.testing.assert_close(parameter, theirs[name], atol=1e-6, rtol=1e-5)
    finally:
        expected.close()
        disturbed.close()
