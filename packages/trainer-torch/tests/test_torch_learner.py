"""The learner: what a step does to the policy."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch

from lightningrl.errors import BackendError, ConfigError
from lightningrl.types import Sample
from lightningrl_torch import scoring
from lightningrl_torch.backend import TorchBackend
from lightningrl_torch.learner import Learner
from lightningrl_torch.losses import LOSSES, TokenBatch
from lightningrl_torch.packing import deal
from lightningrl_torch.settings import Settings
from lightningrl_torch.testing import make_model, make_sample, plain_logits

MakeBackend = Callable[..., TorchBackend]


def make_learner(model: Any = None, **settings: Any) -> Learner:
    return Learner(model or make_model(), Settings(**{"policy": "tiny", "learning_rate": 1e-2, **settings}))


def score(model: Any, sample: Sample) -> torch.Tensor:
    """Logprobs of a sample's trained tokens by a plain forward of its own row."""
    ids = torch.from_numpy(sample.token_ids.astype(np.int64))
    logits = plain_logits(model, sample.token_ids.tolist())[:-1] / torch.from_numpy(sample.temperatures)[1:, None]
    logprobs: torch.Tensor = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0][torch.from_numpy(sample.mask[1:])]
    return logprobs


def make_samples(
    model: Any, *, groups: int = 3, size: int = 4, seed: int = 0, temperature: float = 1.0
) -> list[Sample]:
    """Groups that share a prompt, with logprobs near the model's own."""
    rng = random.Random(seed)
    samples = []
    for group in range(groups):
        prompt = [rng.randrange(256) for _ in range(rng.randint(10, 40))]
        for number in range(size):
            completion = [rng.randrange(256) for _ in range(rng.randint(1, 12))]
            draft = make_sample(
                prompt,
                completion,
                rng.gauss(0, 1),
                rollout=f"{group}/{number}",
                weight=rng.random() / 40,
                temperature=temperature,
            )
            with torch.no_grad():
                own = score(model, draft).numpy()
            noise = np.array([rng.gauss(0, 0.3) for _ in own], np.float32)
            logprobs = draft.logprobs.copy()
            logprobs[draft.mask] = own + noise
            samples.append(replace(draft, logprobs=logprobs))
    return samples


def make_turns(model: Any, *, seed: int = 0) -> list[Sample]:
    """Rollouts of two calls in one row, some with nothing between them, and a row of a third call that continues the
    first."""
    rng = random.Random(seed)
    samples = []
    for rollout in range(4):
        prompt, first, second, third = (
            [rng.randrange(256) for _ in range(count)] for count in (12, rng.randint(2, 7), rng.randint(2, 7), 4)
        )
        more = [rng.randrange(256) for _ in range(3 * (rollout % 2))]
        for number, completion in ((1, second), (2, third)):
            calls = (
                [-1] * len(prompt)
                + [0 if number == 1 else -1] * len(first)
                + [-1] * len(more)
                + [number] * len(completion)
            )
            of_call = np.array(calls, np.int32)
            draft = make_sample(prompt, first + more + completion, rollout=str(rollout))
            mask = of_call >= 0
            draft = replace(
                draft, mask=mask, calls=of_call, weights=np.where(mask, np.float32(rng.random() / 40), np.float32(0))
            )
            noise = np.array([rng.gauss(0, 0.3) for _ in calls], np.float32)
            with torch.no_grad():
                own = np.zeros(len(calls), np.float32)
                own[mask] = score(model, draft).numpy()
            advantages = np.array([rng.gauss(0, 1) for _ in calls], np.float32)
            samples.append(
                replace(
                    draft, logprobs=np.where(mask, own + noise, 0), advantages=np.where(mask, advantages, np.float32(0))
                )
            )
    return samples


CLIPS = {"clip_low": 0.1, "clip_high": 0.1}


def plain_gradients(
    model: Any, samples: Sequence[Sample], loss: str = "ppo_clip", **clips: float
) -> dict[str, torch.Tensor]:
    """Row by row, and within a row call by call."""
    model.zero_grad()
    total = torch.zeros(())
    for sample in samples:
        mask = torch.from_numpy(sample.mask)
        logprobs, calls = score(model, sample), torch.from_numpy(sample.calls)[mask]
        old, advantages, weights = (
            torch.from_numpy(getattr(sample, name))[mask] for name in ("logprobs", "advantages", "weights")
        )
        for call in set(calls.tolist()):
            here = calls == call
            batch = TokenBatch(
                logprobs=logprobs[here],
                old_logprobs=old[here],
                rollout_logprobs=old[here],
                reference_logprobs=None,
                advantages=advantages[here],
                calls=torch.zeros(int(here.sum()), dtype=torch.int64),
            )
            total = total + (weights[here] * LOSSES[loss](batch, **clips).losses).sum()
    torch.autograd.backward(total)
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return found


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Relative difference of two gradients."""
    assert one.keys() == other.keys()
    difference = sum(float((one[name].double() - other[name].double()).pow(2).sum()) for name in one)
    return float((difference / sum(float(value.double().pow(2).sum()) for value in one.values())) ** 0.5)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_gradient_is_that_of_the_plain_rows(share: bool, temperature: float, attention: str) -> None:
    model = make_model(attn_implementation=attention)
    samples = make_samples(model, temperature=temperature)
    learner = make_learner(model, share_prefixes=share)
    assert distance(plain_gradients(model, samples), learner.gradients(samples)) < 2e-6


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("seed", range(3))
def test_every_loss_has_the_gradient_of_the_plain_rows_call_by_call(loss: str, share: bool, seed: int) -> None:
    model = make_model()
    samples = [*make_turns(model, seed=seed), *make_samples(model, seed=seed)]
    clips = {} if loss == "reinforce" else CLIPS
    learner = make_learner(model, share_prefixes=share, loss=loss, **clips)
    assert distance(plain_gradients(model, samples, loss, **clips), learner.gradients(samples)) < 2e-6


def test_calls_taken_for_one_would_be_seen() -> None:
    model = make_model()
    samples = make_turns(model)
    learner = make_learner(model, loss="gspo", **CLIPS)
    blurred = [replace(sample, calls=np.where(sample.mask, 0, -1).astype(np.int32)) for sample in samples]
    assert distance(learner.gradients(samples), learner.gradients(blurred)) > 0.05


@pytest.mark.parametrize("loss", LOSSES)
def test_per_call_rows_and_merged_rows_have_the_same_gradient(loss: str) -> None:
    rng = random.Random(3)
    prompt, first, more, second = ([rng.randrange(256) for _ in range(count)] for count in (30, 8, 10, 9))
    calls = [
        make_sample(prompt, first, 0.8, weight=0.05, logprobs=[-5.0] * 8),
        make_sample(prompt + first + more, second, -0.6, weight=0.05, logprobs=[-5.5] * 9),
    ]
    merged = make_sample(prompt, first + more + second, 0.0)
    chain = [*range(30, 38), *range(48, 57)]
    mask = np.zeros(57, np.bool_)
    mask[chain] = True
    columns: dict[str, Any] = {
        name: np.zeros(57, np.float32) + (1.0 if name == "temperatures" else 0.0)
        for name in ("logprobs", "advantages", "weights", "temperatures")
    }
    for name, column in columns.items():
        column[30:38] = getattr(calls[0], name)[30:38]
        column[48:57] = getattr(calls[1], name)[48:57]
    of_call = np.full(57, -1, np.int32)
    of_call[30:38], of_call[48:57] = 0, 1
    merged = replace(merged, mask=mask, calls=of_call, **columns)
    for share in (True, False):
        model = make_model()
        per_call = make_learner(model, share_prefixes=share, loss=loss).gradients(calls)
        assert distance(per_call, make_learner(model, share_prefixes=share, loss=loss).gradients([merged])) < 1e-6


def test_microbatches_do_not_change_the_gradient() -> None:
    model = make_model()
    samples = make_samples(model, groups=5)
    whole = make_learner(model, max_tokens_per_microbatch=100000).gradients(samples)
    for budget in (1, 60, 200):
        assert distance(whole, make_learner(model, max_tokens_per_microbatch=budget).gradients(samples)) < 2e-6


@pytest.mark.parametrize("entropy_coef", [0.0, 0.01])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_large_vocabulary_is_never_there_for_all_tokens_at_once(
    entropy_coef: float, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    samples = make_samples(model, temperature=temperature)
    learner = make_learner(model, entropy_coef=entropy_coef)
    whole, logprobs = learner.gradients(samples), learner.recompute(samples, model)
    rows: list[int] = []
    product = scoring._logits

    def counted(states: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        rows.append(len(states))
        return product(states, *others)

    monkeypatch.setattr(scoring, "_logits", counted)
    monkeypatch.setattr(scoring, "PART", 5 * model.config.vocab_size)
    for most in (scoring.MOST_LOGITS, 0):  # kept, or computed again for the gradient
        monkeypatch.setattr(scoring, "MOST_LOGITS", most)
        assert distance(whole, learner.gradients(samples)) < 2e-6
    for key, values in learner.recompute(samples, model).items():
        np.testing.assert_allclose(values, logprobs[key], atol=1e-5)
    assert max(rows) == 5


def test_logprobs_and_entropies_and_their_gradients_are_those_of_a_log_softmax() -> None:
    random = torch.Generator().manual_seed(1)
    states, weight = (torch.randn(rows, 16, generator=random, dtype=torch.float64) for rows in (23, 300))
    targets, by = torch.arange(23) * 7, torch.randn(2, 23, generator=random, dtype=torch.float64)
    temperatures = torch.tensor([0.0, 0.7, 1.0] * 8, dtype=torch.float64)[:23]

    def learn(look: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
        given = [tensor.clone().requires_grad_() for tensor in (states, weight)]
        scores = look(*given)
        (torch.stack(scores) * by).sum().backward()  # type: ignore[no-untyped-call]
        return [*(score.detach() for score in scores), *(cast("torch.Tensor", one.grad) for one in given)]

    def plainly(states: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        words = (states @ weight.t() / temperatures.where(temperatures != 0.0, 1.0)[:, None]).log_softmax(-1)
        return words.gather(-1, targets[:, None])[:, 0], -(words.exp() * words).sum(-1)

    ours = learn(lambda states, weight: scoring.look_up(states, weight, targets, temperatures))
    for one, other in zip(ours, learn(plainly), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_what_a_step_keeps_for_its_gradient_has_one_array_of_words_and_each_key_once() -> None:
    model = make_model(vocab_size=1000)
    learner = make_learner(model, entropy_coef=0.01)
    samples = [make_sample(list(range(3, 60)), [token, 7, 9], 1.0, rollout=str(token)) for token in range(3, 11)]
    kept: list[tuple[int, ...]] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        learner.gradients(samples)
    assert (24, 1000) not in kept, "what autograd keeps has no array of words beside the one that becomes its gradient"
    heads = {shape[1] for shape in kept if len(shape) == 4}
    assert heads == {1, model.config.num_key_value_heads}, "a mask, and keys that heads share once"


def test_positive_advantage_raises_the_sampled_tokens_and_negative_lowers_them(make_backend: MakeBackend) -> None:
    for advantage in (1.0, -1.0):
        backend = make_backend(learning_rate=1e-3)
        model = backend.learner.model
        sample = make_sample(range(20), [5, 6, 7, 8], advantage)
        with torch.no_grad():
            before = score(model, sample)
            logprobs = sample.logprobs.copy()
            logprobs[sample.mask] = before.numpy()
            report = backend.learn([replace(sample, logprobs=logprobs)])
            after = score(model, sample)
        assert float((after - before).sum()) * advantage > 0
        assert (report.policy_version, report.tokens, backend.engine.info.version) == (1, 4, 1)
        assert report.metrics["kl_rollout"] == pytest.approx(0.0, abs=1e-9)
        assert report.metrics["ratio"] == pytest.approx(1.0, abs=1e-5)
        assert 0 < report.metrics["entropy"] < 6
        assert {"loss", "clip_fraction", "grad_norm", "lr", "staleness_mean", "staleness_max"} <= report.metrics.keys()


def test_learning_rate_zero_leaves_every_bit(make_backend: MakeBackend) -> None:
    backend = make_backend(learning_rate=0.0, weight_decay=0.1, epochs=2, minibatches=2)
    before = {name: value.clone() for name, value in backend.learner.model.state_dict().items()}
    backend.learn(make_samples(backend.learner.model))
    for name, value in backend.learner.model.state_dict().items():
        assert torch.equal(value.view(torch.int32), before[name].view(torch.int32)), name


@pytest.mark.parametrize("options", [{}, {"minibatches": 3, "epochs": 2}])
def test_a_loss_that_is_not_finite_leaves_weights_and_version(
    make_backend: MakeBackend, options: dict[str, int]
) -> None:
    backend = make_backend(**options)
    samples = make_samples(backend.learner.model)
    backend.learn(samples)
    before = {name: value.clone() for name, value in backend.learner.model.state_dict().items()}
    logprobs = np.where(samples[-1].mask, np.float32(-500.0), np.float32(0.0))
    broken = [
        *samples[:-1],
        replace(samples[-1], logprobs=logprobs, advantages=np.where(samples[-1].mask, np.float32(-1), np.float32(0))),
    ]
    with pytest.raises(BackendError, match="weights stay at version 1"):
        backend.learn(broken)
    assert backend.engine.info.version == 1
    for name, value in backend.learner.model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert backend.learn(samples).policy_version == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"advantages": np.full(6, np.nan, np.float32)}, "advantages that are not finite"),
        ({"mask": np.ones(6, np.bool_)}, "trains its first token"),
        ({"mask": np.zeros(6, np.bool_)}, "none of 1 samples has a trained token"),
        ({"token_ids": np.full(6, 9999, np.int32)}, "outside 0..263"),
    ],
)
def test_samples_that_cannot_be_trained_on_are_named(
    make_backend: MakeBackend, change: dict[str, Any], said: str
) -> None:
    with pytest.raises(BackendError, match=said):
        make_backend().learn([replace(make_sample([1, 2, 3], [4, 5, 6]), **change)])


def test_minibatches_and_epochs_take_more_updates_and_scale_to_the_whole_step() -> None:
    model = make_model()
    samples = make_samples(model, groups=4)
    learner = make_learner(model, minibatches=4, epochs=3)
    dealt = deal(samples, 4, learner.random)
    assert sorted(sample.rollout_id for part in dealt for sample in part) == sorted(
        sample.rollout_id for sample in samples
    )
    assert [len(part) for part in dealt] == [4, 4, 4, 4]
    report = learner.learn(samples)
    assert int(next(iter(learner.optimizer.state.values()))["step"]) == 12
    assert report.metrics["clip_fraction"] > 0


def test_kl_to_the_reference_starts_at_zero_and_holds_the_policy_back(make_backend: MakeBackend) -> None:
    moved = {}
    for coefficient in (0.0, 5.0):
        for lora in (None, {"rank": 4}):
            backend = make_backend(kl_coef=coefficient, lora=lora, learning_rate=3e-3)
            samples = make_samples(backend.learner.model)
            with torch.no_grad():
                start = torch.cat([score(backend.learner.model, sample) for sample in samples])
                reports = [backend.learn(samples) for _ in range(6)]
                moved[coefficient, lora is None] = float(
                    (torch.cat([score(backend.learner.model, one) for one in samples]) - start).abs().mean()
                )
            if coefficient:
                assert reports[0].metrics["kl_reference"] == pytest.approx(0.0, abs=1e-6)
                assert reports[-1].metrics["kl_reference"] > 1e-5
    assert moved[5.0, True] < moved[0.0, True]
    assert moved[5.0, False] < moved[0.0, False]


def test_importance_cap_measures_ratios_to_the_policy_before_the_step(make_backend: MakeBackend) -> None:
    backend = make_backend(importance_cap=1.5, epochs=2, minibatches=2)
    samples = [
        replace(sample, versions=np.where(sample.mask, -2, -1).astype(np.int32))
        for sample in make_samples(backend.learner.model)
    ]
    report = backend.learn(samples)
    assert 0.5 < report.metrics["importance"] < 1.5
    assert report.metrics["staleness_max"] == 2.0


def test_importance_mask_leaves_out_tokens_that_the_engine_saw_otherwise(make_backend: MakeBackend) -> None:
    capped, narrow, wide = (
        make_backend(**options)
        for options in ({"importance_cap": 1e6}, {"importance_mask": (0.9, 1.1)}, {"importance_mask": (1e-6, 1e6)})
    )
    samples = make_samples(capped.learner.model)
    all_of_them, few, again = (backend.learn(samples).metrics["importance"] for backend in (capped, narrow, wide))
    assert few < 0.5 * all_of_them
    assert again == all_of_them


@pytest.mark.parametrize("option", ["geometric", "outlier"])
def test_a_call_that_the_sequence_mask_leaves_out_has_no_gradient_and_the_others_have_theirs(
    make_backend: MakeBackend, option: str
) -> None:
    """The engine gave one call's tokens another probability: a little another on the whole, or one token quite
    another."""

    def learn(names: Sequence[str], **settings: Any) -> tuple[dict[str, torch.Tensor], float]:
        backend = make_backend(max_grad_norm=0.0, **settings)
        calls = {"kept": make_sample(range(8), [1, 2, 3], rollout="kept"), "left": make_sample([9, 8], [4, 5, 6])}
        with torch.no_grad():
            exact = {name: score(backend.learner.model, call).numpy() for name, call in calls.items()}
        exact["left"] = exact["left"] + np.array(
            {"geometric": [0.1, 0.1, 0.1], "outlier": [-6.0, 6.0, 0.0]}[option], np.float32
        )
        rows = []
        for name in names:
            logprobs = calls[name].logprobs.copy()
            logprobs[calls[name].mask] = exact[name]
            rows.append(replace(calls[name], logprobs=logprobs))
        before = backend.learner._look_before(rows)
        totals: dict[str, float] = defaultdict(float)
        backend.learner._backward(rows, 1.0, before, totals)
        gradients = {
            name: cast("torch.Tensor", parameter.grad).clone() for name, parameter in backend.learner.parameters.items()
        }
        return gradients, totals["masked"] / totals["tokens"]

    bounds = {"geometric": (0.99, 1.01), "outlier": (1e-2, 1e2)}[option]
    masked = {"sequence_mask": {option: bounds}}
    nothing, share = learn(["left"], **masked)
    assert share == 1.0 and all(not gradient.any() for gradient in nothing.values()), "exactly 0"
    both, share = learn(["kept", "left"], **masked)
    alone, _ = learn(["kept"], **masked)
    plain, _ = learn(["kept"])
    assert share == 0.5
    assert distance(both, alone) < 1e-5 and distance(alone, plain) < 1e-5
    other = {"sequence_mask": {"outlier": (1e-2, 1e2)} if option == "geometric" else {"geometric": (0.99, 1.01)}}
    assert learn(["left"], **other)[1] == 0.0, "each has its own reason"


def test_an_entropy_term_keeps_the_policy_undecided(make_backend: MakeBackend) -> None:
    """Also on rows without any advantage, which have no other part in the loss."""
    plain, undecided = make_backend(), make_backend(entropy_coef=1.0)
    silent = [
        replace(sample, advantages=np.zeros_like(sample.advantages)) for sample in make_samples(plain.learner.model)
    ]
    assert plain.learn(silent).policy_version == 0
    before, *_, after = [undecided.learn(silent).metrics["entropy"] for _ in range(6)]
    assert after > before + 0.01


def test_bfloat16_steps_are_near_float32_ones(make_backend: MakeBackend) -> None:
    exact, rough = make_backend(), make_backend(dtype="bfloat16")
    samples = make_samples(exact.learner.model)
    losses = [backend.learn(samples).metrics["loss"] for backend in (exact, rough)]
    assert losses[0] == pytest.approx(losses[1], abs=0.02)
    assert {parameter.dtype for parameter in rough.learner.parameters.values()} == {torch.float32}


def test_gradient_checkpointing_has_the_same_gradient(make_backend: MakeBackend) -> None:
    plain, thrifty = make_backend(), make_backend(gradient_checkpointing=True)
    samples = make_samples(plain.learner.model)
    assert distance(plain.learner.gradients(samples), thrifty.learner.gradients(samples)) < 1e-6


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"device": "tpu"}, "device is 'tpu'; choose 'auto'"),
        ({"schedule": "cosine"}, "set total_steps"),
        ({"learning_rate": -1.0}, "learning_rate is -1.0; use a number of at least 0"),
        ({"minibatches": 0}, "at least 1"),
        ({"minibatches": True}, "minibatches is True; use a whole number"),
        ({"seed": "x"}, "seed is 'x'; use a whole number$"),
        ({"structured_output": 3}, "structured_output is 3; use true or false$"),
        ({"vllm": {"sleep": "perhaps"}}, "vllm.sleep is 'perhaps'; use true or false$"),
        ({"learning_rate": "fast"}, "learning_rate is 'fast'; use a valid number or 'auto'"),
        ({"importance_cap": float("inf")}, "importance_cap is inf; use a finite number"),
        ({"importance_cap": 2.0, "importance_mask": (0.5, 5.0)}, "correct the same ratio; remove one of them"),
        ({"importance_mask": (2.0, 0.5)}, "keeps ratios from 2 to 0.5, which are none"),
        ({"sequence_mask": {}}, "sequence_mask masks nothing; give bounds"),
        ({"sequence_mask": {"geometric": (1.01, 0.99)}}, "sequence_mask.geometric keeps ratios from 1.01 to 0.99"),
        (
            {"sequence_mask": {"product": (0.5, 2.0)}},
            "sequence_mask has no setting 'product'; it takes: geometric, outl",
        ),
        ({"loss": "reinforce", "clip_low": 0.2}, "loss 'reinforce'.*clip_low"),
        ({"loss": "gspo", "loss_options": {"dual_clip": 3.0}}, "loss 'gspo'.*dual_clip"),
        ({"betas": (0.9, 1.0)}, r"betas\.1 is 1.0; use less than 1"),
        ({"betas": (0.9, 0.9, 0.9)}, r"betas is \(0.9, 0.9, 0.9\); Tuple should have at most 2 items"),
        ({"speed": 3}, "the learner has no setting 'speed'; it takes: betas, clip_high"),
        ({"lora": {"rang": 3}}, "lora has no setting 'rang'"),
        ({"lora": "yes"}, r"lora is 'yes'; write a table \[learner.lora\], or true or false"),
        ({"critic": "trunk"}, r"critic is 'trunk'; write a table \[learner.critic\]"),
        ({"lora": {"rank": -1}}, "lora.rank is -1; use a number of at least 0"),
        ({"lora": {"target_modules": ["nowhere"]}}, "lora cannot be added"),
        ({"context_length": 4096}, "takes at most 128 tokens"),
        ({"policy": "./nowhere"}, "policy folder './nowhere' does not exist"),
    ],
)
def test_settings_that_cannot_be_are_named(make_backend: MakeBackend, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_backend(**options)
