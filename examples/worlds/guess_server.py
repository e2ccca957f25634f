"""An OpenEnv 0.10 environment: a number from 1 to 3 in two tries, after each of which it says higher or lower.

It needs openenv, in an environment of its own: `python guess_server.py PORT [SESSIONS]`.
"""

import random
import sys

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Observation, State

MOST, TRIES = 3, 2


class Guesses(MCPEnvironment):
    """1 for the number, 0 for any other guess. Without a task API: a seed is a task."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        tools = FastMCP("guesses")

        @tools.tool
        def guess(text: str) -> str:
            """Guess the number."""
            given = int(text) if text.strip().isdecimal() else 0
            if not 1 <= given <= MOST:
                return "what?"
            return "right" if given == self.number else "higher" if given < self.number else "lower"

        super().__init__(tools)

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.number = random.Random(seed).randint(1, MOST)
        self._state = State(episode_id=episode_id, step_count=0)
        return Observation(metadata={"prompt": f"Guess a number from 1 to {MOST}."})

    @property
    def state(self):
        return self._state

    def _step_impl(self, action, timeout_s=None, **kwargs):
        raise TypeError(f"no action {action}")

    async def step_async(self, action, timeout_s=None, **kwargs):
        seen = await super().step_async(action, timeout_s=timeout_s, **kwargs)
        if isinstance(action, CallToolAction) and isinstance(seen, CallToolObservation):
            self._state.step_count += 1
            is_right = str(action.arguments.get("text")).strip() == str(self.number)
            seen.reward, seen.done = float(is_right), is_right or self._state.step_count == TRIES
        return seen


if __name__ == "__main__":
    port, sessions = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 64
    app = create_app(Guesses, CallToolAction, CallToolObservation, env_name="guesses", max_concurrent_envs=sessions)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")
