"""The critic: values and losses of a few lines of torch and of verl; it learns, is kept bit for bit, and stays out of
exports."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lightningrl.backends import Continuation, GenerateRequest, Valuer
from lightningrl.errors import BackendError, ConfigError
from lightningrl.plugins import load_plugins
from lightningrl.recipe_tables import OutcomesConfig, SamplesConfig
from lightningrl.types import FinishReason, Sample, SamplingSettings, Task, Trajectory, Transition
from lightningrl_credit.rewards import NamedReward, RewardSet
from lightningrl_credit.scoring import Scorer
from lightningrl_credit.trained_calls import TrainedCalls
from lightningrl_credit.turn_gae import TurnGae
from lightningrl_testing.groups import make_trajectory
from lightningrl_torch.backend import TorchBackend
from lightningrl_torch.critic import value_losses
from lightningrl_torch.testing import make_sample, save_policy
from lightningrl_training.evaluator import Evaluator
from lightningrl_training.evidence_services import PolicyQueries

MakeBackend = Callable[..., TorchBackend]
KINDS = ["trunk", "joint", "own"]


@pytest.fixture
def critic_of(policy: str) -> Callable[..., dict[str, Any]]:
    def table(kind: str, **values: Any) -> dict[str, Any]:
        kinds: dict[str, dict[str, Any]] = {"trunk": {}, "joint": {"joint": True}, "own": {"model": policy}}
        return {"critic": {"learning_rate": 1e-2, **kinds[kind], **values}}

    return table


def taught(
    prompt: Sequence[int], completion: Sequence[int], target: float, advantage: float = 0.0, **others: Any
) -> Sample:
    """A call whose start is worth `target`."""
    sample = make_sample(prompt, completion, advantage, **others)
    targets = np.full(len(sample.token_ids), np.nan, np.float32)
    targets[len(prompt)] = target
    return replace(sample, value_targets=targets)


LESSONS = [([1, 2, 3], 1.0), ([1, 2, 9], -1.0), ([7], 0.5)]


def lessons(advantage: float = 0.0) -> list[Sample]:
    return [taught(prompt, [4, 5], target, advantage, rollout=str(prompt)) for prompt, target in LESSONS]


def values(backend: TorchBackend, *contexts: Sequence[int], tokens: Sequence[int] = ()) -> list[list[float]]:
    def ids(one: Sequence[int]) -> Any:
        return np.array(one, np.int32)

    return [
        one.tolist()
        for one in backend.values([Continuation(context=ids(context), tokens=ids(tokens)) for context in contexts])
    ]


def weights(backend: TorchBackend) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in backend.learner.model.state_dict().items()}


def are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# ------------------------------------------------------------------ values and losses


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_is_the_heads_of_the_state_after_the_token(
    make_backend: MakeBackend, critic_of: Any, kind: str
) -> None:
    backend = make_backend(**critic_of(kind), max_tokens_per_microbatch=16)
    assert isinstance(backend, Valuer)
    critic = backend.learner.critic
    assert critic is not None
    assert values(backend, [1, 2, 3], tokens=[4]) == [[0.0, 0.0]], "nothing is known before the first step"
    torch.manual_seed(0)
    for name, parameter in critic.parameters.items():
        if name.startswith("head"):
            torch.nn.init.normal_(parameter)
    weight, bias = (critic.parameters[f"head.{name}"].cpu() for name in ("weight", "bias"))
    found = values(backend, [1, 2, 3], [9], [1, 2, 3, 4, 5, 6], tokens=[4, 5])
    for context, numbers in zip(([1, 2, 3], [9], [1, 2, 3, 4, 5, 6]), found, strict=True):
        with torch.no_grad():
            ids = torch.tensor([[*context, 4, 5]], device=backend.learner.model.device)
            states = backend.learner.model.model(input_ids=ids).last_hidden_state[0].cpu()
        expected = states[len(context) - 1 :] @ weight[0] + bias
        np.testing.assert_allclose(numbers, expected.detach().numpy(), atol=1e-4)


def test_a_context_that_is_full_has_a_value_and_a_longer_one_has_none(
    make_backend: MakeBackend, critic_of: Any
) -> None:
    backend = make_backend(**critic_of("trunk"))
    backend.learn(lessons())
    ((full,),) = values(backend, [3] * 128)
    assert full != 0.0
    with pytest.raises(BackendError, match=r"129 tokens are more than policy .* reads \(128\)"):
        values(backend, [3] * 129)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("clip", [0.1, 0.5])
def test_losses_are_verls(core_algos: Any, seed: int, clip: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    now, old, targets = (torch.randn(3, 5, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = torch.ones(3, 5, dtype=torch.float64)
    theirs, _ = core_algos.compute_value_loss(now, targets, old, mask, clip, "token-mean")
    ours = value_losses(now.flatten(), targets.flatten(), old.flatten(), clip)
    assert float(ours.mean()) == pytest.approx(float(theirs), abs=1e-9)
    assert torch.equal(value_losses(now, targets, None, clip), 0.5 * (now - targets) ** 2)


# ------------------------------------------------------------------ learning


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [True, False])
def test_it_learns_what_credit_says(make_backend: MakeBackend, critic_of: Any, kind: str, share: bool) -> None:
    backend = make_backend(**critic_of(kind, clip=None), share_prefixes=share)
    losses = [backend.learn(lessons()).metrics["value_loss"] for _ in range(60)]
    assert losses[0] == pytest.approx(0.5 * np.mean([target**2 for _, target in LESSONS]))
    assert losses[-1] < 0.05 * losses[0]
    report = backend.learn(lessons())
    assert report.metrics["value_explained"] > 0.9
    for (_, target), (value, *_) in zip(LESSONS, values(backend, *(prompt for prompt, _ in LESSONS)), strict=True):
        assert value == pytest.approx(target, abs=0.3)


@pytest.mark.parametrize("kind", KINDS)
def test_only_a_joint_critic_moves_the_policy(make_backend: MakeBackend, critic_of: Any, kind: str) -> None:
    alone, beside = make_backend(), make_backend(**critic_of(kind))
    start = weights(beside)
    beside.learn(lessons())
    beside.learn(lessons())
    assert are_equal(weights(beside), start) == (kind != "joint")
    if kind != "joint":
        with_critic, without = make_backend(**critic_of(kind)), alone
        for backend in (with_critic, without):
            for _ in range(2):  # the head starts at zero, so only the second could move anything by it
                backend.learn([*lessons(advantage=1.0), make_sample([3, 3], [8], -1.0)])
            backend.learn(lessons())  # credit has nothing to say: momentum moves nothing, either
        assert are_equal(weights(with_critic), weights(without))


def test_values_do_not_run_away_within_a_step(make_backend: MakeBackend, critic_of: Any) -> None:
    """With a bound, updates beyond it have no gradient; the old values are of before the step."""
    free, bound = (make_backend(**critic_of("trunk", clip=clip), epochs=12) for clip in (None, 0.05))
    for backend in (free, bound):
        backend.learn([taught([1, 2, 3], [4], 5.0)])
    ((far, *_),), ((near, *_),) = (values(backend, [1, 2, 3]) for backend in (free, bound))
    assert far > 1.0
    assert 0.05 <= near < 0.5 * far


def test_microbatches_change_nothing(make_backend: MakeBackend, critic_of: Any) -> None:
    whole, parts = (make_backend(**critic_of("joint"), max_tokens_per_microbatch=tokens) for tokens in (4096, 4))
    for backend in (whole, parts):
        backend.learn(lessons(advantage=0.5))
    for one, other in zip(weights(whole).values(), weights(parts).values(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)
    np.testing.assert_allclose(values(whole, [1, 2, 3]), values(parts, [1, 2, 3]), atol=1e-4)


def test_a_step_that_is_not_finite_leaves_the_critic_as_it_was(make_backend: MakeBackend, critic_of: Any) -> None:
    backend = make_backend(**critic_of("own"), epochs=2)
    backend.learn(lessons(advantage=1.0))
    before, policy = values(backend, [1, 2, 3]), weights(backend)
    with pytest.raises(
        BackendError, match=r"its gradient's norm .*, the critic's (inf|nan); the weights stay at version 1"
    ):
        backend.learn([taught([1, 2, 3], [4], 3e38, 1.0)])
    assert values(backend, [1, 2, 3]) == before
    assert are_equal(weights(backend), policy)


# ------------------------------------------------------------------ kept, and left out


@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_bit_for_bit_and_is_no_part_of_the_export(
    make_backend: MakeBackend, critic_of: Any, tmp_path: Path, kind: str
) -> None:
    straight, resumed = (make_backend(**critic_of(kind), minibatches=2, epochs=2) for _ in range(2))
    straight.learn(lessons(advantage=0.3))
    straight.save(tmp_path / "saved")
    resumed.load(tmp_path / "saved")
    for backend in (straight, resumed):
        backend.learn(lessons(advantage=-0.3))
    assert values(straight, [1, 2, 3], tokens=[4, 5]) == values(resumed, [1, 2, 3], tokens=[4, 5])
    assert are_equal(weights(straight), weights(resumed))
    straight.export(tmp_path / "with")
    make_backend().export(tmp_path / "without")
    assert (
        load_file(tmp_path / "with" / "model.safetensors").keys()
        == load_file(tmp_path / "without" / "model.safetensors").keys()
    )
    with pytest.raises(
        BackendError, match=r"does not fit policy .*'critic\.head\.bias' is \(1,\) there and None here; use the"
    ):
        make_backend().load(tmp_path / "saved")


def test_what_cannot_be_a_critic_is_one_sentence(make_backend: MakeBackend, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the model of the critic .*no-such"):
        make_backend(critic={"model": str(tmp_path / "no-such")})
    small = save_policy(tmp_path / "small", vocab_size=257)
    with pytest.raises(
        ConfigError, match="reads 257 tokens and the policy has 264; take a model with the policy's tokenizer"
    ):
        make_backend(critic={"model": small})
    with pytest.raises(
        ConfigError, match="critic has no setting 'modle'; it takes: clip, coefficient, joint, learning_rate, model"
    ):
        make_backend(critic={"modle": "trunk"})
    with pytest.raises(ConfigError, match="the policy's layers, not for a model of its own"):
        make_backend(critic={"model": small, "joint": True})
    with pytest.raises(BackendError, match=r"has no critic; add a table \[learner\.critic\]"):
        values(make_backend(), [1])


# ------------------------------------------------------------------ PPO


WANTED = 65
"""The token that earns: the share of it among the completion's is the reward."""


def reward(task: Task, output: Any, trajectory: Trajectory) -> float:
    (call,) = trajectory.transitions
    return float((call.completion_ids < WANTED).mean())


async def play(backend: TorchBackend, name: str) -> Trajectory:
    sampling = SamplingSettings(max_tokens=6)
    request = GenerateRequest(id=name, prompt_ids=(1, 2, 3), sampling=sampling)
    chunks = [chunk async for chunk in backend.engine.generate(request)]
    call = Transition(
        id=f"{name}/0",
        policy="main",
        policy_version=chunks[0].policy_version,
        prompt_ids=np.array([1, 2, 3], np.int32),
        completion_ids=np.array([token for chunk in chunks for token in chunk.token_ids], np.int32),
        logprobs=np.array([value for chunk in chunks for value in chunk.logprobs], np.float32),
        finish_reason=FinishReason.LENGTH,
        sampling=sampling,
    )
    return make_trajectory(name, [call], group_id=name)


async def ppo(backend: TorchBackend, steps: int) -> tuple[list[float], dict[str, float]]:
    """Mean reward of each step, and the last step's metrics: as a run does it, values from the backend that learns
    them."""
    policies = PolicyQueries({})
    policies.connect("main", backend)
    rewards = RewardSet([NamedReward(name="wanted", function=reward)])
    credit = TurnGae(level="token", gamma=1.0, lam=0.95)
    evaluator = Evaluator(
        rewards=rewards,
        intermediate={},
        credit=credit,
        outcomes=OutcomesConfig(),
        plugins=load_plugins(),
        policies=policies,
    )
    scorer = Scorer(
        credit=credit, rewards=rewards.weights, whitened=True, samples=SamplesConfig(), trained={"main": TrainedCalls()}
    )
    means: list[float] = []
    metrics: dict[str, float] = {}
    for step in range(steps):
        played = await asyncio.gather(*(play(backend, f"{step}-{number}") for number in range(32)))
        rewarded = await evaluator.reward(played)
        means.append(float(np.mean([one.reward for one in rewarded if one.reward is not None])))
        scored = scorer.build(scorer.credit(rewarded))
        report = await asyncio.to_thread(backend.learn, scored.samples)
        metrics = dict(report.metrics)
    return means, metrics


async def test_ppo_learns_where_a_learning_rate_of_zero_does_not(make_backend: MakeBackend, critic_of: Any) -> None:
    """Groups of one: nothing but the critic says what was to be expected."""
    ppo_settings = {"epochs": 2, "minibatches": 2, **critic_of("trunk")}
    learning, metrics = await ppo(make_backend(learning_rate=3e-3, **ppo_settings), steps=14)
    still, _ = await ppo(make_backend(learning_rate=0.0, **ppo_settings), steps=4)
    assert np.mean(learning[-3:]) > 0.75
    assert max(still) < 0.45, "about a quarter of all tokens"
    assert metrics["value_loss"] < 0.1
