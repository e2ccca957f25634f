"""Rollouts, credit and learning in one process: the backend's own engine, the recipe's own scorer, the backend's own
learner.

Study.step: Player.sample(tasks) ─► trajectories, branches ─► Scorer (rewards, evidence, credit, rows) ─► backend.learn
                                                              the server between them is left out: it is not what is
                                                              measured
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from games import GAMES, State, observations
from methods import Method
from tasks import states, won
from values import TrueValues, count_out, encode_prompt, tokenizer_of, true_values, word_probabilities

from lightningrl.backends import GenerateRequest
from lightningrl.plugins import PluginManager
from lightningrl.protocols import Ask, CreditAssigner
from lightningrl.recipe import Recipe
from lightningrl.types import (
    Advantages,
    BranchPoint,
    Evidence,
    FinishReason,
    IntArray,
    Outcome,
    RolloutMode,
    SamplingSettings,
    Task,
    ToolCall,
    Trajectory,
    TrajectoryGroup,
    Transition,
)
from lightningrl_credit.scoring import ScoredStep
from lightningrl_torch.backend import TorchBackend
from lightningrl_training.build import build_credit

__all__ = ["Player", "Study", "make_recipe"]

SAMPLING = SamplingSettings(temperature=1.0, max_tokens=1)


def make_recipe(model: Path | str, method: Method, *, group_size: int, credit: object = None) -> Recipe:
    """What a user would write. `credit`: an assigner in the place of the method's own."""
    tables = method.settings
    if credit is not None:
        tables["credit"] = {"use": credit}
    return Recipe.model_validate(
        {
            "agent": "tasks.py:play",
            "tasks": {"train": "tasks.py:train_tasks"},
            "policy": {"model": str(model)},
            "rewards": {"won": {"use": _won}},
            "loop": {"group_size": group_size},
            **tables,
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
        """Sampled so far, one token each."""
        self.rollouts = 0
        """Begun so far, branches among them."""

    async def sample(self, tasks: Iterable[Task], *, group_size: int) -> list[Trajectory]:
        """`group_size` rollouts of each task."""
        orders = [(task, f"g{next(self._numbers)}") for task in tasks]
        plays = (self._play(task, group, f"{group}-{member}") for task, group in orders for member in range(group_size))
        return list(await asyncio.gather(*plays))

    async def branch(self, sources: Sequence[Trajectory], points: Mapping[BranchPoint, int]) -> list[Trajectory]:
        """Rollouts that leave others at `points`, as often as they say."""
        by_id = {source.rollout_id: source for source in sources}
        orders = [(by_id[point.rollout_id], point, k) for point, count in points.items() for k in range(count)]
        plays = (
            self._play(source.task, source.group_id, f"{source.rollout_id}/{point.calls}+{k}", (source, point))
            for source, point, k in orders
        )
        return list(await asyncio.gather(*plays))

    async def outcomes(self, task: Task, state: State, *, count: int) -> list[float]:
        """How `count` continuations from a state end."""
        return [
            outcome
            for *_, outcome in await asyncio.gather(*(self._go_on(task, state, "from", 0) for _ in range(count)))
        ]

    async def _play(
        self, task: Task, group_id: str, name: str, left: tuple[Trajectory, BranchPoint] | None = None
    ) -> Trajectory:
        self.rollouts += 1
        state, before, spoken, point = GAMES[task.input["game"]].start(task.input["case"]), [], [], None
        if left is not None:
            source, point = left
            state, spoken = states(task, source.output)[point.calls], list(source.output["words"][: point.calls])
            before = [
                replace(call, id=f"{name}/{call.index}", replayed_from=call.id)
                for call in source.transitions[: point.calls]
            ]
        calls, tools, words, outcome = await self._go_on(task, state, name, len(before))
        return Trajectory(
            rollout_id=name,
            attempt=1,
            task=task,
            group_id=group_id,
            outcome=Outcome.SUCCEEDED,
            transitions=(*before, *calls),
            tool_calls=tuple(tools),
            output={"outcome": outcome, "words": [*spoken, *words]},
            mode=RolloutMode.TRAIN if point is None else RolloutMode.BRANCH,
            branch=point,
        )

    async def _go_on(
        self, task: Task, state: State | None, name: str, index: int
    ) -> tuple[list[Transition], list[ToolCall], list[str | None], float]:
        """From a state to the end."""
        game, case = GAMES[task.input["game"]], task.input["case"]
        calls: list[Transition] = []
        tools: list[ToolCall] = []
        words: list[str | None] = []
        outcome = 0.0
        while state is not None:
            call, word = await self._call(name, index + len(calls), game.observe(case, state))
            calls.append(call)
            words.append(word if word in game.words else None)
            step = game.act(case, state, words[-1])
            if step.tool is not None:
                tool = ToolCall(
                    id=f"{call.id}/tool", name=step.tool, arguments=word, result=step.result, status=step.status
                )
                tools.append(replace(tool, transition_id=call.id))
            state, outcome = step.state, step.outcome
        return calls, tools, words, outcome

    async def _call(self, name: str, index: int, observation: str) -> tuple[Transition, str]:
        if observation not in self._prompts:
            self._prompts[observation] = np.array(encode_prompt(self._tokenizer, observation), np.int32)
        prompt = self._prompts[observation]
        self.calls += 1
        request = GenerateRequest(id=f"{name}/{index}", prompt_ids=tuple(prompt.tolist()), sampling=SAMPLING)
        (chunk,) = [chunk async for chunk in self._backend.engine.generate(request)]
        token = chunk.token_ids[0]
        if token not in self._words:
            self._words[token] = str(self._tokenizer.decode([token], skip_special_tokens=True))
        call = Transition(
            id=request.id,
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
        return call, self._words[token]


class Oracle(CreditAssigner):
    """A judge that knows the true advantage of each turn and is wrong as often as it is told to: its verdicts are the
    evidence of the real assigner, which it stands before."""

    def __init__(
        self, judge: Any, error: float, advantages: Callable[[Trajectory], Sequence[float]], *, seed: int
    ) -> None:
        self.requires = judge.requires
        self._judge = judge
        self._error = error
        self._advantages = advantages
        self._random = np.random.default_rng(seed)

    async def score(self, trajectory: Trajectory, ask: Ask) -> Evidence:
        """1 for a turn that helps, 0 for one that harms, 0.5 for one that does neither; some turned round."""
        true = np.round(self._advantages(trajectory), 9)
        is_wrong = self._random.random(len(true)) < self._error
        verdicts = np.where(
            is_wrong, np.where(true == 0.0, self._random.choice([-1.0, 1.0], len(true)), -np.sign(true)), np.sign(true)
        )
        return Evidence(calls={"grade": (0.5 + 0.5 * verdicts).astype(np.float32)})

    def assign(self, group: TrajectoryGroup) -> Advantages:
        credit: Advantages = self._judge.assign(group)
        return credit


class Study:
    """One method on one game: rollouts go in, credit comes out, and what is true is known beside it."""

    def __init__(
        self, backend: TorchBackend, method: Method, plugins: PluginManager, *, group_size: int, seed: int
    ) -> None:
        self.backend = backend
        self.player = Player(backend)
        self._group_size = group_size
        self._values: dict[str, TrueValues] = {}
        self._version = -1
        oracle = None
        if method.judge_error is not None:
            judge = plugins.find("lightningrl_credit_assigners", method.use).factory(**method.options)
            oracle = Oracle(judge, method.judge_error, self.advantages, seed=seed)
        recipe = make_recipe(backend.settings.policy, method, group_size=group_size, credit=oracle)
        self.evaluator, self.scorer = build_credit(recipe, plugins, {"policy": backend.settings.policy})
        self.evaluator.policies.connect("policy", backend)

    async def credit(self, tasks: Sequence[Task]) -> ScoredStep:
        """Rollouts of the tasks, and what the method says of them."""
        rewarded = await self.evaluator.evaluate(await self.player.sample(tasks, group_size=self._group_size))
        points: dict[BranchPoint, int] = {}
        for _, members in itertools.groupby(rewarded, key=lambda one: one.group_id):
            points |= self.scorer.branch_points(list(members))
        branches = await self.evaluator.evaluate(await self.player.branch(rewarded, points))
        return self.scorer.build(self.scorer.credit(rewarded, branches))

    def advantages(self, trajectory: Trajectory) -> list[float]:
        """The true advantage of each call, under the weights of now."""
        values = self.values(trajectory.task)
        pairs = zip(states(trajectory.task, trajectory.output), trajectory.output["words"], strict=True)
        return [values.advantage(state, word) for state, word in pairs]

    def values(self, task: Task) -> TrueValues:
        """Of a task, under the weights of now."""
        version = self.backend.engine.info.version
        if version != self._version:
            self._version, self._values = version, {}
        if task.id not in self._values:
            self._values[task.id] = true_values(self.backend, task)
        return self._values[task.id]

    def success(self, tasks: Sequence[Task], *, is_greedy: bool) -> float:
        """The share of tasks that the policy of now wins, counted out: what validating it would come to."""
        game = GAMES[tasks[0].input["game"]]
        cases = [task.input["case"] for task in tasks]
        seen = list(observations(game, cases))
        policy = dict(zip(seen, word_probabilities(self.backend, game, seen, is_greedy=is_greedy), strict=True))
        return float(np.mean([count_out(game, case, policy.__getitem__).v[game.start(case)] for case in cases]))
