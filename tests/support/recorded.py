"""A recorded run for whoever looks at one: real calls through a real gateway, credited by a real scorer, left as a run
folder.

g000000   three rollouts that share their first call; one tool fails, one rollout fails after a refused call
g000001   two with equal rewards: no signal          g000002   one alone, after an attempt that was lost
g000003   two of two roles, one of them not trained; a history rendered anew; a judge
v000001   validation          g000004   one runs, one waits
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI, BadRequestError

from lightningrl.plugins import load_plugins
from lightningrl.recipe import Recipe
from lightningrl.types import OtherCall, OtherCallKind, Outcome, RolloutMode, RolloutSpec, Task, Trajectory
from lightningrl_client.control.client import ServerClient
from lightningrl_credit.scoring import ScoredStep
from lightningrl_testing.live_gateway import LiveGateway, live_gateway
from lightningrl_training.build import build_credit

__all__ = ["RECIPE", "RecordedRun", "play_rollout", "record_run", "write_recipe"]

REWARDS = {"buy tea": 1.0, "sell tea": 0.0, "same": 0.5}


def right(task: Task, output: Any, trajectory: Trajectory) -> float | None:
    """By what the agent returned; None for what it does not know."""
    return REWARDS.get(str(output))


def no_tasks() -> list[str]:
    return ["x"]


def agent(task: Any) -> str:
    return "buy tea"


RECIPE = Recipe.model_validate(
    {
        "name": "recorded",
        "agent": agent,
        "tasks": {"train": no_tasks},
        "policy": {"model": "policy", "trained_agents": ["shopper", "planner"]},
        "rewards": {"right": {"use": right}},
        "credit": {"use": "sum", "options": {"parts": ["dr_grpo"]}},
        "loop": {"steps": 2, "tasks_per_step": 2, "group_size": 3},
    }
)


@dataclass
class RecordedRun:
    """Its folder, and what the scorer made of it."""

    folder: Path
    recipe: Recipe = RECIPE
    scored: list[ScoredStep] = field(default_factory=list[ScoredStep])
    """By step, from 1."""


def write_recipe(folder: Path, recipe: Recipe) -> None:
    """As `lightningrl train` leaves it."""
    (folder / "recipe.json").write_text(recipe.frozen_text(), encoding="utf-8")
    told = {"source": None, "folder": str(folder), "run": str(folder), "settings": {"loop.steps": 2}}
    (folder / "run.json").write_text(
        json.dumps({**told, "models": {"policy": str(folder / "policy")}}), encoding="utf-8"
    )


async def record_run(folder: Path) -> RecordedRun:
    run = RecordedRun(folder)
    write_recipe(folder, RECIPE)
    async with live_gateway(folder) as server, ServerClient(server.url, server.run_key) as control:
        server.engine.tokenizer.save_pretrained(folder / "policy")
        play = _Player(server, control)
        for number, says in enumerate(("buy tea", "sell tea")):
            await play.shop(f"g000000-{number:03d}", says)
        await play.fail("g000000-002")
        for number in range(2):
            await play.talk(f"g000001-{number:03d}", ("shopper", "same"))
        await play.lose("g000002-000")
        await play.talk("g000002-000", ("shopper", "buy tea"), is_there=True)
        for number, says in enumerate(("buy tea", "sell tea")):
            await play.talk(
                f"g000003-{number:03d}", ("planner", "plan"), ("critic", "fine"), ("planner", says), edits=True
            )
        judged = OtherCall(
            kind=OtherCallKind.JUDGE, path="chat/completions", model="judge-1", status=200, request={"ask": "good?"}, answer="yes",
            started_at=time.time(), duration_s=0.1,
        )  # fmt: skip
        await play.talk("v000001-0000", ("shopper", "buy tea"), mode=RolloutMode.VALIDATION)
        await play.credit(run, 1, "g000000", "g000001")
        await play.credit(run, 2, "g000002", "g000003", asked=judged)
        await play.begin("g000004-000")
        await play.ask("g000004-000", "shopper", "I do", [{"role": "user", "content": "Wait."}])
        await control.create_rollouts([play.spec("g000004-001")])
    return run


async def play_rollout(
    server: LiveGateway, control: ServerClient, rollout_id: str, *turns: tuple[str, str], task: Any
) -> None:
    """One rollout that ends, of a task with this input."""
    await _Player(server, control, task).talk(rollout_id, *turns)


class _Player:
    """Plays attempts by hand, one after the other."""

    def __init__(self, server: LiveGateway, control: ServerClient, task: Any = None) -> None:
        self._server, self._control = server, control
        self._task = task or {"question": "What costs tea?"}
        self._places: dict[str, tuple[str, str, int]] = {}

    def spec(self, rollout_id: str, mode: RolloutMode = RolloutMode.TRAIN) -> RolloutSpec:
        group = rollout_id.rpartition("-")[0]
        task = Task(id=f"task-{group}", input=self._task, answer="3 €")
        step = 1 if mode is RolloutMode.VALIDATION else int(group[1:]) // 2
        return RolloutSpec(id=rollout_id, task=task, group_id=group, mode=mode, step=step, max_attempts=2)

    async def begin(self, rollout_id: str, mode: RolloutMode = RolloutMode.TRAIN, *, is_there: bool = False) -> None:
        if not is_there:
            await self._control.create_rollouts([self.spec(rollout_id, mode)])
        lease = await self._control.lease("worker-1/0", 3600.0)
        assert lease is not None and lease.rollout_id == rollout_id
        self._places[rollout_id] = self._server.url + lease.base_path, lease.key, lease.attempt

    async def ask(self, rollout_id: str, role: str, says: str, messages: Sequence[Any], **options: Any) -> Any:
        """The answer's message, as it goes into a history."""
        base_url, key, _ = self._places[rollout_id]
        self._server.engine.enqueue(says)
        async with AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
            headers = {"x-lightningrl-agent": role}
            answer = await client.chat.completions.create(
                model="any", messages=list(messages), extra_headers=headers, **options
            )
        return answer.choices[0].message.model_dump()

    async def end(self, rollout_id: str, outcome: Outcome = Outcome.SUCCEEDED, **result: Any) -> None:
        await self._control.finish_attempt(rollout_id, self._places[rollout_id][2], outcome, duration_s=2.5, **result)

    async def report(self, rollout_id: str, path: str, body: Any) -> None:
        base_url, key, _ = self._places[rollout_id]
        async with httpx.AsyncClient() as client:
            answer = await client.post(f"{base_url}/{path}", json=body, headers={"authorization": f"Bearer {key}"})
        assert answer.is_success, answer.text

    async def shop(self, rollout_id: str, says: str) -> None:
        """Two tools at once, then an answer."""
        await self.begin(rollout_id)
        tools = [{"type": "function", "function": {"name": "price", "parameters": {"type": "object"}}}]
        calls = "\n".join(
            f'<tool_call>\n{{"name": "price", "arguments": {{"of": "{what}"}}}}\n</tool_call>'
            for what in ("tea", "air")
        )
        history: list[Any] = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "What costs tea?"},
        ]
        asked = await self.ask(rollout_id, "shopper", f"<think>Look it up.</think>\n{calls}", history, tools=tools)
        first, second = (call["id"] for call in asked["tool_calls"])
        price = {"name": "price", "arguments": {"of": "tea"}, "duration_s": 0.2}
        ran = [
            {**price, "status": "ok", "result": "3 €", "tool_call_id": first},
            {**price, "status": "error", "result": "free", "tool_call_id": second, "error_type": "KeyError"},
            {"name": "bell", "status": "ok", "arguments": {}, "result": "rings"},
        ]
        await self.report(rollout_id, "tool_calls", {"tool_calls": ran})
        results = [
            {"role": "tool", "content": text, "tool_call_id": id_} for text, id_ in (("3 €", first), ("free", second))
        ]
        await self.ask(rollout_id, "shopper", says, [*history, asked, *results], tools=tools)
        await self.report(rollout_id, "rewards", {"rewards": {"polite": 0.25}})
        await self.end(rollout_id, output=says)

    async def fail(self, rollout_id: str) -> None:
        await self.begin(rollout_id)
        await self.ask(rollout_id, "shopper", "hm", [{"role": "user", "content": "What costs tea?"}])
        try:
            await self.ask(rollout_id, "shopper", "never", [{"role": "user", "content": "x"}], n=0)
        except BadRequestError:
            self._server.engine._script.clear()
        await self.end(rollout_id, Outcome.AGENT_ERROR, error="ValueError: no tea left")

    async def lose(self, rollout_id: str) -> None:
        """An attempt whose worker went; it is queued again."""
        await self.begin(rollout_id)
        await self.ask(rollout_id, "shopper", "lost", [{"role": "user", "content": "What costs tea?"}])
        await self.end(rollout_id, Outcome.INFRASTRUCTURE_ERROR, error="the worker went away")

    async def talk(
        self,
        rollout_id: str,
        *turns: tuple[str, str],
        mode: RolloutMode = RolloutMode.TRAIN,
        edits: bool = False,
        is_there: bool = False,
    ) -> None:
        """Each turn goes on in the history; with `edits` the last one's history has been edited."""
        await self.begin(rollout_id, mode, is_there=is_there)
        history: list[Any] = [
            {"role": "system", "content": "You are one of two."},
            {"role": "user", "content": "Plan."},
        ]
        for number, (role, says) in enumerate(turns):
            if edits and number == len(turns) - 1:
                history[2] = {**history[2], "content": "edited"}
            said = await self.ask(rollout_id, role, says, history)
            history += [said, {"role": "user", "content": "And then?"}]
        await self.end(rollout_id, output=turns[-1][1])

    async def credit(self, run: RecordedRun, step: int, *groups: str, asked: OtherCall | None = None) -> None:
        """As a step does."""
        evaluator, scorer = build_credit(run.recipe, load_plugins())
        ids = [
            record.spec.id for record in reversed(await self._control.list_rollouts()) if record.spec.group_id in groups
        ]
        rewarded = await evaluator.evaluate(await self._control.trajectories(ids))
        scored = scorer.build(scorer.credit(rewarded))
        await self._control.set_scores(scored.scores)
        if asked is not None:
            from lightningrl.records import Score

            kept = next(score for score in scored.scores if score.rollout_id == f"{groups[-1]}-000")
            await self._control.set_scores(
                [Score(rollout_id=kept.rollout_id, attempt=kept.attempt, reward=kept.reward, asked=[asked])]
            )
        await self._control.mark_trained(step, scored.rollout_ids, {"reward": 0.5, "policy_version": float(step)})
        run.scored.append(scored)
