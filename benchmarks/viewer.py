"""What looking at a run costs, of 10,000 rollouts of 10 calls (made once, in the temporary folder: minutes).

python benchmarks/viewer.py pages [PAGE …]  CPU and bytes of each page (at most 50 ms, 200 kB)
python benchmarks/viewer.py person          the viewer's share of a server's CPU while one person opens a page every 2 s
                                            and hears the news, beside rollouts of 4 calls (at most 5 % of the rest)
python benchmarks/viewer.py nobody          its indices while nobody looks, of the whole server's CPU (at most 1 %)
python benchmarks/viewer.py xray            credit of 960 rollouts by all methods (seconds), and its pages
python benchmarks/viewer.py scrape          `/metrics`: counting a call, answering a scrape (at most 1 % of the CPU)
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import shutil
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import Final

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import httpx
import numpy as np
from measuring import least_cpu_ms, result, serving
from recorded_runs import make_recipe, record_run
from stored import make_call
from viewer_meter import METER, SITE

from lightningrl.keys import view_key
from lightningrl.recipe import Recipe
from lightningrl.records import Score
from lightningrl.types import FinishReason, Outcome, RolloutSpec, Task, ToolCall, ToolStatus
from lightningrl_client.runtime.pool import WorkerPool
from lightningrl_server.app import create_app
from lightningrl_server.engines.registry import EngineRegistry
from lightningrl_server.metrics import ServerMetrics
from lightningrl_server.records import CallRecord, ToolCallRecord
from lightningrl_server.store import SqlStore
from lightningrl_testing.tokenizers import tiny_tokenizer
from lightningrl_training.lab.xray import open_xray
from lightningrl_training.loggers import JsonlLogger
from lightningrl_training.run import Run
from lightningrl_viewer.app import create_viewer
from lightningrl_viewer.page import ViewedRun
from lightningrl_viewer.reading.reader import StoredRun, open_run
from lightningrl_viewer.runs import OneRun

ROLLOUTS, CALLS, GROUP, STEP, TASKS = 10_000, 10, 8, 128, 400
ROLES, TOOLS = ("plan", "search", "write", "check"), ("search", "open", "run_sql", "calculator")
SIZES: Final = (60, 40, 1000)
"""New prompt tokens of a call, completion tokens, vocabulary."""
AT_ONCE: Final = 256
KEY: Final = "the-view-key"
VIEWERS: Final = ("calls_cut", "calls_break", "tool_calls_status", "rollouts_group")
"""Indices that only the viewer reads."""
PAGES: Final = (
    "",
    "rollouts",
    "rollouts?sort=worst",
    "rollouts?role=check",
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
AGENT: Final = """
import openai

client = openai.OpenAI(api_key="the-users-own")

def answer(task):
    schema = "Table singer(id, name, age, country), concert(id, singer_id, year). " * 8
    messages = [{"role": "system", "content": schema}]
    for turn in range(4):
        question = f"{task['question']} An error; write it again, for the {turn}th time."
        messages.append({"role": "user", "content": question})
        reply = client.chat.completions.create(model="gpt-4o-mini", messages=messages)
        messages.append({"role": "assistant", "content": reply.choices[0].message.content})
    return messages[-1]["content"]
"""


# ---------------------------------------------------------------------- the store


async def play(store: SqlStore, rng: np.random.Generator, *, turns: int = CALLS, tool_calls: int = CALLS) -> None:
    """One rollout of those that are queued, from its lease to its scores."""
    lease = await store.lease("worker", 3600.0)
    assert lease is not None
    number = int(lease.rollout_id[1:7])
    calls: list[CallRecord] = []
    for index in range(turns):
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
    for index in range(tool_calls):
        status = ToolStatus.ERROR if rng.random() < 0.05 else ToolStatus.OK
        name, text = TOOLS[int(rng.integers(len(TOOLS)))], "a result " * 10
        tool = ToolCall(
            id=f"call_{index}", name=name, arguments='{"q": "what"}', result=text, status=status, duration_s=0.1
        )
        tools.append(ToolCallRecord(tool_call=tool, started_at=1.7e9 + number + index))
    if tools:
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
    return metrics | {"learn/entropy": 1.0 - step / 200, "learn/kl_rollout": 0.001 * float(rng.random())}


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
    (folder / "run.json").write_text(
        json.dumps({**origin, "models": {"policy": str(folder / "policy")}}), encoding="utf-8"
    )
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


# ---------------------------------------------------------------------- a person, and nobody


async def look_on(url: str) -> None:
    """One person: the stream of news is open, and every two seconds they open a page."""
    pages = "", "rollouts", "rollouts?sort=newest", "rollouts?outcome=timeout", "rollouts/g000300-003", "system"
    async with httpx.AsyncClient(base_url=f"{url}/view", follow_redirects=True, timeout=60) as client:
        (await client.get(f"/?key={view_key(KEY)}")).raise_for_status()

        async def listen() -> None:
            async with client.stream("GET", "/events?after=0.0.0") as news:
                async for _ in news.aiter_lines():
                    pass

        async with asyncio.TaskGroup() as group:
            group.create_task(listen())
            for page in itertools.cycle(pages):
                (await client.get(f"/{page}")).raise_for_status()
                await asyncio.sleep(2.0)


async def measure_server(store: Path, scratch: Path, rollouts: int, *, is_viewed: bool) -> tuple[float, float, float]:
    """CPU seconds of a new server's viewer, those of the server without it, and how long the rollouts took."""
    folder, lines, site = scratch / "run", scratch / "meter", scratch / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SITE.format(folder=str(Path(__file__).resolve().parent)), encoding="utf-8")
    os.environ |= {"PYTHONPATH": str(site), METER: str(lines)}
    shutil.copytree(store, folder)
    (folder / "agent.py").write_text(AGENT, encoding="utf-8")
    async with (
        serving(folder, reply=lambda _: "SELECT name FROM singer " * 2, run_folder=folder, key=KEY) as (server, client),
        WorkerPool(server.url, KEY, "agent.py:answer", workers=2, base_dir=folder, log_folder=folder) as pool,
    ):
        await pool.wait_ready()
        person = asyncio.create_task(look_on(server.url)) if is_viewed else None
        await asyncio.sleep(15.0 if is_viewed else 2.0)  # their first pages import what pages are made with
        began = time.monotonic()
        specs = []
        for number in range(rollouts):
            task = Task(id=f"t{number}", input={"question": f"{number}?"})
            specs.append(RolloutSpec(id=f"n{number:06d}", task=task, group_id=f"n{number // GROUP}"))
        await client.create_rollouts(specs)
        await client.wait([spec.id for spec in specs], 600)
        finished = time.monotonic()
        if person is not None:
            assert not person.done(), person.exception()
            person.cancel()
    rows = [[float(number) for number in line.split()] for line in lines.read_text(encoding="utf-8").splitlines()]
    first, *_, last = (row for row in rows if began <= row[0] <= finished)
    viewer = last[1] - first[1]
    return viewer, last[2] - first[2] - viewer, last[0] - first[0]


async def measure_indices(folder: Path, turns: int, rollouts: int = 32) -> float:
    """CPU seconds that the viewer's indices cost a store for a rollout of 4 calls without tools: in turns with a store
    without them, the median."""
    stores = [await SqlStore.open(f"sqlite:///{folder / name}") for name in ("with", "without")]
    with closing(sqlite3.connect(folder / "without", timeout=60)) as db:
        for name in VIEWERS:
            db.execute(f"DROP INDEX {name}")
    rng, more = np.random.default_rng(0), []
    for turn in range(turns):
        took = [0.0, 0.0]
        for which in ((0, 1), (1, 0))[turn % 2]:
            ids = [f"g{turn * rollouts + number:06d}" for number in range(rollouts)]
            specs = [RolloutSpec(id=name, task=Task(id="t", input="x"), group_id=name[:-1]) for name in ids]
            began = time.process_time()
            await stores[which].create_rollouts(specs)
            for _ in specs:
                await play(stores[which], rng, turns=4, tool_calls=0)
            took[which] = time.process_time() - began
        more.append((took[0] - took[1]) / rollouts)
    for store in stores:
        await store.close()
    return statistics.median(more)


def measure_looks(store: Path, turns: int, rollouts: int, *, is_viewed: bool) -> list[tuple[float, float, float]]:
    looks = []
    for _ in range(turns):
        with tempfile.TemporaryDirectory() as scratch:
            looks.append(asyncio.run(measure_server(store, Path(scratch), rollouts, is_viewed=is_viewed)))
    return looks


def nobody(store: Path, turns: int, rollouts: int) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        indices = asyncio.run(measure_indices(Path(scratch), 20 * turns))
    looks = measure_looks(store, turns, rollouts, is_viewed=False)
    whole = statistics.median(rest for _, rest, _ in looks) / rollouts
    print(f"nobody looks: the viewer's indices cost {1000 * indices:.3f} ms of CPU a rollout of 4 calls, ", end="")
    print(f"{indices / whole:+.1%} of a server's {1000 * whole:.1f} ms")
    result(indices / whole)


def person(store: Path, turns: int, rollouts: int) -> None:
    looks = measure_looks(store, turns, rollouts, is_viewed=True)
    for viewer, rest, took in looks:
        print(f"viewer {viewer:.2f} s, the rest of the server {rest:.2f} s, in {took:.0f} s: {viewer / rest:.1%}")
    result(statistics.median(viewer / rest for viewer, rest, _ in looks))


# ---------------------------------------------------------------------- X-ray, metrics


async def measure_credit_pages(folder: Path, group: str, rollout: str) -> None:
    async with open_xray(folder) as xray:
        await xray.of_group(group)
    async with open_xray(folder) as xray:  # nothing is kept from before
        began = time.process_time()
        await xray.of_group(group)
        print(f"one group, in the X-ray's own process: {1e3 * (time.process_time() - began):.0f} ms of CPU")
    async with open_run(folder) as run, browser(folder, run) as client:
        for page in (f"credit?group={group}", f"credit?rollout={rollout}", "credit", "credit?of=run"):
            began = time.perf_counter()
            await client.get(f"/{page}")  # imports and compiles what pages need
            waited = time.perf_counter() - began
            costs = [await cost(client, page) for _ in range(10)]
            spent, size = statistics.mean(spent for spent, _ in costs), costs[0][1]
            print(f"/{page:39} server CPU {spent:6.1f} ms   {size:6.1f} kB   first answer after {waited:5.2f} s")


def xray(rollouts: int) -> None:
    settings = {"credit.use": "turns", "credit.options.gamma": 0.9, "intermediate_rewards.turn.use": "tool_status"}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        recipe = make_recipe(folder, {**settings, "loop.tasks_per_step": 12, "loop.group_size": GROUP})
        asyncio.run(record_run(folder, recipe, steps=round(rollouts / 12 / GROUP), calls=CALLS))
        began = time.process_time()
        table = Run(folder).xray()
        cpu = time.process_time() - began
        print(f"{table.rollout_count} rollouts, {table.calls} calls, {len(table.methods)} methods: ", end="")
        print(f"{cpu:.2f} s of CPU, reading included")
        first = table.rollouts[0]
        asyncio.run(measure_credit_pages(folder, first.group_id, first.rollout_id))
    result(cpu)


CALL_MS: Final = 1.4
"""CPU of a recorded call without `/metrics` (benchmarks/gateway.py)."""
EVERY_S: Final = 15.0
"""Prometheus' usual interval between scrapes."""


async def measure_scrape(folder: Path) -> tuple[float, float]:
    """CPU milliseconds of one scrape, and kilobytes."""
    store = await SqlStore.open(f"sqlite:///{folder / 'store.sqlite'}")
    row = {f"learn/number_{n}": n / 7 for n in range(60)}
    lines = [json.dumps({"step": n, **row}) + "\n" for n in range(2000)]
    (folder / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    transport = httpx.ASGITransport(create_app(store, EngineRegistry(), run_key=KEY, folder=folder))
    headers = {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers) as client:
        costs = [await cost(client, "metrics") for _ in range(51)][1:]
    await store.close()
    return statistics.mean(spent for spent, _ in costs), costs[-1][1]


def scrape() -> None:
    metrics, count = ServerMetrics(), 200_000

    def count_calls() -> None:
        for _ in range(count):
            metrics.answered("policy", 0.7, 900, 60)

    per_call = least_cpu_ms(count_calls, 1) / count
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        asyncio.run(
            record_run(
                folder, make_recipe(folder, {"loop.tasks_per_step": 25, "loop.group_size": 8}), steps=5, calls=10
            )
        )
        per_scrape, size = asyncio.run(measure_scrape(folder))
    of_calls, of_scrapes = per_call / CALL_MS, per_scrape / 1e3 / EVERY_S
    print(f"counting a call: {per_call * 1e3:.1f} µs, {of_calls:.2%} of the {CALL_MS} ms that a recorded call takes")
    print(f"a scrape: {per_scrape:.1f} ms, {size:.0f} kB; every {EVERY_S:.0f} s it is {of_scrapes:.3%} of a core")
    result(of_calls + of_scrapes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("pages", "person", "nobody", "xray", "scrape"))
    parser.add_argument("pages", nargs="*", help="only these")
    folder = Path(tempfile.gettempdir()) / f"lightningrl-viewer-{ROLLOUTS}"
    parser.add_argument("--folder", type=Path, default=folder, help="where the large store is")
    parser.add_argument("--rollouts", type=int, help="512 of `person`, 256 of `nobody`, 1,000 of `xray`")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    match options.what:
        case "pages":
            asyncio.run(measure_pages(large_run(options.folder), options.pages or PAGES))
        case "person":
            person(large_run(options.folder), options.turns, options.rollouts or 512)
        case "nobody":
            nobody(large_run(options.folder), options.turns, options.rollouts or 256)
        case "xray":
            xray(options.rollouts or 1000)
        case "scrape":
            scrape()


if __name__ == "__main__":
    main()
