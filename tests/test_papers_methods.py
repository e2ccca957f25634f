"""The rows of docs/how-to/verl.md that bear a paper's name give that paper's gradient, from rewards to each token: what a
run computes by the row's recipe, against the paper's formula written out here."""

from __future__ import annotations

import asyncio
import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import lightningrl
from lightningrl.plugins import load_plugins
from lightningrl.types import Trajectory
from lightningrl_credit.rewards import Overlong
from lightningrl_testing.groups import make_trajectory, make_transition
from lightningrl_testing.scripted_services import ScriptedServices
from lightningrl_torch.losses import LOSSES, TokenBatch
from lightningrl_torch.settings import Settings
from lightningrl_training.build import build_credit

PAGE = (Path(__file__).parent.parent / "docs" / "how-to" / "verl.md").read_text(encoding="utf-8")
GROUPS, SIZE = 3, 4
Floats = NDArray[np.float64]


DAPO = ("DAPO without its charge for length", "+ DAPO's charge for length")


def settings_of(*rows: str) -> dict[str, Any]:
    """Tables of the recipe that rows of the page name together."""
    cells = [re.findall(rf"^\| {re.escape(row)} \| (.*) \|$", PAGE, re.MULTILINE)[0] for row in rows]
    tables: dict[str, Any] = tomllib.loads("\n".join(cells).replace("<br>", "\n").replace("`", ""))
    return tables


def recipe_of(*rows: str) -> lightningrl.Recipe:
    base: dict[str, Any] = {
        "agent": "agent.py:answer",
        "tasks": {"train": "tasks.py:train"},
        "policy": {"model": "tiny"},
        "rewards": {"right": {"use": "exact"}},
    }
    tables = settings_of(*rows)
    tables["rewards"] = {**base["rewards"], **tables.get("rewards", {})}
    return lightningrl.Recipe.model_validate({**base, **tables})


class Scene:
    """Groups of rollouts of one call; the policy has moved since they were sampled, and away from its reference."""

    def __init__(self, rewards: Callable[[Trajectory], float] | None = None) -> None:
        random = np.random.default_rng(0)
        self.trajectories: list[Trajectory] = []
        self.moved: list[Floats] = []
        """log π_θ of each token, now."""
        for group in range(GROUPS):
            for member in range(SIZE):
                length = int(random.integers(1, 9))
                call = make_transition(
                    f"{group}-{member}/0", completion=[int(random.integers(100)) for _ in range(length)]
                )
                old = -3 * random.random(length) - 0.05
                call = replace(call, logprobs=old.astype(np.float32))
                one = make_trajectory(
                    f"{group}-{member}", [call], group_id=f"g{group}", reward=float((group + member) % 3 == 0)
                )
                if rewards is not None:
                    one = replace(one, reward=rewards(one))
                self.trajectories.append(one)
                self.moved.append(call.logprobs + 0.3 * random.normal(size=length))

    @property
    def old(self) -> list[Floats]:
        return [one.transitions[0].logprobs.astype(np.float64) for one in self.trajectories]

    @property
    def rewards(self) -> Floats:
        return np.array([one.reward for one in self.trajectories]).reshape(GROUPS, SIZE)

    def gradient(self, *rows: str) -> list[Floats]:
        """∂loss / ∂log π_θ of each token, by rollout, as a run of the rows' recipe computes it."""
        recipe = recipe_of(*rows)
        settings = Settings(policy="tiny", **recipe.backend_options)
        evaluator, scorer = build_credit(recipe, load_plugins())
        trajectories = self.trajectories
        if evaluator.credit.has("score"):
            asked = [asyncio.run(evaluator.credit.score(one, reference())) for one in trajectories]
            trajectories = [replace(one, evidence=each) for one, each in zip(trajectories, asked, strict=True)]
        samples = scorer.build(scorer.credit(trajectories)).samples
        of_rollout = {sample.rollout_id: sample for sample in samples}
        lengths = [len(moved) for moved in self.moved]
        logprobs = torch.from_numpy(np.concatenate(self.moved)).requires_grad_()

        def column(name: str) -> torch.Tensor:
            """A column of the rows' trained tokens; nothing where a group was left out."""
            parts = [
                getattr(of_rollout[one.rollout_id], name)[of_rollout[one.rollout_id].mask]
                if one.rollout_id in of_rollout
                else np.zeros(length)
                for one, length in zip(self.trajectories, lengths, strict=True)
            ]
            return torch.from_numpy(np.concatenate(parts).astype(np.float64))

        batch = TokenBatch(
            logprobs=logprobs,
            old_logprobs=torch.from_numpy(np.concatenate(self.old)),
            rollout_logprobs=None,
            reference_logprobs=None,
            advantages=column("advantages"),
            calls=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)),
        )
        losses = LOSSES[settings.loss](batch, **settings.loss_arguments).losses
        (gradient,) = torch.autograd.grad((column("weights") * losses).sum(), logprobs)
        return np.split(gradient.numpy(), np.cumsum(lengths)[:-1])


def reference() -> ScriptedServices:
    return ScriptedServices(logprobs=lambda tokens, _: [-0.02 * token for token in tokens])


def clipped(advantages: Floats, old: Floats, new: Floats, low: float, high: float) -> Floats:
    """∂/∂log π_θ of -min(r A, clip(r) A), each token its own ratio."""
    ratio = np.exp(new - old)
    is_clipped = np.where(advantages > 0, ratio > 1 + high, ratio < 1 - low)
    return np.where(is_clipped, 0.0, -ratio * advantages)


def grpo(rewards: Floats) -> Floats:
    """(R - mean) / std of each group."""
    scores: Floats = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, ddof=1, keepdims=True) + 1e-6)
    return scores.ravel()


def agree(found: Sequence[Floats], expected: Sequence[Floats]) -> None:
    assert any(abs(one).max() > 1e-3 for one in expected)
    for ours, papers in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, papers, rtol=1e-4, atol=1e-6)


def test_reinforce_plus_plus_has_its_kl_in_each_tokens_reward_before_it_is_normalised() -> None:
    """A_t = R - β Σ_{i≥t} log(π_old / π_ref);  A ← (A - mean) / std over the batch's tokens  (arXiv 2501.03262)."""
    scene, beta = Scene(), settings_of("REINFORCE++")["learner"]["kl_coef"]
    advantages = []
    for one, old, reward in zip(scene.trajectories, scene.old, scene.rewards.ravel(), strict=True):
        k1 = old + 0.02 * one.transitions[0].completion_ids
        advantages.append(np.array([reward - beta * k1[t:].sum() for t in range(len(k1))]))
    every = np.concatenate(advantages)
    expected = [
        clipped((each - every.mean()) / every.std(), old, new, 0.2, 0.2) / len(every)
        for each, old, new in zip(advantages, scene.old, scene.moved, strict=True)
    ]
    agree(scene.gradient("REINFORCE++"), expected)


def test_dapo_shapes_overlong_answers_leaves_equal_groups_out_and_weighs_tokens_alike() -> None:
    """Eq. 8 to 13 of arXiv 2503.14476: the filter, clip-higher, the mean over all tokens, the soft overlong punishment."""
    options = settings_of(*DAPO)["rewards"]["long"]["options"]
    assert (options["tokens"], options["margin"]) == (20480, 4096), "the paper's"
    shaped = Overlong(tokens=8, margin=5)

    def reward(one: Trajectory) -> float:
        right = 1.0 if one.group_id == "g1" else float(one.reward or 0.0)
        return right + (0.0 if one.group_id == "g1" else shaped(one.task, None, one))

    scene = Scene(reward)
    assert len(set(scene.rewards[1])) == 1 and len(set(scene.rewards[0])) > 2
    kept = [number for number in range(GROUPS * SIZE) if number // SIZE != 1]
    tokens = sum(len(scene.old[number]) for number in kept)
    advantages = grpo(scene.rewards)
    expected = [
        clipped(np.full(len(old), advantages[number]), old, new, 0.2, 0.28) / tokens
        if number in kept
        else np.zeros(len(old))
        for number, (old, new) in enumerate(zip(scene.old, scene.moved, strict=True))
    ]
    agree(scene.gradient(*DAPO), expected)


def test_gspo_is_the_mean_over_sequences_of_one_clipped_ratio_each() -> None:
    """J = 1/G Σ_i min(s_i A_i, clip(s_i) A_i), s_i = (π_θ(y_i) / π_old(y_i))^(1/|y_i|)  (arXiv 2507.18071, eq. 5 to 7):
    finite differences of it."""
    scene = Scene()
    scene.moved = [old + 1e-4 * (new - old) for old, new in zip(scene.old, scene.moved, strict=True)]
    advantages, (low, high) = grpo(scene.rewards), (3e-4, 4e-4)

    def loss(number: int, new: Floats) -> float:
        s = np.exp((new - scene.old[number]).mean())
        return -float(min(s * advantages[number], np.clip(s, 1 - low, 1 + high) * advantages[number])) / len(scene.old)

    expected = []
    for number, new in enumerate(scene.moved):
        steps = np.eye(len(new)) * 1e-6
        expected.append(np.array([(loss(number, new + step) - loss(number, new - step)) / 2e-6 for step in steps]))
    agree(scene.gradient("GSPO"), expected)


def test_the_losses_have_one_gradient_at_the_defaults_and_differ_once_the_policy_has_moved() -> None:
    """docs/reference/losses.md: one update a step, on-policy."""
    random = torch.Generator().manual_seed(0)
    old = -torch.rand(12, generator=random) - 0.1
    advantages = torch.randn(12, generator=random)
    calls = torch.arange(3).repeat_interleave(4)

    def gradients(moved: float) -> dict[str, torch.Tensor]:
        found = {}
        for name, loss in LOSSES.items():
            logprobs = (old + moved * torch.randn(12, generator=torch.Generator().manual_seed(1))).requires_grad_()
            batch = TokenBatch(
                logprobs=logprobs,
                old_logprobs=old,
                rollout_logprobs=old,
                reference_logprobs=None,
                advantages=advantages,
                calls=calls,
            )
            (found[name],) = torch.autograd.grad(loss(batch).losses.sum(), logprobs)
        return found

    for gradient in gradients(0.0).values():
        torch.testing.assert_close(gradient, -advantages)
    moved = gradients(0.3)
    names = list(moved)
    for i, name in enumerate(names):
        for other in names[i + 1 :]:
            assert not torch.allclose(moved[name], moved[other], rtol=1e-3), f"{name} is {other}"
