"""A server that answers what it likes: each answer ends as an EnvironmentFailure in a sentence, and takes no memory."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import threading
import time
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from lightningrl.types import Task
from lightningrl_tasks_openenv import EnvironmentFailure, OpenEnvTasks
from lightningrl_tasks_openenv.episode import read_arguments
from lightningrl_tasks_openenv.source import find_port
from lightningrl_tasks_openenv.wire import TaskApi

DEEP = "[" * 60_000 + "]" * 60_000
GOOD = {
    "list_environments": '["e"]',
    "e/splits": '[{"name": "train"}]',
    "e/num_tasks": '{"num_tasks": 3}',
    "e/task_range": '{"tasks": [{}, {}, {}]}',
    "schema": '{"action": {"properties": {}}}',
    "reset": '{"type": "observation", "data": {"observation": {"prompt": "?"}}}',
    "mcp": '{"type": "mcp", "data": {"result": {"tools": [{"name": "t", "inputSchema": {}}]}}}',
    "step": '{"type": "observation", "data": {"observation": {}, "reward": 1, "done": true}}',
}


class Hostile:
    """Says what it is told to, else what is right."""

    def __init__(self) -> None:
        self.said: dict[str, str] = {}
        self.url = f"http://127.0.0.1:{find_port()}"
        routes = [WebSocketRoute("/ws", self.talk), Route("/{path:path}", self.answer, methods=["GET", "POST"])]
        port = int(self.url.rpartition(":")[2])
        self.server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), port=port, log_level="error"))

    def words(self, what: str) -> str:
        return {**GOOD, **self.said}[what]

    async def answer(self, request: Request) -> Response:
        words = self.words(request.path_params["path"])
        return StreamingResponse(endless()) if words == "endless" else Response(words)

    async def talk(self, socket: WebSocket) -> None:
        await socket.accept()
        try:
            while (kind := json.loads(await socket.receive_text())["type"]) != "close":
                await socket.send_text(self.words(kind))
        except WebSocketDisconnect:
            return


async def endless() -> AsyncIterator[bytes]:
    while True:
        yield b" " * 2**20
        await asyncio.sleep(0)


@pytest.fixture(scope="module")
def server() -> Iterator[Hostile]:
    server = Hostile()
    thread = threading.Thread(target=server.server.run, daemon=True)
    thread.start()
    while not server.server.started:
        time.sleep(0.01)
    yield server
    server.server.should_exit = True
    thread.join()


def text(value: Any) -> str:
    return json.dumps(value)


def observed(**data: Any) -> str:
    return text({"type": "observation", "data": data})


def refused(**data: Any) -> str:
    return text({"type": "error", "data": {"code": "VALIDATION_ERROR", "message": "no", **data}})


OF_TASKS = [
    *(("list_environments", words) for words in ("{}", "[]", "5", "[1]", "[{}]", DEEP, "endless", "no", '"x"', "null")),
    *(("e/splits", words) for words in ("{}", "[1]", '[{"nam": 1}]', '[{"name": [1]}]', '"train"', DEEP, "5")),
    *(("e/num_tasks", words) for words in ("[]", "{}", DEEP, "7", "endless")),
    *(
        ("e/num_tasks", f'{{"num_tasks": {n}}}')
        for n in ('"x"', "[1]", "1e999", "-1", "true", "1.5", "1" * 400, "1" * 5000)
    ),
    *(("e/task_range", words) for words in ("[]", "{}", '{"tasks": {}}', '{"tasks": [1]}', '{"tasks": "abc"}', DEEP)),
]
REWARDS: list[Any] = [True, 1e308, -1e308, 10**400, "1", [1], {}]
OF_EPISODES = [
    *(("reset", words) for words in ("[]", "5", DEEP, "null", '"x"', '{"type": ["observation"]}', "{}", "no")),
    *(("reset", text({"type": "observation", "data": data})) for data in ([1], "x", 5)),
    *(("reset", observed(observation=value)) for value in ([1], "text", 5)),
    ("reset", observed(observation={"metadata": [1]})),
    *(("reset", refused(errors=value)) for value in (5, [5], {"a": 1}, [{"loc": 5}])),
    ("reset", refused(code=["x"])),
    *(("mcp", text({"type": "mcp", "data": {"result": value}})) for value in (5, [1], {"tools": 5}, {"tools": [5]})),
    *(("mcp", text({"type": "mcp", "data": {"result": {"tools": [tool]}}})) for tool in ({}, {"name": [1]})),
    ("mcp", text({"type": "mcp", "data": {"result": {"tools": [{"name": "t", "inputSchema": [1]}]}}})),
    *(("step", observed(observation={}, reward=value)) for value in REWARDS),
    *(("step", f'{{"type": "observation", "data": {{"reward": {value}}}}}') for value in ("NaN", "1e999", "-Infinity")),
]


@pytest.mark.parametrize(("what", "words"), OF_TASKS)
def test_odd_answers_of_the_task_api_are_failures_of_the_environment(server: Hostile, what: str, words: str) -> None:
    server.said = {what: words}
    with pytest.raises(EnvironmentFailure) as failure:
        list(OpenEnvTasks(url=server.url).tasks("train", seed=0, count=2))
    assert len(str(failure.value)) < 1_000 and "\n" not in str(failure.value)


@pytest.mark.parametrize(("what", "words"), OF_EPISODES)
async def test_odd_answers_of_an_episode_are_failures_of_the_environment(
    server: Hostile, what: str, words: str
) -> None:
    server.said = {what: words}
    with pytest.raises(EnvironmentFailure) as failure:
        await OpenEnvTasks(url=server.url).replay(Task(id="train-0", input={}), [{"tool": "t", "arguments": {}}])
    assert len(str(failure.value)) < 1_000


@pytest.mark.parametrize("words", ["[1]", "5", '{"action": [1]}', '{"action": {"properties": [1]}}', DEEP])
def test_odd_schemas_are_failures_of_the_environment(server: Hostile, words: str) -> None:
    server.said = {"schema": words}
    with contextlib.closing(TaskApi(server.url)) as api, pytest.raises(EnvironmentFailure):
        api.action_schema()


def test_what_is_right_is_taken(server: Hostile) -> None:
    server.said = {}
    source = OpenEnvTasks(url=server.url)
    assert [task.id for task in source.tasks("train", seed=0, count=2)] == ["train-2", "train-1"]
    assert asyncio.run(source.replay(Task(id="train-0", input={}), [{"tool": "t", "arguments": {}}])) == 1.0


def test_a_split_of_very_many_tasks_is_drawn_from_without_a_list_of_them(server: Hostile) -> None:
    server.said = {"e/num_tasks": text({"num_tasks": 2**53}), "e/task_range": '{"tasks": [{"q": 1}]}'}
    tracemalloc.start()
    try:
        tasks = list(itertools.islice(OpenEnvTasks(url=server.url).tasks("train", seed=0, count=None), 20))
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()
    assert len({task.id for task in tasks}) == 20


def test_arguments_of_the_policy_may_be_as_deep_as_they_like() -> None:
    assert read_arguments(DEEP)[0] is None
