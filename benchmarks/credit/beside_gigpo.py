"""`states` beside the GiGPO authors' own code (langfengQ/verl-agent, gigpo/core_gigpo.py), on random groups.

python benchmarks/credit/beside_gigpo.py path/to/core_gigpo.py

Both get the same episodes: outcomes alone, or turn rewards as well. Their code pays an outcome with the last step, ours adds it to
what follows: the same return. Two things are set or left out, so that the rest can be the same within 2e-5 (theirs is float32):
- by default their group's mean counts a rollout once for each of its calls; here it counts each once, as eq. 3 and ours do;
- in a state that one rollout alone came back to theirs compares it with itself, and ours says nothing: those calls are counted.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import inspect
import io
import sys
import types
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from lightningrl.types import TrajectoryGroup
from lightningrl_credit.states import StateBaseline, StateGroups
from lightningrl_testing.groups import make_trajectory, make_transition

GROUPS, ROLLOUTS, STATES, GAMMA = 200, 8, 5, 0.95
TOLERANCE = 2e-5
BASELINES: dict[str, StateBaseline] = {"mean_std_norm": "grpo", "mean_norm": "dr_grpo"}
"""Theirs and ours."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="core_gigpo.py of a copy of verl-agent")
    theirs = load(parser.parse_args().file)
    is_wrong = False
    for has_turns in (False, True):
        for mode, baseline in BASELINES.items():
            ours = StateGroups(gamma=GAMMA, baseline=baseline)
            gaps = [compare(theirs, mode, ours, np.random.default_rng(seed), has_turns=has_turns) for seed in range(GROUPS)]
            compared = np.concatenate([gap for gap, _ in gaps])
            alone = sum(count for _, count in gaps)
            is_wrong |= bool(compared.max() > TOLERANCE)
            rewards = "turn rewards and outcome" if has_turns else "outcome alone"
            print(f"{mode:14} {rewards:25} {len(compared):6} calls: largest difference {compared.max():.1e}; {alone} calls left out")
    sys.exit(is_wrong)


def load(file: Path) -> Any:
    """Their module. Of verl it wants the name of a type."""
    verl = types.ModuleType("verl")
    verl.DataProto = SimpleNamespace  # type: ignore[attr-defined]
    sys.modules["verl"] = verl
    spec = importlib.util.spec_from_file_location("core_gigpo", file)
    if spec is None or spec.loader is None or not file.is_file():
        sys.exit(f"no Python file {str(file)!r}; give core_gigpo.py of a copy of verl-agent")
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    once = [name for name in inspect.signature(module.episode_norm_reward).parameters if name.startswith("compute_mean_std_cross")]
    module.episode_norm_reward = partial(module.episode_norm_reward, **dict.fromkeys(once, False))
    return module


def compare(theirs: Any, mode: str, ours: StateGroups, random: np.random.Generator, *, has_turns: bool) -> tuple[np.ndarray, int]:
    """The differences of the calls of one random group (relative above 1), and how many calls were left out."""
    states = [random.integers(0, STATES, size=random.integers(1, 9)) for _ in range(ROLLOUTS)]
    outcomes = random.integers(0, 2, ROLLOUTS) if random.random() < 0.5 else random.normal(size=ROLLOUTS)
    turns = [random.normal(size=len(walk)) if has_turns else np.zeros(len(walk)) for walk in states]
    group = TrajectoryGroup(
        id="g",
        trajectories=tuple(
            make_trajectory(
                f"r{i}",
                [
                    make_transition(f"r{i}/{t}", prompt=[int(state)], index=t, rewards={"turn": float(turns[i][t])} if has_turns else {})
                    for t, state in enumerate(walk)
                ],
                reward=float(outcomes[i]),
            )
            for i, walk in enumerate(states)
        ),
    )
    found = [float(tokens[0]) for credit in ours.assign(group) for tokens in credit if tokens is not None]

    owner = np.repeat(np.arange(ROLLOUTS), [len(walk) for walk in states])
    state = np.concatenate(states)
    is_last = np.append(owner[1:] != owner[:-1], True)
    rewards = np.concatenate(turns) + np.where(is_last, outcomes[owner], 0.0)
    batch = SimpleNamespace(
        non_tensor_batch={"rewards": rewards, "traj_uid": owner, "active_masks": np.ones(len(owner)), "env_step": np.arange(len(owner))},
        batch={"input_ids": torch.zeros(1)},
    )
    returns = theirs.compute_step_discounted_returns(batch, GAMMA)
    with contextlib.redirect_stdout(io.StringIO()):  # it says how large its groups are
        expected, _ = theirs.compute_gigpo_outcome_advantage(
            token_level_rewards=torch.tensor(outcomes[owner], dtype=torch.float32)[:, None],
            step_rewards=returns,
            response_mask=torch.ones(len(owner), 1),
            anchor_obs=state,
            index=np.zeros(len(owner), dtype=int),
            traj_index=owner,
            epsilon=ours.epsilon,
            mode=mode,
        )
    shared = np.array([len(set(owner[state == one])) > 1 or np.sum(state == one) == 1 for one in state])
    right = expected[:, 0].numpy()
    gaps = np.abs(np.array(found) - right) / np.maximum(1.0, np.abs(right))
    return gaps[shared], int((~shared).sum())


if __name__ == "__main__":
    main()
