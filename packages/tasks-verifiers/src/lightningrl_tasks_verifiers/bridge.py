"""Program that runs in an environment with verifiers 0.4 and answers JSON lines; of ours it imports nothing.

    {"id": 1, "do": "open", "split": "train", "taskset": "gsm8k", "config": {…}, …}     ─►  {"id": 1, "infinite": false}
    {"id": 2, "do": "tasks", "split": "train", "start": 0, "stop": 100}                 ─►  {"id": 2, "tasks": […]}
    {"id": 3, "do": "score", "split": "train", "index": 7, "key": "…", "reply": "42"}   ─►  {"id": 3, "reward": 1.0, …}
    whatever goes wrong                                                                 ─►  {"id": 3, "error": "…"}

Requests are answered as each is done. It ends when its standard input does. A taskset's prints go to standard error.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import math
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, TextIO

MOST_TASKS = 200_000
LONGEST_ERROR = 1000


class Taskset:
    """A taskset, read as far as somebody has asked."""

    def __init__(self, name: str, config: dict[str, Any], skip: int, take: int | None) -> None:
        from verifiers.v1.utils import loaders

        settings = loaders.taskset_config_type(name).model_validate({**config, "id": name})
        whole = loaders.load_taskset(settings)
        view = whole.skip(skip) if take is None else whole.skip(skip).take(take)
        self.is_infinite = not view.bounded
        self.has_tools = bool(type(whole).toolsets(settings))
        self._iterator = iter(view)
        self._tasks: list[Any] = []

    def read(self, start: int, stop: int | None) -> list[Any]:
        """Tasks from `start` to before `stop`, or to the end."""
        if stop is None or stop > MOST_TASKS:
            stop = MOST_TASKS
        self._tasks.extend(itertools.islice(self._iterator, max(0, stop - len(self._tasks))))
        return self._tasks[start:stop]

    def get(self, index: int, key: str) -> Any:
        """The task at `index`, if it is still the one that was read there."""
        read = self.read(index, index + 1)
        if not read:
            raise LookupError(f"the taskset has no task {index}; its environment package has changed")
        if not read[0].key.startswith(key):
            raise LookupError(f"task {index} is another one than before; the taskset loads its tasks in no fixed order")
        return read[0]


def describe(taskset: Taskset, task: Any) -> dict[str, Any]:
    """A task, as the other side reads it."""
    data = task.data.model_dump(mode="json", exclude_none=True)
    prompt = task.data.prompt
    messages = (
        [] if prompt is None else [{"role": "user", "content": prompt}] if isinstance(prompt, str) else data["prompt"]
    )
    if task.data.system_prompt:
        messages = [{"role": "system", "content": task.data.system_prompt}, *messages]
    has_tools = taskset.has_tools or bool(type(task).toolsets(task.config))
    return {
        "key": task.key,
        "messages": messages,
        "data": data,
        "tools": has_tools,
        "container": bool(type(task).NEEDS_CONTAINER),
    }


def flatten(message: dict[str, Any]) -> dict[str, Any]:
    """A message of chat completions, as verifiers has it: a tool call's name and arguments beside its id."""
    calls = message.get("tool_calls")
    if not calls:
        return {name: value for name, value in message.items() if name != "tool_calls"}
    flat = [{"id": c["id"], **(c.get("function") or {"name": c["name"], "arguments": c["arguments"]})} for c in calls]
    return {**message, "tool_calls": flat}


def build_trace(task: Any, messages: list[dict[str, Any]], given: int) -> Any:
    """A trace of the dialogue, whose assistant messages from `given` on the model sampled."""
    import verifiers.v1 as vf
    from pydantic import TypeAdapter
    from verifiers.v1.state import state_cls

    trace = vf.Trace(
        task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        state=state_cls(type(task))(),
        agent=vf.AgentInfo(config=vf.AgentConfig()),
        is_completed=True,
        ok=True,
    )
    for position, message in enumerate(TypeAdapter(vf.Messages).validate_python([flatten(m) for m in messages])):
        node = vf.MessageNode(
            message=message,
            parent=position - 1 if position else None,
            sampled=position >= given and message.role == "assistant",
        )
        trace.nodes.append(node)
    return trace


def needs_runtime(function: Callable[..., Any]) -> bool:
    """A reward that looks into the task's container, which nobody has here."""
    parameter = inspect.signature(function).parameters.get("runtime")
    return parameter is not None and parameter.default is inspect.Parameter.empty


async def score(taskset: Taskset, request: dict[str, Any]) -> dict[str, Any]:
    """Score a reply, or a whole dialogue."""
    task = taskset.get(request["index"], request["key"])
    asleep = [function.__name__ for function in task.hooks("reward") if needs_runtime(function)]
    if asleep:
        raise LookupError(f"the rewards {', '.join(asleep)} need the runtime of a harness, which there is none of here")
    prompt = describe(taskset, task)["messages"]
    messages = request.get("messages")
    if messages is None:
        messages = [*prompt, {"role": "assistant", "content": request["reply"]}]
    trace = build_trace(task, messages, len(prompt))
    await task.score(trace)
    rewards = {name: None if reward is None else reward.value for name, reward in trace.rewards.items()}
    if not rewards or any(value is None or not math.isfinite(value) for value in rewards.values()):
        raise LookupError(f"the task's rewards are {rewards}; each has to be a finite number")
    return {"reward": trace.reward, "rewards": rewards, "metrics": trace.metrics}


class Bridge:
    """Requests, and who answers them."""

    def __init__(self, answers: TextIO) -> None:
        self._answers = answers
        self._tasksets: dict[str, Taskset] = {}

    async def answer(self, line: str) -> None:
        request = json.loads(line)
        try:
            outcome = await self._do(request)
        except Exception as error:  # noqa: BLE001  the boundary to a taskset's code
            text = f"{type(error).__name__}: {error}"[:LONGEST_ERROR]
            outcome = {"error": str(error) if type(error) is LookupError else text}
        self._answers.write(json.dumps({"id": request["id"], **outcome}, default=str) + "\n")
        self._answers.flush()

    async def _do(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["do"] == "open":
            return self._open(request)
        taskset = self._tasksets[request["split"]]
        if request["do"] == "tasks":
            tasks = taskset.read(request["start"], request["stop"])
            return {"tasks": [describe(taskset, task) for task in tasks]}
        return await score(taskset, request)

    def _open(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            import verifiers
            import verifiers.v1  # 0.4's
        except ImportError as error:
            return {"missing": str(error)}
        if request["folder"] and request["folder"] not in sys.path:
            sys.path.insert(0, request["folder"])
        taskset = Taskset(request["taskset"], request["config"], request["skip"], request["take"])
        self._tasksets[request["split"]] = taskset
        return {"infinite": taskset.is_infinite, "version": verifiers.__version__}


async def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a taskset prints is no answer
    bridge, loop = Bridge(answers), asyncio.get_running_loop()
    running: set[asyncio.Task[None]] = set()

    def start(line: str) -> None:
        task = loop.create_task(bridge.answer(line))
        running.add(task)
        task.add_done_callback(running.discard)

    def read() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(start, line)
        os._exit(0)  # what the taskset has started ends with us, by our keeper

    threading.Thread(target=read, daemon=True).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
