"""An OpenEnv server as a source of tasks.

task API, or seeds ─► tasks(split, seed, count) ─► Task(id = what the environment is reset with)
agent(input, task)  a session, the default agent's episode        reward(…)  what it reported, or a replay
command             the server as a child: started when it is first needed, again after it died, ended with us
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import shlex
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import httpx

import lightningrl
from lightningrl.errors import ConfigError
from lightningrl.processes import Child
from lightningrl.types import Task, Trajectory
from lightningrl_tasks_openenv.episode import REWARD, Episode, Returns
from lightningrl_tasks_openenv.shapes import Tool, opening_messages, read_action_tool, read_tools
from lightningrl_tasks_openenv.wire import (
    ActionRefused,
    EnvironmentFailure,
    Observation,
    Session,
    TaskApi,
    is_loopback,
    open_session,
)

__all__ = ["OpenEnvTasks", "ServerProcess", "find_port"]

PAGE: Final = 100
"""Tasks that the server is asked about at once."""
MOST_SHUFFLED: Final = 1_000_000
"""Tasks of which a list is made."""
PLACE: Final = frozenset({"id", "index", "split"})
"""Keys of a task's description that only say where it is."""
GREATEST_SEED: Final = 2**31 - 1
SEED: Final = "seed"
LOOK_S: Final = 0.05
GRACE_S: Final = 3.0
"""Between SIGTERM and SIGKILL."""
LISTENING_S: Final = 5.0


class OpenEnvTasks:
    """Tasks, tools and rewards of one OpenEnv server, which runs at `url` or which `command` starts."""

    def __init__(
        self,
        *,
        url: str | None = None,
        command: str | Sequence[str] | None = None,
        folder: str | None = None,
        splits: Mapping[str, str] | None = None,
        reset: Mapping[str, Any] | None = None,
        prompt: str | None = None,
        system: str | None = None,
        answer: str | None = None,
        submit: str | None = None,
        unscored: float | None = None,
        model: str = "gpt-4o-mini",
        max_calls: int = 16,
        longest_observation: int = 20_000,
        step_timeout_s: float = 120.0,
        start_timeout_s: float = 120.0,
        capacity_wait_s: float = 300.0,
        recipe_folder: Path | None = None,
    ) -> None:
        """Take the options of a recipe. Raises ConfigError.

        url, command: one of them; `{port}` in the command is a free port, `folder` where it runs, from
        the recipe's folder on.
        splits: the server's name of a split, by ours (`{validation = "test"}`). reset: further arguments of reset.
        prompt: field of the first observation that the model is asked with. system: a system message before it.
        answer: key of a task's description that holds the reference; it is taken out of the input. submit:
        `"tool.argument"` that takes the model's plain text: this tool is not offered, the text is its argument.
        unscored: what an episode earns none of whose steps had a reward; None = that is an error.
        """
        if (url is None) == (command is None):
            raise ConfigError("openenv: give either url, of a server that runs, or command, which starts one")
        if url is not None and urlsplit(url).scheme not in {"http", "https"}:
            raise ConfigError(
                f"openenv: url {url!r} is no http(s) address; give something like 'http://127.0.0.1:8000'"
            )
        words = shlex.split(command) if isinstance(command, str) else list(command or ())
        if command is not None and not any("{port}" in word for word in words):
            raise ConfigError(
                f"openenv: command {command!r} has no {{port}}; write 'python -m my_env.server.app --port {{port}}'"
            )
        if submit is not None and not all(submit.partition(".")):
            raise ConfigError(f"openenv: submit {submit!r} names no tool and argument; write 'answer.text'")
        if max_calls < 1 or longest_observation < 1:
            raise ConfigError(
                f"openenv: max_calls {max_calls} and longest_observation {longest_observation} are 1 or more"
            )
        self._url = None if url is None else url.rstrip("/")
        place = (recipe_folder or Path()) / (folder or "")
        self._child = None if url is not None else ServerProcess(words, folder=place, start_timeout_s=start_timeout_s)
        self._splits, self._reset = dict(splits or {}), dict(reset or {})
        self._prompt, self._system, self._answer = prompt, system, answer
        tool, _, argument = (submit or "").partition(".")
        self._submit = (tool, argument) if submit else None
        self._unscored, self._model, self._max_calls, self._longest = unscored, model, max_calls, longest_observation
        self._limits = {"step_timeout_s": step_timeout_s, "capacity_wait_s": capacity_wait_s}
        self._action_tool: Tool | None = None
        self.requires = frozenset({"network"} if url is not None and not is_loopback(url) else ())

    def close(self) -> None:
        """End a server that `command` started."""
        if self._child is not None:
            self._child.close()

    def tasks(self, split: str, /, *, seed: int, count: int | None) -> Iterator[Task]:
        """The split's tasks in the seed's order; without a task API, seeds of the environment, without end.

        Raises ConfigError for a split that the server does not have, EnvironmentFailure."""
        with contextlib.closing(TaskApi(self._address())) as api:
            yield from self._tasks(api, split, seed, count)

    def _tasks(self, api: TaskApi, split: str, seed: int, count: int | None) -> Iterator[Task]:
        environment, there = api.environment(), self._splits.get(split, split)
        names = api.splits(environment)
        if names is None:
            yield from _seeded(there, seed, count)
            return
        if there not in names:
            raise ConfigError(
                f"openenv: {environment!r} has no split {there!r}, but {', '.join(names) or 'none'}; "
                f'say which is meant: options.splits = {{{split} = "{names[0] if names else "train"}"}}'
            )
        total = api.count(environment, there)
        page = PAGE if total <= MOST_SHUFFLED else 1  # of so many tasks no two lie on a page
        pages: dict[int, list[Any]] = {}
        for index in itertools.islice(_in_order(total, random.Random(f"{there}/{seed}")), count):  # noqa: S311
            start = index - index % page
            if start not in pages:
                pages = pages if page > 1 else {}
                pages[start] = api.specs(environment, there, start, min(start + page, total))
            yield self._task(there, index, pages[start][index - start])

    def gold(self, task: Task) -> Any | None:
        """The output of an agent that submits the reference; None where `answer` or `submit` does not say it."""
        if self._submit is None or task.answer is None:
            return None
        tool, argument = self._submit
        value = task.answer if isinstance(task.answer, str) else str(task.answer)
        return {"actions": [{"tool": tool, "arguments": {argument: value}}]}

    async def agent(self, input: Any, task: Task) -> dict[str, Any]:  # noqa: A002  the name of its contract
        """Play one episode. Returns its `actions`, sum of rewards, and whether the environment was done.

        Raises EnvironmentFailure (`infrastructure_error`), NoReward, ConfigError."""
        async with self.session(task) as (session, observation):
            tools = await self._tools(session)
            if self._submit is not None and self._submit[0] not in tools:
                raise ConfigError(
                    f"openenv: submit names the tool {self._submit[0]!r}; there are: {', '.join(tools) or 'none'}"
                )
            asked = opening_messages(observation, prompt=self._prompt, longest=self._longest)
            messages = [{"role": "system", "content": self._system}, *asked] if self._system else asked
            episode = Episode(
                session=session,
                tools=tools,
                messages=messages,
                model=self._model,
                max_calls=self._max_calls,
                longest=self._longest,
                submit=self._submit,
            )
            await episode.play()
        total = episode.returns.read(self._unscored)
        lightningrl.report_reward(REWARD, total)
        return {"actions": episode.actions, "reward": total, "done": episode.returns.done}

    async def reward(self, task: Task, output: Any, trajectory: Trajectory, /) -> float | None:
        """The sum that the agent reported; for `actions` that nobody has played yet, that of a replay; else None."""
        reported = trajectory.reported.get(REWARD)
        if reported is not None or not isinstance(output, Mapping) or "actions" not in output:
            return reported
        return await self.replay(task, output["actions"])

    async def replay(self, task: Task, actions: Sequence[Mapping[str, Any]]) -> float:
        """Sum of the rewards that these steps earn in a new episode."""
        returns = Returns()
        async with self.session(task) as (session, _):
            tools = await self._tools(session)
            for action in actions[: self._max_calls]:
                if returns.done or action["tool"] not in tools:
                    break
                with contextlib.suppress(ActionRefused):
                    returns.take(await session.step(tools[action["tool"]].action(action["arguments"])))
        return returns.read(self._unscored)

    @contextlib.asynccontextmanager
    async def session(self, task: Task) -> AsyncIterator[tuple[Session, Observation]]:
        """A session of the task, for an agent of one's own, and its first observation. Raises EnvironmentFailure."""
        parameters = {**self._reset, **read_place(task)}
        async with open_session(self._address(), parameters, **self._limits) as (session, observation):
            yield session, observation

    async def _tools(self, session: Session) -> dict[str, Tool]:
        listed = await session.tools()
        if listed is None:
            if self._action_tool is None:
                with contextlib.closing(TaskApi(session.url)) as api:
                    self._action_tool = read_action_tool(api.action_schema())
            return {self._action_tool.name: self._action_tool}
        return {tool.name: tool for tool in read_tools(listed)}

    def _address(self) -> str:
        return self._child.url() if self._child is not None else str(self._url)

    def _task(self, split: str, index: int, spec: Any) -> Task:
        described = dict(spec) if isinstance(spec, Mapping) else {"task": spec}
        answer = None if self._answer is None else described.pop(self._answer, None)
        shown = {name: value for name, value in described.items() if name not in PLACE}
        return Task(id=f"{split}-{index}", input=shown or {"split": split, "index": index}, answer=answer)


def _in_order(total: int, rng: random.Random) -> Iterable[int]:
    """Each number below `total` once, in an order of the generator's; of very many without a list of them."""
    if total <= MOST_SHUFFLED:
        order = list(range(total))
        rng.shuffle(order)
        return order
    first = rng.randrange(total)
    stride = next(number for number in iter(lambda: rng.randrange(total), None) if math.gcd(number, total) == 1)
    return ((first + stride * place) % total for place in range(total))


def _seeded(split: str, seed: int, count: int | None) -> Iterator[Task]:
    """Tasks of an environment without a task API: seeds of its reset."""
    for index in itertools.count() if count is None else range(count):
        chosen = random.Random(f"{split}/{seed}/{index}").randrange(GREATEST_SEED)  # noqa: S311
        yield Task(id=f"{split}-{index}-{SEED}{chosen}", input={"seed": chosen})


def read_place(task: Task) -> dict[str, Any]:
    """Arguments of reset that choose the task; its id says them: `test-17`, `train-3-seed1234`."""
    split, _, last = task.id.rpartition("-")
    if last.startswith(SEED):
        return {"seed": int(last.removeprefix(SEED))}
    return {"split": split, "index": int(last)}


class ServerProcess:
    """A server that `command` starts; `{port}` in it is a free port of this machine. One for each of our processes."""

    def __init__(self, command: Sequence[str], *, folder: Path, start_timeout_s: float) -> None:
        self._command = tuple(command)
        self._folder = folder
        self._start_timeout_s = start_timeout_s
        self._lock = threading.Lock()
        self._child: Child | None = None
        self._port = 0

    def url(self) -> str:
        """Address of the running server. Raises EnvironmentFailure where it does not start."""
        with self._lock:
            if self._child is None or not (self._child.is_running and self._is_listening()):
                self._end()
                try:
                    self._start()
                except BaseException:
                    self._end()
                    raise
            return f"http://127.0.0.1:{self._port}"

    def close(self) -> None:
        """End the server and all that it has started."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._child is not None:
            self._child.end()
        self._child = None

    def _is_listening(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self._port), timeout=LISTENING_S).close()
        except OSError:
            return False
        return True

    def _start(self) -> None:
        self._port = find_port()
        command = [word.replace("{port}", str(self._port)) for word in self._command]
        self._child = Child(command, folder=self._folder, environment={"PORT": str(self._port)}, grace_s=GRACE_S)
        patience = time.monotonic() + self._start_timeout_s
        while time.monotonic() < patience:
            if (status := self._child.status) is not None:
                raise EnvironmentFailure(f"the server {' '.join(command)!r} ended with {status}{self._child.wrote()}")
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{self._port}/health", timeout=5.0, trust_env=False).is_success:
                    return
            time.sleep(LOOK_S)
        raise EnvironmentFailure(
            f"the server {' '.join(command)!r} did not answer on port {self._port} within {self._start_timeout_s:g} s; "
            f"have it listen on {{port}}, or raise start_timeout_s{self._child.wrote()}"
        )


def find_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
