"""Rollouts, credit and learning in one process: the backend's own engine, the recipe's own scorer, the backend's own learner.

Player.sample(tasks) ─► trajectories ─► Scorer (rewards, evidence, credit, rows) ─► backend.learn
                                                              the server between them is left out: it is not what is measured
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from games import GAMES, State
from tasks import won
from values import encode_prompt, tokenizer_of

from lightningrl.config import Recipe
from lightningrl.types import FinishReason, GenerateRequest, IntArray, Outcome, SamplingSettings, Task, ToolCall, Trajectory, Transition
from lightningrl_torch.backend import TorchBackend

__all__ = ["Player", "make_recipe"]

SAMPLING = SamplingSettings(temperature=1.0, max_tokens=1)


def make_recipe(model: Path | str, *, group_size: int, settings: dict[str, object]) -> Recipe:
    """What a user would write: `settings` are the method's tables, `credit` and `intermediate_rewards`."""
    return Recipe.model_validate(
        {
            "agent": "tasks.py:play",
            "tasks": {"train": "tasks.py:train_tasks"},
            "policy": {"model": str(model)},
            "rewards": {"won": {"use": _won}},
            "loop": {"group_size": group_size},
            **settings,
        }
    )


async def _won(task: Task, output: object, trajectory: Trajectory) -> float:
    """On the loop: a thread for each would cost more than all else."""
    return won(task, output, trajectory)


class Player:
    """Plays games by a backend's engine, all rollouts at once, and writes down what a worker and the gateway would."""

    def __init__(self, backend: TorchBackend) -> None:
        self._backend = backend
        self._tokenizer = tokenizer_of(backend.settings.policy)
        self._prompts: dict[str, IntArray] = {}
        self._words: dict[int, str] = {}
        self._numbers = itertools.count()
        self.calls = 0
        """Sampled so far."""

    async def sample(self, tasks: Iterable[Task], *, group_size: int) -> list[Trajectory]:
        """`group_size` rollouts of each task."""
        orders = [(task, f"g{next(self._numbers)}") for task in tasks]
        plays = (self._play(task, group, f"{group}-{member}") for task, group in orders for member in range(group_size))
        return list(await asyncio.gather(*plays))

    async def outcomes(self, task: Task, state: State, *, count: int) -> list[float]:
        """How `count` continuations from a state end."""
        ended = await asyncio.gather(*(self._play(task, "branch", "branch", state=state) for _ in range(count)))
        return [float(trajectory.output["outcome"]) for trajectory in ended]

    async def _play(self, task: Task, group_id: str, rollout_id: str, *, state: State | None = None) -> Trajectory:
        game, case = GAMES[task.input["game"]], task.input["case"]
        state = game.start(case) if state is None else state
        transitions: list[Transition] = []
        tools: list[ToolCall] = []
        words: list[str | None] = []
        outcome = 0.0
        while state is not None:
            transition, said = await self._call(f"{rollout_id}/{len(words)}", len(words), game.observe(case, state))
            transitions.append(transition)
            words.append(said if said in game.words else None)
            step = game.act(case, state, words[-1])
            if step.tool is not None:
                asker = transition.id
                call = ToolCall(
                    id=f"{asker}/tool", name=step.tool, arguments=said, result=step.result, status=step.status, transition_id=asker
                )
                tools.append(call)
            state, outcome = step.state, step.outcome
        return Trajectory(
            rollout_id=rollout_id,
            attempt=1,
            task=task,
            group_id=group_id,
            outcome=Outcome.SUCCEEDED,
            transitions=tuple(transitions),
            tool_calls=tuple(tools),
            output={"outcome": outcome, "words": words},
        )

    async def _call(self, name: str, index: int, observation: str) -> tuple[Transition, str]:
        if observation not in self._prompts:
            self._prompts[observation] = np.array(encode_prompt(self._tokenizer, observation), np.int32)
        prompt = self._prompts[observation]
        self.calls += 1
        request = GenerateRequest(id=name, prompt_ids=tuple(prompt.tolist()), sampling=SAMPLING)
        (chunk,) = [chunk async for chunk in self._backend.engine.generate(request)]
        token = chunk.token_ids[0]
        if token not in self._words:
            self._words[token] = str(self._tokenizer.decode([token], skip_special_tokens=True))
        transition = Transition(
            id=name,
            index=index,
            policy="policy",
            policy_version=chunk.policy_version,
            prompt_ids=prompt,
            completion_ids=np.array(chunk.token_ids, np.int32),
            logprobs=np.array(chunk.logprobs, np.float32),
            finish_reason=chunk.finish_reason or FinishReason.LENGTH,
            sampling=SAMPLING,
            started_at=float(index),
        )
        return transition, self._words[token]
