"""The learner: one optimisation step on samples.

samples ─► minibatches ─► prefix trees ─► microbatches ─► Σ weights · token_loss ─► gradient ─► clip ─► AdamW
"""

from __future__ import annotations

import contextlib
import copy
import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from lightningrl.advantages import count_distinct
from lightningrl.backends import LearnReport
from lightningrl.errors import BackendError
from lightningrl.types import Sample
from lightningrl_torch.attention import follows_paths, read_costs
from lightningrl_torch.bits import make_optimizer
from lightningrl_torch.chosen_loss import ChosenLoss
from lightningrl_torch.critic import Critic, value_losses
from lightningrl_torch.device import return_memory, watch_memory
from lightningrl_torch.losses import KL_ESTIMATES, TokenBatch, approximate_kl, weigh_tokens
from lightningrl_torch.memory import choose_rate, is_large, tokens_at_once
from lightningrl_torch.models import read_traits
from lightningrl_torch.packing import Batch, Costs, build_batches, check_samples, count_targets, deal, some_rows
from lightningrl_torch.quantized import count_parameters
from lightningrl_torch.rates import MOST_TOKENS, Probe, probe_rates, schedule_factor, usual_rate
from lightningrl_torch.scoring import Scores, score_batch, to_tensor
from lightningrl_torch.settings import Settings

__all__ = ["Before", "Learner", "Reference"]

_STALE_CAP = 2.0
"""`importance_cap` of steps that learn from older versions' tokens, where nobody said (TIS, as verl recommends)."""
_CRITIC = "critic "
"""Prefix of the names of the critic's sums."""
_NO_SPREAD = 1e-9

Reference = Callable[[], contextlib.AbstractContextManager[PreTrainedModel]]
"""Gives the model that the KL is measured to, for the time of a `with` block."""

ByToken = Mapping[int, NDArray[np.float32]]
"""A number for each trained token of a sample, by `id(sample)`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Before:
    """Numbers from before the step."""

    logprobs: ByToken | None = None
    """Logprobs of the policy; None: ratios are to the rollout's."""
    weigh: Callable[[Tensor, Tensor], Tensor] | None = None
    """Importance weights of log π_before - log π_rollout and the tokens' calls; None without `logprobs`."""
    values: ByToken | None = None
    """Values of the critic; None: its values are not clipped."""


class Learner:
    """Takes steps on the parameters of `model` that require gradients."""

    def __init__(self, model: PreTrainedModel, settings: Settings, *, reference: Reference | None = None) -> None:
        self.model = model
        self.step = 0
        """Calls of `learn` so far, and returns to earlier weights: the version of the weights."""
        self.random = random.Random(settings.seed)  # noqa: S311 - minibatch order, not secrets
        self._settings = settings = choose_rate(settings, count_parameters(model))
        self._reference = reference
        self._loss = ChosenLoss(settings.loss, settings.loss_arguments, has_reference=reference is not None)
        self._is_large = is_large(count_parameters(model))
        self._traits = read_traits(model, settings.policy)
        self.critic = None if settings.critic is None else Critic(model, self._traits, settings, settings.critic)
        self.parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        of_size = usual_rate(
            count_parameters(model), adapters=settings.adapters is not None, rollouts=settings.rollouts_per_step
        )
        self.rate = settings.learning_rate if isinstance(settings.learning_rate, float) else of_size
        """Learning rate before `pace` and the schedule's factor."""
        self.pace = 1.0
        """Factor of the rate; less once the policy has gone back to earlier weights."""
        self.probe: Probe | None = None
        """The choice of `rate`, where it is "auto", once it was made."""
        matrices = [parameter for parameter in self.parameters.values() if parameter.ndim >= 2]
        vectors = [parameter for parameter in self.parameters.values() if parameter.ndim < 2]
        groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = make_optimizer(
            [group for group in groups if group["params"]], settings, rate=self.rate, fused=True
        )

    def learn(self, samples: Sequence[Sample]) -> LearnReport:
        """All minibatches and epochs of one step; no step where no row has a part in the loss.

        Raises BackendError, with the weights as they were, when a number is not finite.
        """
        started, settings = time.monotonic(), self._settings
        check_samples(samples, self._traits.vocabulary)
        if not self._has_other_terms:
            has_critic = self.critic is not None
            samples = [row for row in samples if row.advantages.any() or (has_critic and count_targets(row))]
            if not samples:
                return LearnReport(policy_version=self.step, tokens=0, seconds=time.monotonic() - started)
        notes = self._choose_rate(samples)
        factor = schedule_factor(
            settings.schedule,
            self.step,
            warmup_steps=settings.warmup_steps,
            total_steps=settings.total_steps,
            minimum=settings.minimum_factor,
        )
        rate = self.rate * self.pace * factor
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        totals: dict[str, float] = defaultdict(float)
        read_memory = watch_memory(self.model.device)
        with self._training(), self._undone_on_error():
            before = self._look_before(samples)
            for _ in range(settings.epochs):
                minibatches = deal(samples, settings.minibatches, self.random)
                for minibatch in minibatches:
                    self._update(minibatch, len(minibatches), before, totals)
        self.step += 1
        tokens = sum(int(sample.mask.sum()) for sample in samples)
        metrics = {
            **_mean_metrics(totals, settings.epochs),
            **_staleness(samples, self.step - 1),
            "lr": rate,
            **read_memory(),
        }
        return LearnReport(
            policy_version=self.step, tokens=tokens, seconds=time.monotonic() - started, metrics=metrics, notes=notes
        )

    def _choose_rate(self, samples: Sequence[Sample]) -> tuple[str, ...]:
        """Try rates before the first update, where the recipe says "auto". Returns a sentence on it."""
        if self._settings.learning_rate != "auto" or self.probe is not None or self.step:
            return ()
        rows = some_rows(samples, MOST_TOKENS)
        with self._training():
            self._backward(samples, 1.0, self._look_before(samples), defaultdict(float))
        parameters = list(self.parameters.values())
        torch.nn.utils.clip_grad_norm_(parameters, self._settings.max_grad_norm or math.inf)
        self.probe = probe_rates(
            self.rate, parameters, self.optimizer, lambda: list(self.recompute(rows, self.model).values())
        )
        self._zero_gradients()
        self.rate = self.probe.rate
        return (str(self.probe),)

    def gradients(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        """The loss's gradient by parameter name, without a step; for tests and diagnosis."""
        with self._training():
            self._backward(samples, 1.0, self._look_before(samples), defaultdict(float))
        gradients = {name: parameter.grad for name, parameter in self.parameters.items()}
        self._zero_gradients()  # which leaves these to whoever asked
        return {name: gradient for name, gradient in gradients.items() if gradient is not None}

    def rehearse(self, samples: Sequence[Sample]) -> None:
        """The work of an update without the update."""
        with self._training():
            self._backward(samples, 1.0, Before(), defaultdict(float))
        self._zero_gradients()

    @property
    def _has_other_terms(self) -> bool:
        """True if rows without any advantage have a part in the policy's loss."""
        return self._reference is not None or self._loss.has_other_terms or self._settings.entropy_coef > 0.0

    def _moves_policy(self, samples: Sequence[Sample]) -> bool:
        """Rows that teach the critic alone leave the policy as it is, momentum and all."""
        return (
            self._has_other_terms
            or (self.critic is not None and self.critic.settings.joint)
            or any(one.advantages.any() for one in samples)
        )

    def _zero_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if self.critic is not None:
            self.critic.optimizer.zero_grad(set_to_none=True)

    def _update(self, samples: Sequence[Sample], minibatches: int, before: Before, totals: dict[str, float]) -> None:
        """One optimiser update."""
        self._zero_gradients()  # what an update that raised has left
        loss = self._backward(samples, float(minibatches), before, totals)
        settings = self._settings
        limit = settings.max_grad_norm or math.inf
        norm = float(torch.nn.utils.clip_grad_norm_(list(self.parameters.values()), limit))
        critic_norm = 0.0 if self.critic is None else self.critic.clip_gradient(limit)
        if not math.isfinite(loss) or not math.isfinite(norm) or not math.isfinite(critic_norm):
            self._zero_gradients()
            of_critic = "" if self.critic is None else f", the critic's {critic_norm:g}"
            raise BackendError(
                f"step {self.step + 1}: loss {settings.loss!r} is {loss:g} and its gradient's norm "
                f"{norm:g}{of_critic}; the weights stay "
                f"at version {self.step}; lower the learning rate or look at this step's rewards"
            )
        if self._moves_policy(samples):
            self.optimizer.step()
        if self.critic is not None:
            self.critic.optimizer.step()
            totals[f"{_CRITIC}grad_norm"] += critic_norm
        self._zero_gradients()
        totals["loss"] += loss
        totals["grad_norm"] += norm
        totals["updates"] += 1.0

    def _backward(self, samples: Sequence[Sample], scale: float, before: Before, totals: dict[str, float]) -> float:
        """Add up the gradient of `scale` times the samples' loss; return the unscaled loss."""
        total = 0.0
        targets = sum(map(count_targets, samples)) if self.critic is not None else 0
        totals["distinct"] += count_distinct(samples)
        for batch in self._batches(samples):
            loss, states, sums = self._sum_losses(batch, before)
            wanted = loss * scale
            if self.critic is not None and targets:
                value_loss = self._value_loss(self.critic, batch, states, before, totals)
                wanted = wanted + self.critic.weight * value_loss / targets
            wanted.backward()  # type: ignore[no-untyped-call]
            if self._is_large:  # the gradient lies between what the next batch would use again
                return_memory()
            total += float(loss.detach())
            for name, value in sums.items():
                totals[name] += float(value)
            totals["tokens"] += float(len(batch.targets))
            totals["computed"] += float(batch.token_ids.size)
        return total

    def _sum_losses(self, batch: Batch, before: Before) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Σ weights · token_loss of a batch, the policy's states, and sums over its trained tokens for the metrics."""
        settings, model = self._settings, self.model
        logprobs, entropies, states = self._score(model, batch)
        rollout_logprobs, advantages = to_tensor(batch.logprobs, model), to_tensor(batch.advantages, model)
        old_logprobs = rollout_logprobs if before.logprobs is None else self._gather(before.logprobs, batch)
        reference_logprobs = None
        if self._reference is not None:
            with torch.no_grad(), self._reference() as reference:
                reference_logprobs = self._score(reference, batch).logprobs
        loss = self._loss(
            TokenBatch(
                logprobs=logprobs,
                old_logprobs=old_logprobs,
                rollout_logprobs=rollout_logprobs,
                reference_logprobs=reference_logprobs,
                advantages=advantages,
                calls=to_tensor(batch.calls, model),
            )
        )
        token_loss = loss.losses
        to_rollout = logprobs.detach() - rollout_logprobs
        sums = {
            "kl_rollout": approximate_kl(to_rollout).sum(),
            "ratio": to_rollout.exp().sum(),
            "entropy": entropies.detach().sum(),
            **{name: values.detach().sum() for name, values in loss.metrics.items()},
        }
        if reference_logprobs is not None:  # weighed as the token is: its mean is over π_θ, not over who sampled it
            divergence = KL_ESTIMATES[settings.kl_estimator](reference_logprobs - logprobs)
            token_loss = token_loss + settings.kl_coef * divergence
            sums["kl_reference"] = divergence.detach().sum()
        if before.weigh is not None:
            importance = before.weigh(old_logprobs - rollout_logprobs, to_tensor(batch.calls, model))
            token_loss = token_loss * importance
            sums["importance"] = importance.sum()
            sums["masked"] = (importance == 0.0).sum()
        if settings.entropy_coef > 0.0:
            token_loss = token_loss - settings.entropy_coef * entropies
        return (to_tensor(batch.weights, model) * token_loss).sum(), states, sums

    def _value_loss(
        self, critic: Critic, batch: Batch, states: Tensor, before: Before, totals: dict[str, float]
    ) -> Tensor:
        """Σ of the critic's losses over the batch's targets."""
        values = critic.values(batch, states)
        all_targets = to_tensor(batch.value_targets, self.model)
        has_target = all_targets.isfinite()
        values, targets = values[has_target], all_targets[has_target]
        old = None if before.values is None else self._gather(before.values, batch)[has_target]
        losses = value_losses(values, targets, old, critic.settings.clip)
        missed = (targets - values.detach()).double()
        sums = {
            "loss": losses.detach().sum(),
            "n": has_target.sum(),
            "miss": missed.sum(),
            "miss²": missed.square().sum(),
            "target": targets.double().sum(),
            "target²": targets.double().square().sum(),
        }
        for name, value in sums.items():
            totals[f"{_CRITIC}{name}"] += float(value)
        return losses.sum()

    def _look_before(self, samples: Sequence[Sample]) -> Before:
        settings, critic = self._settings, self.critic
        has_updates = settings.epochs * settings.minibatches > 1
        is_clipped = critic is not None and critic.settings.clip is not None and has_updates
        weigh = self._correction(samples)
        return Before(
            logprobs=self.recompute(samples, self.model) if weigh is not None else None,
            weigh=weigh,
            values=self.values(samples) if is_clipped else None,
        )

    def _correction(self, samples: Sequence[Sample]) -> Callable[[Tensor, Tensor], Tensor] | None:
        """Weights of tokens that other weights sampled; None = all weigh the same."""
        settings, arguments = self._settings, self._settings.importance_arguments
        is_stale = any((sample.versions[sample.mask] != self.step).any() for sample in samples)
        if settings.importance_mask is None and settings.importance_cap is None and settings.max_staleness and is_stale:
            arguments["cap"] = _STALE_CAP
        return partial(weigh_tokens, **arguments) if arguments else None

    def _gather(self, by_token: ByToken, batch: Batch) -> Tensor:
        """Numbers in the order of the batch's trained tokens."""
        return to_tensor(np.concatenate([by_token[id(sample)] for sample in batch.samples]), self.model)

    def values(self, samples: Sequence[Sample]) -> ByToken:
        """The critic's value before each of the samples' trained tokens, by `id(sample)`."""
        assert self.critic is not None
        check_samples(samples, self._traits.vocabulary)
        return self._by_token(samples, self.critic.values)

    def recompute(self, samples: Sequence[Sample], model: PreTrainedModel) -> ByToken:
        """Logprobs of the samples' trained tokens, by `id(sample)`, of the policy or its reference."""
        check_samples(samples, self._traits.vocabulary)
        return self._by_token(samples, lambda batch: self._score(model, batch).logprobs)

    def _by_token(self, samples: Sequence[Sample], compute: Callable[[Batch], Tensor]) -> ByToken:
        by_sample: dict[int, NDArray[np.float32]] = {}
        for batch in self._batches(samples):
            with torch.no_grad():
                numbers = compute(batch).cpu().numpy()
            ends = np.cumsum([int(sample.mask.sum()) for sample in batch.samples])
            for sample, part in zip(batch.samples, np.split(numbers, ends[:-1]), strict=True):
                by_sample[id(sample)] = part
        return by_sample

    def _score(self, model: PreTrainedModel, batch: Batch) -> Scores:
        autocast, has_entropy = self._settings.dtype == "bfloat16", self._settings.entropy_coef > 0.0
        return score_batch(model, batch, autocast=autocast, entropy_gradient=has_entropy)

    def _batches(self, samples: Sequence[Sample]) -> Iterator[Batch]:
        most = self._settings.max_tokens_per_microbatch or tokens_at_once(self.model)
        return build_batches(samples, max_tokens=most, costs=self._costs)

    @cached_property
    def _costs(self) -> Costs | None:
        """None = samples are plain rows: so wanted, or a model does not follow paths."""
        models = [self.model] if self.critic is None else [self.model, self.critic.model]
        follows = self._settings.share_prefixes and all(follows_paths(model) for model in models)
        return read_costs(self.model) if follows else None

    @contextlib.contextmanager
    def _training(self) -> Iterator[None]:
        """Learn in evaluation mode, so that ratios compare like with like; checkpointing alone wants training mode."""
        if self._settings.gradient_checkpointing:
            self.model.train()
        try:
            with torch.enable_grad():
                yield
        finally:
            self.model.eval()  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def _undone_on_error(self) -> Iterator[None]:
        """Weights and optimiser go back to where they were when a later update of the step fails."""
        if self._settings.epochs * self._settings.minibatches == 1:
            yield  # the only update is checked before it is made
            return
        changing: list[Learner | Critic] = [self] if self.critic is None else [self, self.critic]
        before = [
            (
                {name: parameter.detach().clone() for name, parameter in learner.parameters.items()},
                copy.deepcopy(learner.optimizer.state_dict()),
            )
            for learner in changing
        ]
        try:
            yield
        except BaseException:
            for learner, (weights, optimizer) in zip(changing, before, strict=True):
                with torch.no_grad():
                    for name, parameter in learner.parameters.items():
                        parameter.copy_(weights[name])
                learner.optimizer.load_state_dict(optimizer)
            raise

    def state(self) -> dict[str, Any]:
        """All but the weights."""
        critic = {} if self.critic is None else {"critic": self.critic.state()}
        return {
            "step": self.step,
            "rate": self.rate,
            "pace": self.pace,
            "settings": {"optimizer": self._settings.optimizer, "quantize": self._settings.quantize},
            "optimizer": self.optimizer.state_dict(),
            "random": self.random.getstate(),
            **critic,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""
        self.optimizer.load_state_dict(state["optimizer"])
        version, internal, gauss = state["random"]
        self.random.setstate((version, tuple(internal), gauss))
        self.step, self.pace = int(state["step"]), float(state.get("pace", 1.0))
        if self._settings.learning_rate == "auto":
            self.rate = float(state["rate"])
        if self.critic is not None:
            self.critic.load_state(state["critic"])


def _mean_metrics(totals: Mapping[str, float], epochs: int) -> dict[str, float]:
    """Metrics of a step: `loss`, `grad_norm` before clipping by update, and everything else by trained token.

    `trie_efficiency` = distinct tokens ÷ those computed.
    """
    apart = ("loss", "grad_norm", "updates", "tokens", "distinct", "computed")
    metrics = {
        name: value / totals["tokens"]
        for name, value in totals.items()
        if name not in apart and not name.startswith(_CRITIC)
    }
    metrics["loss"] = totals["loss"] / epochs
    metrics["grad_norm"] = totals["grad_norm"] / totals["updates"]
    metrics["trie_efficiency"] = totals["distinct"] / totals["computed"]
    sums = {name.removeprefix(_CRITIC): value for name, value in totals.items() if name.startswith(_CRITIC)}
    return metrics | _critic_metrics(sums, totals)


def _critic_metrics(sums: Mapping[str, float], totals: Mapping[str, float]) -> dict[str, float]:
    """Metrics of a critic: `value_loss` by target, its gradient's norm, and the share of the targets' variance that the
    values explain: 1 = all of it, 0 = no more than their mean would, below 0 = less."""
    if not (n := sums.get("n", 0.0)):
        return {}
    spread, missed = (sums[f"{name}²"] / n - (sums[name] / n) ** 2 for name in ("target", "miss"))
    metrics = {"value_loss": sums["loss"] / n, "value_grad_norm": sums["grad_norm"] / totals["updates"]}
    return metrics | ({"value_explained": 1.0 - missed / spread} if spread > _NO_SPREAD else {})


def _staleness(samples: Sequence[Sample], version: int) -> dict[str, float]:
    """Age of the trained tokens, in versions."""
    ages = version - np.concatenate([sample.versions[sample.mask] for sample in samples])
    return {"staleness_mean": float(ages.mean()), "staleness_max": float(ages.max())}
