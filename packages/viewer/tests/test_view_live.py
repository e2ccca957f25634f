"""A live run tells what is new: each step once, whatever becomes of its server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from recorded import RECIPE, write_recipe
from sizes import PATIENCE_S

from lightningrl.keys import view_key
from lightningrl.types import Outcome, RolloutSpec, Task
from lightningrl_client.control.client import ServerClient
from lightningrl_runs.reader import StoredRun
from lightningrl_server.launcher import ServerProcess
from lightningrl_server.settings import ServerSettings
from lightningrl_server.store import SqlStore
from lightningrl_viewer.app import Place, stream_news

RUN_KEY = "the-run-key"


async def add_steps(control: ServerClient, *steps: int) -> None:
    """Each with a rollout of its own."""
    for step in steps:
        spec = RolloutSpec(id=f"g{step:06d}-000", task=Task(id="t", input="x"), group_id=f"g{step:06d}")
        await control.create_rollouts([spec])
        lease = await control.lease("w", 60.0)
        assert lease is not None
        await control.finish_attempt(spec.id, lease.attempt, Outcome.SUCCEEDED)
        await control.mark_trained(step, [spec.id], {"reward": 0.5})


class Listener:
    """A browser's EventSource: it comes back with the last id that it has heard."""

    def __init__(self, url: str) -> None:
        self._client = httpx.AsyncClient(base_url=f"{url}/view", timeout=PATIENCE_S)
        self.last = "0.0.0"
        self.steps: list[int] = []
        self.heard = asyncio.Condition()

    async def run(self) -> None:
        """Until it is cancelled."""
        await self._client.get("/", params={"key": view_key(RUN_KEY)})
        while True:
            try:
                async with self._client.stream("GET", "/events", headers={"last-event-id": self.last}) as answer:
                    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
                    async for line in answer.aiter_lines():
                        await self._take(line)
            except httpx.TransportError:
                await asyncio.sleep(0.02)

    async def close(self) -> None:
        await self._client.aclose()

    async def get(self, address: str) -> httpx.Response:
        return await self._client.get(address)

    async def wait_for(self, step: int) -> None:
        async with asyncio.timeout(PATIENCE_S), self.heard:
            await self.heard.wait_for(lambda: step in self.steps)

    async def _take(self, line: str) -> None:
        if line.startswith("id: "):
            self._id = line[4:]
        elif line.startswith("data: "):
            async with self.heard:
                self.last = self._id
                self.steps += json.loads(line[6:])["steps"]
                self.heard.notify_all()


async def test_no_step_is_missed_or_doubled_over_a_killed_server(tmp_path: Path) -> None:
    write_recipe(tmp_path, RECIPE)
    settings = ServerSettings(store_url=f"sqlite:///{tmp_path / 'store.sqlite'}", run_key=RUN_KEY, folder=tmp_path)
    async with ServerProcess(settings) as server, ServerClient(server.url, RUN_KEY) as control:
        await add_steps(control, 1, 2)
        listener = Listener(server.url)
        listening = asyncio.create_task(listener.run())
        await listener.wait_for(2)
        for steps in ((3,), (4, 5, 6)):
            await add_steps(control, *steps)  # told, or killed before: it may be either
            assert server.pid is not None
            os.kill(server.pid, signal.SIGKILL)
            await server.wait_ended()
            await server.restart()
        await add_steps(control, 7)
        await listener.wait_for(7)
        system = (await listener.get("/system")).text
        assert "calls of no rollout" not in system
        async with httpx.AsyncClient() as stranger:
            assert (await stranger.post(f"{server.url}/v1/chat/completions", json={})).status_code == 403
        assert "calls of no rollout" in (await listener.get("/system")).text, (
            "and a task that outlived its rollout is as strange"
        )
        assert "of the server's event loop" in system.replace("&#39;", "'"), "the server says how it is"
        listening.cancel()
        await asyncio.wait({listening})
        await listener.close()
    assert listener.steps == [1, 2, 3, 4, 5, 6, 7]


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqlStore]:
    store = await SqlStore.open(f"sqlite:///{tmp_path / 'store.sqlite'}")
    yield store
    await store.close()


async def hear(store: SqlStore, after: Place | None, until: int, do: Any = None) -> list[dict[str, Any]]:
    """So many events; `do` is awaited after the first."""

    async def stays() -> bool:
        return False

    found: list[dict[str, Any]] = []
    async with asyncio.timeout(PATIENCE_S):
        async for event in stream_news(StoredRun(store, lambda _: None), after, stays, interval_s=0.001):
            if "data: " in event:
                found.append(json.loads(event.partition("data: ")[2]))
                if len(found) == 1 and do is not None:
                    await do()
                if len(found) == until:
                    break
    return found


async def test_steps_that_a_resumed_run_takes_back_are_told_and_come_again(store: SqlStore) -> None:
    await add_steps(store, 1, 2, 3)  # type: ignore[arg-type]

    async def resume() -> None:
        await store.rollback_steps(1)

    first, back = await hear(store, Place(step=1), 2, resume)
    assert (first["steps"], back["steps"], back["back"]) == ([2, 3], [], True)
    await store.mark_trained(2, ["g000002-000"], {})
    assert (await hear(store, Place(step=1), 1))[0]["steps"] == [2]


async def test_who_comes_for_the_first_time_hears_what_is_new_from_now_on(store: SqlStore) -> None:
    await add_steps(store, 1)  # type: ignore[arg-type]

    async def go_on() -> None:
        await add_steps(store, 2)  # type: ignore[arg-type]

    events = await hear(store, None, 2, go_on)
    assert events[0]["steps"] == []
    assert 1 not in events[1]["steps"]


@pytest.mark.parametrize("text", ["", "x", "1.2", "1.2.3.4", "1.-2.3", "1.2.³", "9" * 40 + ".0.0"])
def test_an_id_that_is_none_is_as_none(text: str) -> None:
    assert Place.read(text) is None


def test_a_place_is_read_as_it_is_written() -> None:
    assert Place.read(str(Place(step=3, attempt=4, call=5))) == Place(step=3, attempt=4, call=5)
