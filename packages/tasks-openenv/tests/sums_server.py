"""A real OpenEnv 0.10 server: sums of two numbers, with a calculator and a tool that answers.

Needs openenv, so it runs in an environment of its own: `python sums_server.py PORT [unrewarded|action|sparse]`.
"""

import random
import sys
import time

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State

SIZES = {"train": 300, "test": 250}


def make_task(split: str, index: int) -> dict:
    if not 0 <= index < SIZES[split]:
        raise IndexError(index)
    rng = random.Random(f"{split}/{index}")
    first, second = rng.randrange(1000), rng.randrange(1000)
    return {
        "id": f"{split}-{index}",
        "index": index,
        "question": f"What is {first} + {second}?",
        "answer": first + second,
    }


class Tasks:
    SUPPORTS_CONCURRENT_SESSIONS = True

    def list_splits(self):
        return list(SIZES)

    def num_tasks(self, split):
        return SIZES[split]

    def get_task(self, split, index):
        return make_task(split, index)

    def get_task_range(self, split, start=None, stop=None):
        return [make_task(split, index) for index in range(*slice(start, stop).indices(SIZES[split]))]

    def reset(self, seed=None, episode_id=None, split="train", index=0, **kwargs):
        self.task = make_task(split, index)
        self._state = State(episode_id=episode_id, step_count=0)
        return Observation(metadata={"prompt": self.task["question"]})

    @property
    def state(self):
        return self._state


class Sums(Tasks, MCPEnvironment):
    """Rewards: 0.1 for a calculation, 1 for the right answer, which ends the episode."""

    def __init__(self):
        mcp = FastMCP("sums")

        @mcp.tool
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        @mcp.tool
        def answer(text: str) -> str:
            """Answer the question."""
            return "right" if self.is_right(text) else "wrong"

        @mcp.tool
        def wait(seconds: float) -> str:
            """Wait."""
            time.sleep(seconds)
            return "waited"

        super().__init__(mcp)

    def is_right(self, text):
        return str(text).strip() == str(self.task["answer"])

    def _step_impl(self, action, timeout_s=None, **kwargs):
        raise TypeError(f"no action {action}")

    def rewarded(self, action, observation):
        if not isinstance(action, CallToolAction) or not isinstance(observation, CallToolObservation):
            return observation
        self._state.step_count += 1
        if action.tool_name == "add" and observation.error is None:
            observation.reward = 0.1
        elif action.tool_name == "answer" and observation.error is None:
            observation.reward = float(self.is_right(action.arguments.get("text")))
            observation.done = True
        return observation

    async def step_async(self, action, timeout_s=None, **kwargs):
        return self.rewarded(action, await super().step_async(action, timeout_s=timeout_s, **kwargs))


class UnrewardedSums(Sums):
    """The trap: `step` alone is overridden, and a server never calls it over a WebSocket."""

    def step(self, action, timeout_s=None, **kwargs):
        return self.rewarded(action, super().step(action, timeout_s=timeout_s, **kwargs))

    async def step_async(self, action, timeout_s=None, **kwargs):
        return await MCPEnvironment.step_async(self, action, timeout_s=timeout_s, **kwargs)


class Guess(Action):
    number: int


class Verdict(Observation):
    question: str = ""
    verdict: str = ""


class Guesses(Environment):
    """An environment without tools and without a task API: an action of its own, a number to be guessed by its seed."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.number = random.Random(seed).randrange(8)
        self._state = State(episode_id=episode_id)
        return Verdict(question="Which number from 0 to 7?")

    def step(self, action, timeout_s=None, **kwargs):
        is_right = action.number == self.number
        return Verdict(verdict="right" if is_right else "wrong", reward=float(is_right), done=is_right)

    @property
    def state(self):
        return self._state


def main(port: str, kind: str = "sums", sessions: str = "8") -> None:
    if kind == "action":
        app = create_app(Guesses, Guess, Verdict, env_name="guesses", max_concurrent_envs=int(sessions))
    else:
        environment = UnrewardedSums if kind == "unrewarded" else Sums
        app = create_app(
            environment, CallToolAction, CallToolObservation, env_name="sums", max_concurrent_envs=int(sessions)
        )
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")


if __name__ == "__main__":
    main(*sys.argv[1:4])
