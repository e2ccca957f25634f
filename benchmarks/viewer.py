"""CPU and bytes of the viewer's pages (at most 50 ms, 200 kB) of a run of 10,000 rollouts of 10 calls.

The run is made once, in the temporary folder, which takes minutes.

    python benchmarks/viewer.py [PAGE …]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

os.environ.setdefault("OMP_NUM_THREADS", "1")

import httpx
import numpy as np
from measuring import result
from stored import make_call

from lightningrl.recipe import Recipe
from lightningrl.records import Score
from lightningrl.types import FinishReason, Outcome, RolloutSpec, Task, ToolCall, ToolStatus
from lightningrl_runs.reader import StoredRun, open_run
from lightningrl_server.records import CallRecord, ToolCallRecord
from lightningrl_server.store import SqlStore
from lightningrl_testing.tokenizers import tiny_tokenizer
from lightningrl_training.loggers import JsonlLogger
from lightningrl_viewer.app import create_viewer
from lightningrl_viewer.page import ViewedRun
from lightningrl_viewer.runs import OneRun

ROLLOUTS, CALLS, GROUP, STEP, TASKS = 10_000, 10, 8, 128, 400
ROLES, TOOLS = ("plan", "search", "write", "check"), ("search", "open", "run_sql", "calculator")
SIZES: Final = (60, 40, 1000)
"""New prompt tokens of a call, completion tokens, vocabulary."""
AT_ONCE: Final = 256
KEY: Final = "the-view-key"
PAGES: Final = (
    "?smooth=some",
    "rollouts",
    "rollouts?sort=worst",
    "rollouts?sort=task",
    "rollouts?tool=run_sql",
    "rollouts?outcome=timeout",
    "rollouts?from=20&to=40&role=plan",
    "rollouts?q=question+7",
    "rollouts?peek=g000300-003",
    "rollouts?after=g000300-003",
    "rollouts/g000300-003",
    "rollouts/g000300-003?view=tokens",
    "rollouts/g000300-003?view=tokens&form=table",
    "rollouts/g000300-003/text?part=tool-0-0-result",
    "groups/g000300",
    "credit?group=g000300",
    "system",
    "recipe",
)
RECIPE: Final = {
    "name": "viewer",
    "agent": "agent.py:answer",
    "tasks": {"train": "agent.py:tasks"},
    "policy": {"model": "policy"},
    "rewards": {"right": {"use": "agent.py:right"}},
    "credit": {"use": "dr_grpo"},
    "loop": {"tasks_per_step": STEP // GROUP, "group_size": GROUP},
}

# ---------------------------------------------------------------------- the store


async def play(store: SqlStore, rng: np.random.Generator) -> None:
    """One rollout of those that are queued, from its lease to its scores."""
    lease = await store.lease("worker", 3600.0)
    assert lease is not None
    number = int(lease.rollout_id[1:7])
    calls: list[CallRecord] = []
    for index in range(CALLS):
        record = make_call(lease, index, rng, calls[-1] if calls else None, SIZES)
        transition = replace(
            record.transition,
            policy="policy",
            policy_version=number // (STEP // GROUP),
            agent=ROLES[int(rng.integers(len(ROLES)))] if index else "plan",
            finish_reason=FinishReason.LENGTH if rng.random() < 0.01 else FinishReason.STOP,
            is_break=not index and rng.random() < 0.01,
            started_at=1.7e9 + number + index,
        )
        calls.append(replace(record, transition=transition))
    await store.append_calls(calls)
    tools = []
    for index in range(CALLS):
        status = ToolStatus.ERROR if rng.random() < 0.05 else ToolStatus.OK
        name, text = TOOLS[int(rng.integers(len(TOOLS)))], "a result " * 10
        tool = ToolCall(
            id=f"call_{index}", name=name, arguments='{"q": "what"}', result=text, status=status, duration_s=0.1
        )
        tools.append(ToolCallRecord(tool_call=tool, started_at=1.7e9 + number + index))
    await store.append_tool_calls(lease.rollout_id, lease.attempt, tools)
    draw = rng.random()
    outcome = Outcome.SUCCEEDED if draw > 0.06 else Outcome.AGENT_ERROR if draw > 0.03 else Outcome.TIMEOUT
    error = None if outcome is Outcome.SUCCEEDED else "RuntimeError: the tool went away"
    attempt = lease.rollout_id, lease.attempt
    await store.finish_attempt(*attempt, outcome, output={"answer": "forty-two"}, error=error, duration_s=10.0)
    share = 0.1 + 0.8 * number / (ROLLOUTS / GROUP)
    reward = None if outcome is not Outcome.SUCCEEDED else float(rng.random() < share)
    advantages = (
        {} if reward is None else {call.transition.id: np.full(SIZES[1], reward - share, np.float32) for call in calls}
    )
    score = Score(
        rollout_id=attempt[0], attempt=attempt[1], rewards={"right": reward}, reward=reward, advantages=advantages
    )
    await store.set_scores([score])


async def make_store(folder: Path) -> None:
    tiny_tokenizer().save_pretrained(folder / "policy")
    rng = np.random.default_rng(0)
    specs = []
    for number in range(ROLLOUTS):
        group, place = f"g{number // GROUP:06d}", number // GROUP % TASKS
        task = Task(id=f"task-{place}", input={"question": f"question {place}"}, answer="42")
        specs.append(RolloutSpec(id=f"{group}-{number % GROUP:03d}", task=task, group_id=group, step=number // STEP))
    store = await SqlStore.open(f"sqlite:///{folder / 'store.sqlite'}")
    logger = JsonlLogger(folder / "metrics.jsonl")
    try:
        await store.create_rollouts(specs)
        for start in range(0, ROLLOUTS, AT_ONCE):
            await asyncio.gather(*(play(store, rng) for _ in specs[start : start + AT_ONCE]))
        for step in range(-(-ROLLOUTS // STEP)):
            ids = [spec.id for spec in specs[step * STEP : (step + 1) * STEP]]
            metrics = make_metrics(step, len(ids), rng)
            await store.mark_trained(step + 1, ids, metrics)
            logger.log(step + 1, {**metrics, "outcome/succeeded": len(ids) * 0.94, "outcome/timeout": len(ids) * 0.06})
    finally:
        logger.close()
        await store.close()


def make_metrics(step: int, rollouts: int, rng: np.random.Generator) -> dict[str, float]:
    mean = 0.1 + 0.01 * step
    metrics = {"reward": mean, "reward/right": mean, "groups": rollouts / GROUP, "rollouts": float(rollouts)}
    metrics |= {"groups_without_signal": 3.0, "calls_per_rollout": float(CALLS), "breaks": 2.0, "trained_tokens": 4e4}
    metrics |= {"prompt_tokens": 5e5, "completion_tokens": 5e4, "seconds": 30.0, "seconds_collect": 20.0}
    metrics |= {"seconds_reward": 1.0, "seconds_credit": 0.5, "seconds_learn": 8.0, "minutes": (step + 1) / 2}
    learned = "entropy loss kl_rollout grad_norm lr ratio clip_fraction importance trie_efficiency staleness_max"
    metrics |= {f"memory/{process}": 1e9 * float(rng.random()) for process in ("trainer", "server", "workers")}
    return metrics | {f"learn/{name}": float(rng.random()) for name in learned.split()} | {"tokens_per_second": 900.0}


def large_run(folder: Path) -> Path:
    """The folder of the large run, as `lightningrl train` leaves one; made where it is not there."""
    if not (folder / "made").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        began = time.perf_counter()
        asyncio.run(make_store(folder))
        (folder / "made").touch()
        print(f"made {ROLLOUTS:,} rollouts of {CALLS} calls in {time.perf_counter() - began:.0f} s")
    (folder / "recipe.json").write_text(Recipe.model_validate(RECIPE).frozen_text(), encoding="utf-8")
    origin: dict[str, object] = {"source": None, "folder": str(folder), "run": str(folder), "settings": {}}
    origin["models"] = {"policy": str(folder / "policy")}
    (folder / "run.json").write_text(json.dumps(origin), encoding="utf-8")
    return folder


# ---------------------------------------------------------------------- pages


@asynccontextmanager
async def browser(folder: Path, run: StoredRun) -> AsyncIterator[httpx.AsyncClient]:
    """A browser that has shown its key to a new viewer of the run."""
    viewed = ViewedRun(name=folder.name, folder=folder, run=run)
    transport = httpx.ASGITransport(create_viewer(OneRun(viewed), key=KEY))
    async with httpx.AsyncClient(
        transport=transport, base_url="http://127.0.0.1", follow_redirects=True, timeout=600
    ) as client:
        await client.get(f"/?key={KEY}", follow_redirects=False)
        yield client
    viewed.credit.close()


async def cost(client: httpx.AsyncClient, page: str) -> tuple[float, float]:
    """CPU milliseconds of the process, and kilobytes."""
    began = time.process_time()
    answer = await client.get(f"/{page}")
    spent = time.process_time() - began
    answer.raise_for_status()
    return 1e3 * spent, len(answer.content) / 1e3


async def measure_pages(folder: Path, pages: Sequence[str], times: int = 9) -> None:
    """`anew`: of an earlier page nothing is remembered but the index of its rollouts, which the first look reads;
    `again`: the store is as it was. Imports and templates are loaded before. Credit is computed by a process of its
    own, which is not in it."""
    async with open_run(folder) as run:
        began = time.process_time()
        await run.queries.step_rewards()
        print(f"first look at {ROLLOUTS:,} rollouts: {1000 * (time.process_time() - began):.0f} ms")
        print(f"{'page':42} {'anew ms':>8} {'again ms':>9} {'kB':>7}")
        worst = 0.0
        for page in pages:
            firsts = []
            for _ in range(times + 1):
                async with browser(folder, run) as client:
                    firsts.append((await cost(client, page))[0])
                    again = [await cost(client, page) for _ in range(times - 1)]
            anew, repeated = statistics.median(firsts[1:]), statistics.median(spent for spent, _ in again)
            worst = max(worst, anew)
            print(f"/{page:41} {anew:8.1f} {repeated:9.1f} {again[0][1]:7.1f}")
    result(worst)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", default=PAGES, help="only these")
    folder = Path(tempfile.gettempdir()) / f"lightningrl-viewer-{ROLLOUTS}"
    parser.add_argument("--folder", type=Path, default=folder, help="where the large store is")
    options = parser.parse_args()
    asyncio.run(measure_pages(large_run(options.folder), options.pages))


if __name__ == "__main__":
    main()
