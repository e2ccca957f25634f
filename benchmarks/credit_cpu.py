"""CPU of a step's credit (DESIGN's target: at most 50 ms): 128 rollouts of 8 turns, every installed assigner that asks
nobody.

python benchmarks/credit_cpu.py
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from measuring import least_cpu_ms, result

from lightningrl.plugins import load_plugins
from lightningrl.protocols import CreditAssigner
from lightningrl.types import ToolCall, Trajectory, TrajectoryGroup, Transition
from lightningrl_credit import assign_credit
from lightningrl_credit.comparison import Compare
from lightningrl_testing.groups import make_trajectory, make_transition

GROUPS, ROLLOUTS, TURNS = 16, 8, 8
PROMPT, COMPLETION, RESULT = 1000, 64, 150
"""Tokens."""
WORDS = "a table, a chair and what else there was in the room of 12 by 9 feet; " * 8
ASKS_NOBODY = {"group", "turn_rewards", "agents", "state_key"}
OPTIONS: Mapping[str, list[Mapping[str, Any]]] = {
    "turns": [{"gamma": 0.9}, {"compared": "all"}],
    "states": [
        {},
        {"key": "observation"},
        {"key": "tool_result"},
        {"shrinkage": 2.0, "gate": 4.0, "lam": 0.9},
    ],
    "sum": [
        {"parts": [{"use": "turns", "weight": 0.5}, {"use": "states"}]},
        {"parts": [{"use": "turns", "compare": "role"}]},
        {"parts": [{"use": "turns", "whiten": True}]},
    ],
    "clip": [{"of": {"use": "states"}, "at": 5.0}],
}
INSTALLED = load_plugins().credit_assigners


def build(part: Mapping[str, Any]) -> CreditAssigner:
    factory = INSTALLED[part["use"]].factory
    offered = {"build": build} if part["use"] in ("sum", "clip") else {}
    made: CreditAssigner = factory(**part.get("options", {}), **offered)
    return made


def make_rollout(group: int, number: int, random: np.random.Generator) -> Trajectory:
    """A chat with a tool in every turn; results are of few kinds, so that states repeat."""
    prompt = [group, *range(PROMPT)]
    calls: list[Transition] = []
    tools: list[ToolCall] = []
    for t in range(TURNS):
        name, completion = f"{group}/{number}/{t}", random.integers(0, 5000, COMPLETION).tolist()
        page, parent = int(random.integers(0, 4)), calls[-1].id if calls else None
        calls.append(
            make_transition(
                name,
                prompt=prompt,
                completion=completion,
                index=t,
                parent=parent,
                agent=("search", "answer")[t % 2],
                rewards={"tool": float(random.normal())},
                tool_call_ids=(f"call_{name}",),
            )
        )
        tools.append(
            ToolCall(
                id=f"call_{name}",
                name="find",
                arguments=f'{{"page": {page}}}',
                result=f"page {page} at 18:04:{number:02} has {WORDS}",
            )
        )
        prompt = [*prompt, *completion, *range(page, page + RESULT)]
    return make_trajectory(
        f"{group}/{number}", calls, reward=float(random.integers(0, 2)), group_id=str(group), tool_calls=tools
    )


def main() -> None:
    random = np.random.default_rng(0)
    groups = [
        TrajectoryGroup(
            id=str(group), trajectories=tuple(make_rollout(group, number, random) for number in range(ROLLOUTS))
        )
        for group in range(GROUPS)
    ]

    def step(assigner: CreditAssigner, compare: Compare) -> None:
        credit = [assign_credit(assigner, group, compare=compare) for group in groups]
        assigner.finish_step(groups, credit)

    parts: list[tuple[Mapping[str, Any], Compare]] = [({"use": "grpo"}, "role"), ({"use": "turns"}, "role")]
    for name, plugin in INSTALLED.items():
        if name in OPTIONS:
            parts += [({"use": name, "options": options}, "group") for options in OPTIONS[name]]
        elif plugin.factory().requires <= ASKS_NOBODY:
            parts.append(({"use": name}, "group"))
    costs: dict[str, float] = {}
    for part, compare in parts:
        options = {"compare": compare} if compare == "role" else part.get("options", {})
        shown = ", ".join(f"{key} = {value}" for key, value in options.items())
        work = partial(step, build(part), compare)
        costs[f"{part['use']} {shown}".strip()] = least_cpu_ms(work, clock=time.thread_time)
    print(
        f"{GROUPS * ROLLOUTS} rollouts × {TURNS} turns, "
        f"prompts up to {len(groups[0].trajectories[0].transitions[-1].prompt_ids):,} tokens"
    )
    print(f"{'assigner':<64}{'CPU ms':>8}{'÷ grpo':>9}")
    for name, cost in costs.items():
        print(f"{name[:62]:<64}{cost:8.1f}{cost / costs['grpo']:9.1f}")
    result(max(costs.values()))


if __name__ == "__main__":
    main()
