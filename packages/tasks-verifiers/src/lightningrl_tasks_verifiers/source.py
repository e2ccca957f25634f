"""A taskset of verifiers as a source of tasks.

taskset.skip().take() ─► tasks(split, seed, count) ─► Task(id = split, index, key; input = the prompt)
agent(input)  one reply of the model           reward(…)  task.score of a trace with that dialogue

The process that has verifiers is started when it is first asked, started again after it died, and ended with us:

ask(request) ──stdin, JSON lines──► bridge.py in the environment of `python`
     future ◄──stdout, by id──── a thread that reads
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

import httpx

from lightningrl.errors import ConfigError, LightningError
from lightningrl.processes import Child
from lightningrl.types import Task, Trajectory

__all__ = ["BridgeFailure", "VerifiersTasks"]

PAGE: Final = 500
"""Tasks that the process is asked for at once."""
KEY: Final = 16
"""Characters of a task's key that its id has: what it is scored by."""
MODEL_TIMEOUT_S: Final = 600.0
SLICE: Final = frozenset({"skip", "take", "config"})
SCRIPT: Final = Path(__file__).with_name("bridge.py")
LONGEST_LINE: Final = 64 * 2**20
"""Bytes of one answer."""
MOST_STARTS: Final = 2
"""Times that one request is asked: a process that ends under it twice is ended by it."""
HOW_TO: Final = (
    "make an environment that has verifiers and the taskset's package, and name its interpreter: "
    "python -m venv .venv-verifiers && .venv-verifiers/bin/pip install 'verifiers>=0.4,<0.5' THE-PACKAGE; "
    'options.python = ".venv-verifiers/bin/python"'
)


class BridgeFailure(LightningError):
    """The process of verifiers ended, gave no answer in time, or its taskset failed."""


class VerifiersTasks:
    """Tasks and scores of one taskset of verifiers 0.4, from a process in an environment of its own."""

    def __init__(
        self,
        *,
        python: str | None = None,
        taskset: str,
        config: Mapping[str, Any] | None = None,
        splits: Mapping[str, Mapping[str, Any]] | None = None,
        folder: str | None = None,
        answer: str = "answer",
        model: str = "gpt-4o-mini",
        timeout_s: float = 300.0,
        recipe_folder: Path | None = None,
    ) -> None:
        """Take the options of a recipe. Raises ConfigError.

        python: interpreter of an environment that has verifiers and the taskset's package. taskset: its id, as
        verifiers names it. config: its settings. splits: by our name of a split `skip`, `take`, further `config`, as in
        `{train = {take = 1000}, validation = {skip = 1000}}`. folder: a folder to import the taskset from.
        answer: field of the task's data that holds the reference.
        """
        if python is None:
            raise ConfigError(f"verifiers: its pins are not ours, so it runs in an environment of its own; {HOW_TO}")
        self._splits = {name: dict(value) for name, value in (splits or {"train": {}, "validation": {}}).items()}
        for name, value in self._splits.items():
            if unknown := sorted(set(value) - SLICE):
                raise ConfigError(f"verifiers: splits.{name} has {', '.join(unknown)}; there are skip, take and config")
        base = recipe_folder or Path()
        if "/" in python:  # a virtual environment's is a link that says where it is: it is not resolved
            python = str((base / python).absolute())
        opening = [
            {
                "do": "open",
                "split": name,
                "taskset": taskset,
                "config": {**(config or {}), **value.get("config", {})},
                "skip": value.get("skip", 0),
                "take": value.get("take"),
                "folder": None if folder is None else str((base / folder).resolve()),
            }
            for name, value in self._splits.items()
        ]
        self._taskset, self._answer, self._model = taskset, answer, model
        self._bridge = Bridge(python, opening, timeout_s=timeout_s)
        self.requires: frozenset[str] = frozenset()

    def close(self) -> None:
        """End the process."""
        self._bridge.close()

    def tasks(self, split: str, /, *, seed: int, count: int | None) -> Iterator[Task]:
        """The split's tasks in the seed's order; those of a taskset without end in its own.

        Raises ConfigError for a split that is not configured and tasks that need a container, BridgeFailure."""
        if split not in self._splits:
            raise ConfigError(
                f"verifiers: no split {split!r}, but {', '.join(self._splits)}; say what it is: "
                f"options.splits = {{{split} = {{skip = 1000}}}}"
            )
        self._bridge.start()
        if self._bridge.opened[list(self._splits).index(split)]["infinite"]:
            yield from (self._task(split, index, listed) for index, listed in self._read(split, count))
            return
        everything = list(self._read(split, None))
        random.Random(f"{split}/{seed}").shuffle(everything)  # noqa: S311
        yield from (self._task(split, index, listed) for index, listed in everything[:count])

    def gold(self, task: Task) -> Any | None:
        """The reference as the model's reply; None where the task's data has none."""
        return None if task.answer is None else str(task.answer)

    async def agent(self, input: Any, task: Task) -> dict[str, Any]:  # noqa: A002  the name of its contract
        """Ask the model once. Returns the dialogue as `messages`. Raises ConfigError where the task has tools."""
        if task.metadata.get("tools"):
            raise ConfigError(
                f"verifiers: the taskset {self._taskset!r} has toolsets, which run in its own harnesses alone; write "
                "an agent that has the tools, or serve the taskset with openenv"
            )
        messages = [{"role": "user", "content": input}] if isinstance(input, str) else list(input)
        base_url = os.environ.get("OPENAI_BASE_URL", "https://api.openai.com/v1").rstrip("/")
        headers = {"Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', 'any')}"}
        async with httpx.AsyncClient(timeout=MODEL_TIMEOUT_S, headers=headers) as client:
            body = {"model": self._model, "messages": messages}
            answer = await client.post(f"{base_url}/chat/completions", json=body)
            answer.raise_for_status()
        reply = answer.json()["choices"][0]["message"].get("content") or ""
        return {"messages": [*messages, {"role": "assistant", "content": reply}]}

    async def reward(self, task: Task, output: Any, trajectory: Trajectory, /) -> float | None:
        """Score of a text, taken as the reply to the prompt, or of a dialogue in `messages`; None for another."""
        split, index, key = task.id.rsplit("-", 2)
        place = {"split": split, "index": int(index), "key": key}
        if isinstance(output, Mapping) and isinstance(output.get("messages"), list):
            content = {"messages": output["messages"]}
        elif isinstance(output, str):
            content = {"reply": output}
        else:
            return None
        scored = await asyncio.to_thread(self._bridge.ask, do="score", **place, **content)
        return float(scored["reward"])

    def _read(self, split: str, count: int | None) -> Iterator[tuple[int, dict[str, Any]]]:
        start = 0
        while count is None or start < count:
            stop = start + PAGE if count is None else min(start + PAGE, count)
            page = self._bridge.ask(do="tasks", split=split, start=start, stop=stop)["tasks"]
            yield from enumerate(page, start)
            if len(page) < stop - start:
                return
            start = stop

    def _task(self, split: str, index: int, listed: Mapping[str, Any]) -> Task:
        if listed["container"]:
            raise ConfigError(
                f"verifiers: tasks of {self._taskset!r} need a container, which no process here gives them"
            )
        messages = listed["messages"]
        is_text = len(messages) == 1 and messages[0]["role"] == "user" and isinstance(messages[0]["content"], str)
        return Task(
            id=f"{split}-{index}-{listed['key'][:KEY]}",
            input=messages[0]["content"] if is_text else messages,
            answer=listed["data"].get(self._answer),
            metadata={"tools": True} if listed["tools"] else {},
        )


class _ProcessEnd(Exception):
    """The process ended under a request."""


class _Running:
    """A process that runs, and who waits for its answers."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[dict[str, Any]]] = {}
        self._is_over = False
        threading.Thread(target=self._read, daemon=True).start()

    def ask(self, number: int, request: Mapping[str, Any]) -> Future[dict[str, Any]]:
        """Send a request. Its future raises _ProcessEnd where the process ends first."""
        future = Future[dict[str, Any]]()
        with self._lock:
            if self._is_over:
                future.set_exception(_ProcessEnd())
                return future
            self._waiting[number] = future
        with contextlib.suppress(OSError, ValueError):  # it has ended, which its reader tells
            self.child.stdin.write(json.dumps({"id": number, **request}).encode() + b"\n")
            self.child.stdin.flush()
        return future

    def forget(self, number: int) -> None:
        """Give up a request."""
        with self._lock:
            self._waiting.pop(number, None)

    def _read(self) -> None:
        with self.child.stdout as answers:
            while line := answers.readline(LONGEST_LINE):
                try:
                    answer = json.loads(line)
                    number = int(answer["id"])
                except (ValueError, KeyError, TypeError):
                    break  # too long, or no answer at all
                with self._lock:
                    future = self._waiting.pop(number, None)
                if future is not None:
                    future.set_result(answer)
        self.child.end()
        with self._lock:
            self._is_over, left = True, list(self._waiting.values())
        for future in left:
            future.set_exception(_ProcessEnd())
        with contextlib.suppress(OSError):
            self.child.stdin.close()


class Bridge:
    """Answers of the process, by request. Threads may ask at once."""

    def __init__(self, python: str, opening: Sequence[Mapping[str, Any]], *, timeout_s: float) -> None:
        """`opening`: requests that a new process is asked first, each time."""
        self._python = python
        self._opening = tuple(opening)
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._running: _Running | None = None
        self.opened: list[dict[str, Any]] = []
        """Answers to `opening`, of the process that runs."""

    def ask(self, **request: Any) -> dict[str, Any]:
        """Answer of the process. Raises BridgeFailure, ConfigError where the environment is none."""
        for left in reversed(range(MOST_STARTS)):
            running = self.start()
            try:
                return self._answer(running, request)
            except _ProcessEnd:
                if not left:
                    raise BridgeFailure(
                        f"verifiers: its process ended {MOST_STARTS} times under {request['do']!r} of task "
                        f"{request.get('index', request.get('start'))}{running.child.wrote()}"
                    ) from None
        raise AssertionError("unreachable")

    def start(self) -> _Running:
        """The running process, with its tasksets open."""
        with self._lock:
            if self._running is None or not self._running.child.is_running:
                self._running = self._launch()
            return self._running

    def close(self) -> None:
        """End the process and all that it has started."""
        with self._lock:
            running, self._running = self._running, None
            if running is not None:
                running.child.end()

    def _launch(self) -> _Running:
        child = Child([self._python, "-I", str(SCRIPT)], is_asked=True)
        running = _Running(child)
        try:
            self.opened = [self._answer(running, request) for request in self._opening]
            self._check_environment()
        except _ProcessEnd:
            if child.start_error is not None:
                raise ConfigError(
                    f"verifiers: {self._python!r} cannot be run ({child.start_error}); {HOW_TO}"
                ) from None
            raise BridgeFailure(f"verifiers: {self._python!r} ended as it started{child.wrote()}") from None
        except BaseException:
            child.end()
            raise
        return running

    def _check_environment(self) -> None:
        for answer in self.opened:
            if "missing" in answer:
                where = f"the environment of {self._python!r} has no verifiers 0.4 ({answer['missing']})"
                raise ConfigError(f"verifiers: {where}; {HOW_TO}")

    def _answer(self, running: _Running, request: Mapping[str, Any]) -> dict[str, Any]:
        number = next(self._numbers)
        try:
            answer = running.ask(number, request).result(self._timeout_s)
        except TimeoutError:
            running.child.end()
            raise BridgeFailure(
                f"verifiers: no answer to {request['do']!r} within {self._timeout_s:g} s; raise timeout_s, or look "
                f"what the taskset waits for{running.child.wrote()}"
            ) from None
        finally:
            running.forget(number)
        if "error" in answer:
            raise BridgeFailure(f"verifiers: {answer['error']}")
        return answer
