"""The wire of OpenEnv 0.10: its task API over HTTP, its sessions over a WebSocket.

GET  /list_environments                 ["sums"]
GET  /{name}/splits                     [{"name": "train", "type": "train"}, …]       501 = it has no task API
POST /{name}/num_tasks, …/task_range    {"split", …}
WS   /ws   reset, step, mcp, close  ─►  observation {observation, reward, done}, mcp {result | error}, error {code}
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar
from urllib.parse import quote, urlsplit

import httpx
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

from lightningrl.errors import LightningError
from lightningrl.sanitize import parse_json

__all__ = ["ActionRefused", "EnvironmentFailure", "Observation", "Session", "TaskApi", "open_session"]

T = TypeVar("T")
LONGEST_MESSAGE: Final = 16 * 2**20
"""Bytes of one answer of a server."""
CLOSING_S: Final = 2.0
FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 2.0
MOST_TASKS: Final = 2**53
LARGEST_REWARD: Final = 1e6
"""Bound of one step's: a sum of a thousand is the largest reward that a run takes."""
SCHEMAS: Final = ("inputSchema", "input_schema")
"""openenv writes a tool's schema in two ways."""
LONGEST_QUOTE: Final = 400
"""Characters of a server's own words in a sentence."""
LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1"})


class EnvironmentFailure(LightningError):
    """The server cannot be reached, or its environment failed. A worker reports it as `infrastructure_error`: it is
    nobody's answer to a task, and is tried again."""

    status_code: int = 503


class ActionRefused(LightningError):
    """The environment did not take an action. Its words are the tool's result; the episode goes on."""

    def __init__(self, message: str, *, is_invalid: bool) -> None:
        super().__init__(message)
        self.is_invalid = is_invalid
        """The action does not fit the schema, rather than the environment having raised."""


class _AtCapacity(Exception):
    """All sessions of the server are taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """Answer of an environment to a reset or a step."""

    fields: Mapping[str, Any]
    """Fields that the environment gave it, metadata left out."""
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    reward: float | None = None
    """None = the environment did not say."""
    done: bool = False

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Observation:
        """Read an observation from the wire. Raises EnvironmentFailure where it is none."""
        fields = dict(_expect(data.get("observation") or {}, dict, "an observation"))
        metadata = _expect(fields.pop("metadata", None) or data.get("metadata") or {}, dict, "metadata")
        reward = data.get("reward")
        if reward is not None and not abs(_expect(reward, (int, float), "a reward")) <= LARGEST_REWARD:
            shown = f"{reward:g}" if isinstance(reward, float) else f"{str(reward)[:40]}"
            raise EnvironmentFailure(
                f"the environment gave the reward {shown}, no number from {-LARGEST_REWARD:g} to {LARGEST_REWARD:g}; "
                "mend its step_async"
            )
        return cls(
            fields=fields,
            metadata=metadata,
            reward=None if reward is None else float(reward),
            done=bool(data.get("done")),
        )


class TaskApi:
    """The tasks of a server, asked for over HTTP."""

    def __init__(self, url: str, *, timeout_s: float = 60.0) -> None:
        self.url = url
        self._client = httpx.Client(timeout=timeout_s, trust_env=not is_loopback(url))

    def close(self) -> None:
        """Close its connections."""
        self._client.close()

    def environment(self) -> str:
        """Name of the environment that the server has."""
        names = _expect(self._ask("GET", "/list_environments"), list, "a list of environments")
        if not names:
            raise EnvironmentFailure(f"{self.url} has no environment; look what its server was started with")
        return _expect(names[0], str, "an environment's name")

    def splits(self, environment: str) -> list[str] | None:
        """Names of its splits; None where it has no task API."""
        answer = self._ask("GET", f"/{quote(environment, safe='')}/splits")
        if answer is None:
            return None
        splits = [_expect(split, dict, "a split") for split in _expect(answer, list, "a list of splits")]
        return [_expect(split.get("name"), str, "a split's name") for split in splits]

    def count(self, environment: str, split: str) -> int:
        """Number of tasks of a split."""
        answer = self._ask("POST", f"/{quote(environment, safe='')}/num_tasks", {"split": split})
        if answer is None:
            raise EnvironmentFailure(f"the environment {environment!r} has splits and no num_tasks; mend its task API")
        count = _expect(_expect(answer, dict, "num_tasks").get("num_tasks"), int, "num_tasks")
        if not 0 <= count <= MOST_TASKS:
            shown = str(count)[:40]
            raise EnvironmentFailure(
                f"the split {split!r} has {shown} tasks, it says; mend num_tasks of {environment!r}"
            )
        return count

    def specs(self, environment: str, split: str, start: int, stop: int) -> list[Any]:
        """Descriptions of the tasks from `start` to before `stop`; empty ones where it gives none."""
        asked = {"split": split, "start": start, "stop": stop}
        answer = self._ask("POST", f"/{quote(environment, safe='')}/task_range", asked)
        if answer is None:
            return [{}] * (stop - start)
        tasks = _expect(_expect(answer, dict, "task_range").get("tasks"), list, "tasks of task_range")
        if len(tasks) != stop - start:
            raise EnvironmentFailure(
                f"{environment!r} gave {len(tasks)} tasks from {start} to before {stop}; mend its task_range"
            )
        return tasks

    def action_schema(self) -> dict[str, Any]:
        """JSON schema of the environment's own actions."""
        answer = _expect(self._ask("GET", "/schema") or {}, dict, "a schema")
        action = _expect(answer.get("action") or {}, dict, "a schema of actions")
        _expect(action.get("properties") or {}, dict, "properties of a schema")
        return action

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        """The answer; None = the server does not offer it (501)."""
        try:
            # identity: what is unpacked could be a thousand times what was read
            unpacked = {"accept-encoding": "identity"}
            with self._client.stream(method, self.url + path, json=body, headers=unpacked) as answer:
                content = bytearray()
                for part in answer.iter_raw():
                    content += part
                    if len(content) > LONGEST_MESSAGE:
                        raise EnvironmentFailure(f"{self.url}{path} answers more than {LONGEST_MESSAGE} bytes; mend it")
            if answer.status_code == httpx.codes.NOT_IMPLEMENTED:
                return None
            if answer.is_error:
                words = f"{answer.status_code} {content[:LONGEST_QUOTE].decode(errors='replace')}"
                raise EnvironmentFailure(
                    f"{self.url} is no OpenEnv 0.10 server, or its environment failed: {path} answers {words}"
                )
            return parse_json(bytes(content))
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise unreachable(self.url, error) from error


class Session:
    """One environment of the server, for one rollout. Not to be used by two tasks at once."""

    def __init__(self, url: str, connection: ClientConnection, *, step_timeout_s: float) -> None:
        self.url = url
        self._connection = connection
        self._step_timeout_s = step_timeout_s

    async def reset(self, parameters: Mapping[str, Any]) -> Observation:
        """Begin an episode. Raises EnvironmentFailure."""
        try:
            return Observation.parse(await self._ask("reset", "observation", dict(parameters)))
        except ActionRefused as error:
            raise EnvironmentFailure(
                f"the environment at {self.url} did not begin an episode with {dict(parameters)}: {error}"
            ) from error

    async def step(self, action: Mapping[str, Any]) -> Observation:
        """Take a step. Raises ActionRefused, EnvironmentFailure."""
        return Observation.parse(await self._ask("step", "observation", dict(action)))

    async def tools(self) -> list[dict[str, Any]] | None:
        """Tools of this episode as MCP lists them; None where the environment speaks no MCP."""
        request = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
        answer = await self._ask("mcp", "mcp", request)
        if "result" not in answer:
            return None
        listed = _expect(_expect(answer["result"], dict, "a result of tools/list").get("tools") or [], list, "tools")
        for tool in listed:
            _expect(_expect(tool, dict, "a tool").get("name"), str, "a tool's name")
            for name in SCHEMAS:
                _expect(tool.get(name) or {}, dict, "a tool's schema")
        return listed

    async def _ask(self, kind: str, expected: str, data: Any) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self._step_timeout_s):
                with contextlib.suppress(ConnectionClosed):  # a server that is full has told so, and closed
                    await self._connection.send(json.dumps({"type": kind, "data": data}))
                words = await self._connection.recv()
                answer = _expect(parse_json(words.encode() if isinstance(words, str) else words), dict, "a message")
        except TimeoutError as error:
            remedy = "raise step_timeout_s, or look what it waits for"
            raise EnvironmentFailure(
                f"the environment at {self.url} gave no answer to {kind!r} within {self._step_timeout_s:g} s; {remedy}"
            ) from error
        except (WebSocketException, OSError, ValueError) as error:
            raise unreachable(self.url, error) from error
        content = _expect(answer.get("data") or {}, dict, f"data of {kind!r}")
        if answer.get("type") == "error":
            raise self._read_error(content)
        if answer.get("type") != expected:
            raise EnvironmentFailure(
                f"{self.url} answers {kind!r} with {str(answer.get('type'))[:40]!r}; openenv 0.10 is spoken here"
            )
        return content

    def _read_error(self, words: Mapping[str, Any]) -> Exception:
        code, message = words.get("code"), str(words.get("message"))[:LONGEST_QUOTE]
        if code == "CAPACITY_REACHED":
            return _AtCapacity()
        if code == "VALIDATION_ERROR":
            errors = _expect(words.get("errors") or [], list, "errors of a validation")
            wrong = "; ".join(
                f"{'.'.join(map(str, _expect(error.get('loc', []), list, 'a place')))}: {error.get('msg')}"
                for error in (_expect(error, dict, "an error of a validation") for error in errors)
            )
            return ActionRefused(wrong[:LONGEST_QUOTE] or message, is_invalid=True)
        if code == "EXECUTION_ERROR":
            return ActionRefused(message, is_invalid=False)
        return EnvironmentFailure(
            f"the environment at {self.url} failed ({str(code)[:40]}): {message}; its server's log says more"
        )


@contextlib.asynccontextmanager
async def open_session(
    url: str, parameters: Mapping[str, Any], *, step_timeout_s: float, capacity_wait_s: float
) -> AsyncIterator[tuple[Session, Observation]]:
    """A session that has been reset, and the first observation; closed at the end of the block, however it ends.

    Waits `capacity_wait_s` at most while all sessions of the server are taken. Raises EnvironmentFailure."""
    loop = asyncio.get_running_loop()
    patience, pause = loop.time() + capacity_wait_s, FIRST_PAUSE_S
    while True:
        connection = await _connect(url, step_timeout_s)
        try:
            session = Session(url, connection, step_timeout_s=step_timeout_s)
            with contextlib.suppress(_AtCapacity):
                yield session, await session.reset(parameters)
                return
        finally:
            await _close(connection)
        if loop.time() + pause > patience:
            raise EnvironmentFailure(
                f"all sessions of {url} were taken for {capacity_wait_s:g} s; start its server with a larger "
                "max_concurrent_envs, or lower runtime.workers and runtime.concurrency"
            )
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)


async def _connect(url: str, timeout_s: float) -> ClientConnection:
    address = "ws" + url.removeprefix("http") + "/ws"
    try:
        return await connect(
            address,
            max_size=LONGEST_MESSAGE,
            open_timeout=timeout_s,
            close_timeout=CLOSING_S,
            ping_interval=None,  # a step may hold the server's event loop for longer than a ping may take
            proxy=None if is_loopback(url) else True,
        )
    except (WebSocketException, OSError, TimeoutError) as error:
        raise unreachable(url, error) from error


async def _close(connection: ClientConnection) -> None:
    """Let the server end the environment; a server that has gone needs no word."""
    try:
        async with asyncio.timeout(CLOSING_S):
            with contextlib.suppress(WebSocketException, OSError):
                await connection.send('{"type": "close"}')
            await connection.close()
    except TimeoutError:
        pass
    finally:
        connection.transport.abort()


def _expect(value: Any, kind: type[T] | tuple[type[T], ...], what: str) -> T:
    """The value, where it is of a kind; true and false are no numbers. Raises EnvironmentFailure."""
    if isinstance(value, kind) and not isinstance(value, bool):
        return value
    shown = type(value).__name__ if isinstance(value, dict | list) else repr(value)[:40]
    raise EnvironmentFailure(f"the OpenEnv server gave {shown} as {what}; openenv 0.10 is spoken here, mend the server")


def is_loopback(url: str) -> bool:
    """True where the server is on this machine: no proxy is asked."""
    return urlsplit(url).hostname in LOOPBACK


def unreachable(url: str, error: BaseException) -> EnvironmentFailure:
    """A failure to speak with the server at all."""
    words = f"{type(error).__name__}: {error}"[:LONGEST_QUOTE]
    return EnvironmentFailure(f"the OpenEnv server at {url} does not answer ({words}); look whether it runs")
