"""What a page of the viewer costs: CPU of the server and bytes, of a store with 10,000 rollouts of 10 calls (at most 50 ms and 200 kB), and
the viewer's share of a live run's server CPU with nobody looking and with one person.

    python benchmarks/viewer.py             the pages (the store is made once, in the temporary folder: some minutes)
    python benchmarks/viewer.py --share     a real server that records rollouts of 4 calls beside those: without the viewer and its indices,
                                            with nobody looking, with one person who opens a page every 2 s and hears the news
    python benchmarks/viewer_cpu.py         what one person costs that server, told apart inside it: `--share` is as noisy as its machine
    python benchmarks/viewer.py --person    the same person before a server that does little else: what they cost of a core
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
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path

import httpx
import numpy as np
from starlette.types import ASGIApp

from lightningrl.control.client import ServerClient
from lightningrl.keys import view_key
from lightningrl.loggers import JsonlLogger
from lightningrl.look.reader import open_run
from lightningrl.recipe import Recipe
from lightningrl.records import CallRecord, Lease, Score, ToolCallRecord
from lightningrl.store import SqlStore
from lightningrl.testing.tokenizers import tiny_tokenizer
from lightningrl.types import FinishReason, Outcome, RolloutMode, RolloutSpec, Task, ToolCall, ToolStatus, Transition
from lightningrl.view.app import create_viewer
from lightningrl.view.page import ViewedRun
from lightningrl.view.runs import OneRun

ROLLOUTS, CALLS, GROUP, STEP, TASKS = 10_000, 10, 8, 128, 400
PROMPT, COMPLETION = 60, 40
ROLES, TOOLS = ("plan", "search", "write", "check"), ("search", "open", "run_sql", "calculator")
AT_ONCE = 256
KEY = "the-view-key"
VIEWERS = ("calls_cut", "calls_break", "tool_calls_status", "rollouts_group")
"""Indices that nobody else reads."""
PAGES = (
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
RECIPE = {
    "name": "viewer",
    "agent": "agent.py:answer",
    "tasks": {"train": "agent.py:tasks"},
    "policy": {"model": "policy"},
    "rewards": {"right": {"use": "agent.py:right"}},
    "credit": {"use": "dr_grpo"},
    "loop": {"tasks_per_step": STEP // GROUP, "group_size": GROUP},
}


def make_calls(lease: Lease, rng: np.random.Generator, vocabulary: int, version: int, at: float, turns: int) -> list[CallRecord]:
    """A conversation of so many turns."""
    calls: list[CallRecord] = []
    for index in range(turns):
        parent = calls[-1].transition if calls else None
        before = () if parent is None else (parent.prompt_ids, parent.completion_ids)
        transition = Transition(
            id=f"{lease.rollout_id}/{lease.attempt}/{index}",
            policy="policy",
            policy_version=version,
            prompt_ids=np.concatenate([*before, rng.integers(0, vocabulary, PROMPT, dtype=np.int32)]),
            completion_ids=rng.integers(0, vocabulary, COMPLETION, dtype=np.int32),
            logprobs=-rng.random(COMPLETION, dtype=np.float32),
            finish_reason=FinishReason.LENGTH if rng.random() < 0.01 else FinishReason.STOP,
            parent_id=None if parent is None else parent.id,
            agent=ROLES[int(rng.integers(len(ROLES)))] if index else "plan",
            tool_call_ids=(f"call_{index}",),
            is_break=bool(parent is None and rng.random() < 0.01),
            started_at=at + index,
            duration_s=0.5,
        )
        calls.append(
            CallRecord(
                rollout_id=lease.rollout_id, attempt=lease.attempt, call_key=f"{index}", transition=transition, history_key=f"{index}"
            )
        )
    return calls


async def play(store: SqlStore, rng: np.random.Generator, vocabulary: int, *, turns: int = CALLS, tool_calls: int = CALLS) -> None:
    """One rollout of those that are queued, from its lease to its scores."""
    lease = await store.lease("worker", 3600.0)
    assert lease is not None
    number = int(lease.rollout_id[1:7])
    at = 1.7e9 + number
    calls = make_calls(lease, rng, vocabulary, number // (STEP // GROUP), at, turns)
    await store.append_calls(calls)
    tools = []
    for index in range(tool_calls):
        status = ToolStatus.ERROR if rng.random() < 0.05 else ToolStatus.OK
        name = TOOLS[int(rng.integers(len(TOOLS)))]
        tool = ToolCall(id=f"call_{index}", name=name, arguments='{"q": "what"}', result="a result " * 10, status=status, duration_s=0.1)
        tools.append(ToolCallRecord(tool_call=tool, started_at=at + index))
    if tools:
        await store.append_tool_calls(lease.rollout_id, lease.attempt, tools)
    draw = rng.random()
    outcome = Outcome.SUCCEEDED if draw > 0.06 else Outcome.AGENT_ERROR if draw > 0.03 else Outcome.TIMEOUT
    error = None if outcome is Outcome.SUCCEEDED else "RuntimeError: the tool went away"
    await store.finish_attempt(lease.rollout_id, lease.attempt, outcome, output={"answer": "forty-two"}, error=error, duration_s=10.0)
    share = 0.1 + 0.8 * number / (ROLLOUTS / GROUP)
    reward = None if outcome is not Outcome.SUCCEEDED else float(rng.random() < share)
    values = {} if reward is None else {call.transition.id: np.full(COMPLETION, reward - share, np.float32) for call in calls}
    await store.set_scores(
        [Score(rollout_id=lease.rollout_id, attempt=lease.attempt, rewards={"right": reward}, reward=reward, advantages=values)]
    )


async def make_store(folder: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder / "policy")
    rng = np.random.default_rng(0)
    specs = [
        RolloutSpec(
            id=f"g{number // GROUP:06d}-{number % GROUP:03d}",
            task=Task(id=f"task-{number // GROUP % TASKS}", input={"question": f"question {number // GROUP % TASKS}"}, answer="42"),
            group_id=f"g{number // GROUP:06d}",
            mode=RolloutMode.TRAIN,
            step=number // STEP,
        )
        for number in range(ROLLOUTS)
    ]
    store = await SqlStore.open(f"sqlite:///{folder / 'store.sqlite'}")
    logger = JsonlLogger(folder / "metrics.jsonl")
    try:
        await store.create_rollouts(specs)
        for start in range(0, ROLLOUTS, AT_ONCE):
            await asyncio.gather(*(play(store, rng, len(tokenizer)) for _ in specs[start : start + AT_ONCE]))
        for step in range(-(-ROLLOUTS // STEP)):
            ids = [spec.id for spec in specs[step * STEP : (step + 1) * STEP]]
            metrics = make_metrics(step, len(ids), rng)
            await store.mark_trained(step + 1, ids, metrics)
            logger.log(step + 1, {**metrics, "outcome/succeeded": len(ids) * 0.94, "outcome/timeout": len(ids) * 0.06})
    finally:
        logger.close()
        await store.close()


def write_recipe(folder: Path) -> None:
    """As `lightningrl train` leaves it."""
    (folder / "recipe.json").write_text(Recipe.model_validate(RECIPE).frozen_text(), encoding="utf-8")
    told = {"source": None, "folder": str(folder), "run": str(folder), "settings": {}, "models": {"policy": str(folder / "policy")}}
    (folder / "run.json").write_text(json.dumps(told), encoding="utf-8")


def make_metrics(step: int, rollouts: int, rng: np.random.Generator) -> dict[str, float]:
    mean = 0.1 + 0.01 * step
    metrics = {"reward": mean, "reward/right": mean, "groups": rollouts / GROUP, "groups_without_signal": 3.0, "rollouts": float(rollouts)}
    metrics |= {"calls_per_rollout": float(CALLS), "prompt_tokens": 5e5, "completion_tokens": 5e4, "trained_tokens": 4e4, "breaks": 2.0}
    metrics |= {"seconds": 30.0, "seconds_collect": 20.0, "seconds_reward": 1.0, "seconds_credit": 0.5, "seconds_learn": 8.0}
    return metrics | {"minutes": (step + 1) / 2, "learn/entropy": 1.0 - step / 200, "learn/kl_rollout": 0.001 * float(rng.random())}


async def cost(app: ASGIApp, path: str) -> tuple[float, int]:
    """CPU seconds of the process, and bytes."""
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", follow_redirects=True) as client:
        await client.get(f"/?key={KEY}", follow_redirects=False)
        began = time.process_time()
        answer = await client.get(f"/{path}")
        spent = time.process_time() - began
    answer.raise_for_status()
    return spent, len(answer.content)


async def measure_pages(folder: Path, pages: Sequence[str], times: int = 9) -> None:
    """`anew`: of an earlier page nothing is remembered but the index of its rollouts, which the first look reads; `again`: the
    store is as it was. Imports and templates are loaded before. Credit is computed by a process of its own, which is not in it."""
    async with open_run(folder) as run:
        began = time.process_time()
        await run.queries.step_rewards()
        print(f"first look at {ROLLOUTS:,} rollouts: {1000 * (time.process_time() - began):.0f} ms")
        print(f"{'page':42} {'anew ms':>8} {'again ms':>9} {'kB':>7}")

        @contextmanager
        def viewer() -> Iterator[ASGIApp]:
            viewed = ViewedRun(name=folder.name, folder=folder, run=run)
            try:
                yield create_viewer(OneRun(viewed), key=KEY)
            finally:
                viewed.credit.close()

        async def look_anew(page: str) -> float:
            with viewer() as app:
                return (await cost(app, page))[0]

        for page in pages:
            await look_anew(page)
            anew = statistics.median([await look_anew(page) for _ in range(times)])
            with viewer() as app:
                found = [await cost(app, page) for _ in range(times)]
            again = statistics.median(spent for spent, _ in found[1:])
            print(f"/{page:41} {1000 * anew:8.1f} {1000 * again:9.1f} {found[0][1] / 1000:7.1f}")


AGENT = """
import openai

client = openai.OpenAI(api_key="the-users-own")

def answer(task):
    messages = [{"role": "system", "content": "Table singer(id, name, age, country), concert(id, singer_id, year). " * 8}]
    for turn in range(4):
        messages.append({"role": "user", "content": f"{task['question']} An error; write it again, for the {turn}th time."})
        reply = client.chat.completions.create(model="gpt-4o-mini", messages=messages)
        messages.append({"role": "assistant", "content": reply.choices[0].message.content})
    return messages[-1]["content"]
"""


def cpu_of(pid: int) -> float:
    """User and system CPU seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def look_on(url: str) -> None:
    """One person: the stream of news is open, and every two seconds they open a page."""
    pages = "", "rollouts", "rollouts?sort=newest", "rollouts?outcome=timeout", "rollouts/g000300-003", "system"
    async with httpx.AsyncClient(base_url=f"{url}/view", follow_redirects=True, timeout=60) as browser:
        (await browser.get(f"/?key={view_key(KEY)}")).raise_for_status()

        async def listen() -> None:
            async with browser.stream("GET", "/events?after=0.0.0") as news:
                async for _ in news.aiter_lines():
                    pass

        async with asyncio.TaskGroup() as group:
            group.create_task(listen())
            for page in itertools.cycle(pages):
                (await browser.get(f"/{page}")).raise_for_status()
                await asyncio.sleep(2.0)


@asynccontextmanager
async def running(folder: Path, *, is_viewed: bool | None) -> AsyncIterator[tuple[int, ServerClient]]:
    """A run's server, as its process and a client of it, with an engine and workers. `is_viewed` None: it has no viewer; True: a person
    looks."""
    from lightningrl.engines.link import EngineLink
    from lightningrl.runtime.pool import WorkerPool
    from lightningrl.server.launcher import ServerProcess
    from lightningrl.server.settings import PolicySettings, ServerSettings
    from lightningrl.testing.scripted_engine import ScriptedEngine

    settings = ServerSettings(
        store_url=f"sqlite:///{folder / 'store.sqlite'}",
        run_key=KEY,
        policies={"policy": PolicySettings(model=folder / "policy")},
        folder=None if is_viewed is None else folder,
    )
    (folder / "agent.py").write_text(AGENT, encoding="utf-8")
    async with (
        ServerProcess(settings) as server,
        EngineLink(ScriptedEngine(tiny_tokenizer(), reply=lambda _: "SELECT name FROM singer " * 2), server.url, KEY),
        ServerClient(server.url, KEY) as client,
        WorkerPool(server.url, KEY, "agent.py:answer", workers=2, base_dir=folder, log_folder=folder) as pool,
    ):
        await pool.wait_ready()
        assert server.pid is not None
        person = asyncio.create_task(look_on(server.url)) if is_viewed else None
        await asyncio.sleep(2.0)  # the first page imports what pages are made with
        yield server.pid, client
        if person is not None:
            assert not person.done(), person.exception()
            person.cancel()


async def play_out(client: ServerClient, rollouts: int) -> None:
    """So many new rollouts, to their ends."""
    specs = [
        RolloutSpec(id=f"n{number:06d}", task=Task(id=f"t{number}", input={"question": f"{number}?"}), group_id=f"n{number // GROUP}")
        for number in range(rollouts)
    ]
    await client.create_rollouts(specs)
    await client.wait([spec.id for spec in specs], 600)


async def record(folder: Path, rollouts: int, *, is_viewed: bool | None) -> tuple[float, float]:
    """CPU seconds of a run's server for so many rollouts, and how long they took."""
    async with running(folder, is_viewed=is_viewed) as (pid, client):
        if is_viewed is None:
            with closing(sqlite3.connect(folder / "store.sqlite", timeout=60)) as db:
                for name in VIEWERS:
                    db.execute(f"DROP INDEX IF EXISTS {name}")
        before, began = cpu_of(pid), time.monotonic()
        await play_out(client, rollouts)
        return cpu_of(pid) - before, time.monotonic() - began


def measure_share(store: Path, rollouts: int, turns: int) -> None:
    """In turns, since other processes share the machine. `store`: what the run has recorded before."""
    kinds = {"no viewer": None, "nobody looks": False, "one person": True}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    with tempfile.TemporaryDirectory() as scratch:
        for turn in range(turns):
            for name, is_viewed in kinds.items():
                folder = Path(scratch) / f"{turn}-{name.replace(' ', '-')}"
                shutil.copytree(store, folder)
                found[name].append(asyncio.run(record(folder, rollouts, is_viewed=is_viewed)))
                shutil.rmtree(folder)
    plain = statistics.median(spent for spent, _ in found["no viewer"])
    for name, pairs in found.items():
        spent, took = (statistics.median(column) for column in zip(*pairs, strict=True))
        one = f"{1000 * spent / rollouts:6.1f} ms of CPU a rollout, {spent / took:4.0%} of a core"
        print(f"{name:14} {one}  {spent / plain - 1:+.1%}  {(spent - plain) / took:+.2%} of a core")


async def measure_person(store: Path, window_s: float = 36.0) -> None:
    """What one person costs a server that does nothing else but take two rollouts a second, so that no page is as the store is."""
    from lightningrl.server.launcher import ServerProcess
    from lightningrl.server.settings import PolicySettings, ServerSettings

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        shutil.copytree(store, folder)
        settings = ServerSettings(
            store_url=f"sqlite:///{folder / 'store.sqlite'}",
            run_key=KEY,
            policies={"policy": PolicySettings(model=folder / "policy")},
            folder=folder,
        )
        async with ServerProcess(settings) as server, ServerClient(server.url, KEY) as client:

            async def record() -> None:
                for number in itertools.count():
                    await client.create_rollouts([RolloutSpec(id=f"z{number}", task=Task(id="t", input="x"), group_id="z")])
                    await client.lease("nobody", 3600.0)
                    await asyncio.sleep(0.5)

            async def measure(who: str) -> None:
                assert server.pid is not None
                before, began = cpu_of(server.pid), time.monotonic()
                await asyncio.sleep(window_s)
                print(f"{who:14} {(cpu_of(server.pid) - before) / (time.monotonic() - began):.2%} of a core", flush=True)

            recording = asyncio.create_task(record())
            for _ in range(2):
                await measure("nobody looks")
                person = asyncio.create_task(look_on(server.url))
                await asyncio.sleep(15.0)  # their first pages import what pages are made with
                await measure("one person")
                person.cancel()
            recording.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()) / f"lightningrl-viewer-{ROLLOUTS}", help="where the store is"
    )
    parser.add_argument("pages", nargs="*", help="only these")
    parser.add_argument("--share", action="store_true", help="what the viewer adds to a server that records a run")
    parser.add_argument("--person", action="store_true", help="what one person costs a server that does little else")
    parser.add_argument("--rollouts", type=int, default=256, help="that are recorded meanwhile")
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    if not (folder / "made").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        began = time.perf_counter()
        asyncio.run(make_store(folder))
        (folder / "made").touch()
        print(f"made {ROLLOUTS:,} rollouts of {CALLS} calls in {time.perf_counter() - began:.0f} s")
    write_recipe(folder)
    if arguments.person:
        asyncio.run(measure_person(folder))
        return
    if arguments.share:
        measure_share(folder, arguments.rollouts, arguments.turns)
        return
    asyncio.run(measure_pages(folder, arguments.pages or PAGES))


if __name__ == "__main__":
    main()
