"""The agent of the `openenv` source, as a recipe's `agent = "tasks"` plays it; the input has the source's options too."""

import functools
import json
import os
from typing import Any

from lightningrl.types import Task
from lightningrl_tasks_openenv import OpenEnvTasks


@functools.cache
def make_source(options: str) -> OpenEnvTasks:
    return OpenEnvTasks(**json.loads(options))


async def answer(asked: dict[str, Any]) -> dict[str, Any]:
    source = make_source(json.dumps(asked["options"]))
    task = Task(id=asked["task"], input={})
    return {**await source.agent({}, task), "pid": os.getpid()}
