"""The default agent: chat completions whose tool calls are steps of the environment, until it says that it is done.

first observation ─► model ─► tool calls ─► steps ─► observations as the tools' results ─► model …
                       └── a reward for each step, summed: reported of the call, and of the rollout
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

import lightningrl
from lightningrl.errors import LightningError
from lightningrl.types import ToolStatus
from lightningrl_tasks_openenv.shapes import Tool, tool_result
from lightningrl_tasks_openenv.wire import ActionRefused, Observation, Session

__all__ = ["REWARD", "Episode", "NoReward", "Returns"]

REWARD: Final = "openenv"
"""Name under which rewards are reported."""
MODEL_TIMEOUT_S: Final = 600.0


class NoReward(LightningError):
    """No step of an episode had a reward."""


@dataclass(slots=True)
class Returns:
    """Rewards of an episode's steps."""

    total: float = 0.0
    steps: int = 0
    scored: int = 0
    """Steps whose reward the environment gave."""
    done: bool = False

    def take(self, observation: Observation) -> float | None:
        """Count a step. Returns its reward."""
        self.steps += 1
        self.done = observation.done
        if observation.reward is not None:
            self.scored += 1
            self.total += observation.reward
        return observation.reward

    def read(self, unscored: float | None) -> float:
        """The sum; 0.0 without a step. Raises NoReward where no step had a reward and `unscored` is None."""
        if self.scored or not self.steps:
            return self.total
        if unscored is not None:
            return unscored
        raise NoReward(
            f"openenv: none of {self.steps} steps had a reward, so there is nothing to train on; over a WebSocket an "
            "MCPEnvironment's step is never called: set the reward in its step_async, or, where only the end is "
            "rewarded, give what an unfinished one earns as unscored = 0.0"
        )


@dataclass(slots=True)
class Episode:
    """One episode of the default agent, in an open session."""

    session: Session
    tools: Mapping[str, Tool]
    """Tools of the environment, by name."""
    messages: list[dict[str, Any]]
    """Dialogue; grows."""
    model: str
    max_calls: int
    """Model calls at most."""
    longest: int
    """Characters of one observation that the model is shown."""
    submit: tuple[str, str] | None = None
    """Tool and argument that take an answer without a tool call; this tool is not offered."""
    returns: Returns = field(default_factory=Returns)
    actions: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Steps taken, as `{"tool", "arguments"}`."""

    async def play(self) -> None:
        """Ask and step until the environment or the model is done, or `max_calls` are used up."""
        hidden = self.submit[0] if self.submit else None
        offered = [offer.schema for name, offer in self.tools.items() if name != hidden]
        base_url = os.environ.get("OPENAI_BASE_URL", "https://api.openai.com/v1").rstrip("/")
        headers = {"Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', 'any')}"}
        async with httpx.AsyncClient(timeout=MODEL_TIMEOUT_S, headers=headers) as client:
            for _ in range(self.max_calls):
                body = {"model": self.model, "messages": self.messages, **({"tools": offered} if offered else {})}
                answer = await client.post(f"{base_url}/chat/completions", json=body)
                answer.raise_for_status()
                reply = answer.json()
                message = reply["choices"][0]["message"]
                self.messages.append(
                    {name: value for name, value in message.items() if value is not None or name == "content"}
                )
                calls = message.get("tool_calls") or ()
                if calls:
                    await self._take_calls(reply["id"], calls)
                elif not await self._take_text(reply["id"], message.get("content") or ""):
                    return
                if self.returns.done:
                    return

    async def _take_calls(self, reply: str, calls: Sequence[Mapping[str, Any]]) -> None:
        """Step once for each tool call; those after the episode's end are not taken."""
        rewards = []
        for call in calls:
            name, written = str(call["function"]["name"]), str(call["function"]["arguments"])
            if self.returns.done:
                text = "the episode is over"
            else:
                text, reward = await self._take_call(name, written, call_id=str(call["id"]), reply=None)
                rewards.append(reward)
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
        report_sum(rewards, reply)

    async def _take_text(self, reply: str, text: str) -> bool:
        """Hand an answer without a tool call to the tool that takes it. False where there is none."""
        if self.submit is None:
            return False
        name, argument = self.submit
        result, reward = await self._take_call(name, json.dumps({argument: text}), call_id=None, reply=reply)
        self.messages.append({"role": "user", "content": result})
        report_sum([reward], reply)
        return True

    async def _take_call(
        self, name: str, written: str, *, call_id: str | None, reply: str | None
    ) -> tuple[str, float | None]:
        """Take one step, and report it as a tool call. Returns the result's text and the reward."""
        with lightningrl.tool(name, written, id=call_id, call=reply) as seen:
            arguments, complaint = read_arguments(written)
            seen.status = ToolStatus.INVALID_ARGUMENTS
            if arguments is None:
                seen.result = complaint
                return complaint, None
            target = self.tools.get(name)
            if target is None:
                seen.status = ToolStatus.UNKNOWN_TOOL
                seen.result = f"error: no tool named {name!r}; there are: {', '.join(sorted(self.tools)) or 'none'}"
                return seen.result, None
            self.actions.append({"tool": name, "arguments": arguments})
            try:
                observation = await self.session.step(target.action(arguments))
            except ActionRefused as error:
                self.returns.steps += 1
                seen.status = ToolStatus.INVALID_ARGUMENTS if error.is_invalid else ToolStatus.ERROR
                seen.result = f"error: {error}"
                return seen.result, None
            reward = self.returns.take(observation)
            seen.result, seen.status = tool_result(observation, longest=self.longest)
            return seen.result, reward


def read_arguments(written: str) -> tuple[dict[str, Any] | None, str]:
    """A call's arguments, or None and what is wrong with them."""
    try:
        arguments = json.loads(written or "{}")
    except (ValueError, RecursionError) as error:
        return None, f"error: the arguments are no JSON: {error}"
    if not isinstance(arguments, dict):
        return None, f"error: the arguments are a {type(arguments).__name__}; write an object"
    return arguments, ""


def report_sum(rewards: Sequence[float | None], call: str) -> None:
    """Report the sum of the rewards of a call's steps, if the environment gave any."""
    given = [reward for reward in rewards if reward is not None]
    if given:
        lightningrl.report_reward(REWARD, sum(given), call=call)
