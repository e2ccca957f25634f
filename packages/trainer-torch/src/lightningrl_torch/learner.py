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
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from lightningrl.credit.samples import teaching_rows
from lightningrl.errors import BackendError
from lightningrl.protocols import LearnReport
from lightningrl.types import Sample
from lightningrl_torch._models import read_traits
from lightningrl_torch._packing import Batch, build_batches
from lightningrl_torch._scoring import score_batch, to_tensor
from lightningrl_torch.chosen_loss import ChosenLoss
from lightningrl_torch.losses import TokenBatch, approximate_kl, truncated_importance
from lightningrl_torch.schedules import schedule_factor
from lightningrl_torch.settings import Settings

__all__ = ["Learner", "Reference"]

Reference = Callable[[], contextlib.AbstractContextManager[PreTrainedModel]]
"""Gives the model that the KL is measured to, for the time of a `with` block."""

_Recomputed = Mapping[int, NDArray[np.float32]]
"""By `id(sample)`: logprobs of its trained tokens under the policy before the step."""


class Learner:
    """Takes steps on the parameters of `model` that require gradients."""

    def __init__(self, model: PreTrainedModel, settings: Settings, *, reference: Reference | None = None) -> None:
        self.model = model
        self.step = 0
        """Calls of `learn` so far: the version of the weights."""
        self.random = random.Random(settings.seed)  # noqa: S311 - minibatch order, not secrets
        self._settings = settings
        self._reference = reference
        self._loss = ChosenLoss(settings.loss, settings.loss_arguments, has_reference=reference is not None)
        self._traits = read_traits(model, settings.policy)
        self.parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        groups = [
            {"params": [one for one in self.parameters.values() if one.ndim >= 2], "weight_decay": settings.weight_decay},
            {"params": [one for one in self.parameters.values() if one.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=settings.learning_rate,
            betas=(settings.betas[0], settings.betas[1]),
            fused=True,
        )

    def learn(self, samples: Sequence[Sample]) -> LearnReport:
        """All minibatches and epochs of one step; no step where no row has a part in the loss.

        Raises BackendError, with the weights as they were, when a number is not finite.
        """
        started = time.monotonic()
        settings = self._settings
        _check(samples, self._traits.vocabulary)
        if self._reference is None and not self._loss.has_other_terms:
            samples = teaching_rows(samples)
            if not samples:
                return LearnReport(policy_version=self.step, tokens=0, seconds=time.monotonic() - started)
        rate = settings.learning_rate * schedule_factor(
            settings.schedule,
            self.step,
            warmup_steps=settings.warmup_steps,
            total_steps=settings.total_steps,
            minimum=settings.minimum_factor,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        totals: dict[str, float] = defaultdict(float)
        with self._training(), self._undone_on_error():
            recomputed = self.recompute(samples, self.model) if settings.importance_cap is not None else None
            for _ in range(settings.epochs):
                minibatches = self._deal(samples)
                for minibatch in minibatches:
                    self._update(minibatch, len(minibatches), recomputed, totals)
        self.step += 1
        tokens = sum(int(sample.mask.sum()) for sample in samples)
        metrics = {**_means(totals, settings.epochs), **_staleness(samples, self.step - 1), "lr": rate}
        return LearnReport(policy_version=self.step, tokens=tokens, seconds=time.monotonic() - started, metrics=metrics)

    def gradients(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        """The loss's gradient by parameter name, without a step; for tests and diagnosis."""
        with self._training():
            self._backward(samples, 1.0, None, defaultdict(float))
        found = {name: parameter.grad.clone() for name, parameter in self.parameters.items() if parameter.grad is not None}
        self.optimizer.zero_grad(set_to_none=True)
        return found

    def _update(self, samples: Sequence[Sample], minibatches: int, recomputed: _Recomputed | None, totals: dict[str, float]) -> None:
        """One optimiser update."""
        self.optimizer.zero_grad(set_to_none=True)  # what an update that raised has left
        loss = self._backward(samples, float(minibatches), recomputed, totals)
        settings = self._settings
        limit = settings.max_grad_norm or math.inf
        norm = float(torch.nn.utils.clip_grad_norm_(list(self.parameters.values()), limit))
        if not math.isfinite(loss) or not math.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)
            raise BackendError(
                f"step {self.step + 1}: loss {settings.loss!r} is {loss:g} and its gradient's norm {norm:g}; the weights stay at version "
                f"{self.step}; lower the learning rate or look at this step's rewards"
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        totals["loss"] += loss
        totals["grad_norm"] += norm
        totals["updates"] += 1.0

    def _backward(self, samples: Sequence[Sample], scale: float, recomputed: _Recomputed | None, totals: dict[str, float]) -> float:
        """Add up the gradient of `scale` times the samples' loss; return the unscaled loss."""
        total = 0.0
        for batch in self._batches(samples):
            loss, sums = self._sum_losses(batch, recomputed)
            (loss * scale).backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
            for name, value in sums.items():
                totals[name] += float(value)
            totals["tokens"] += float(len(batch.targets))
        return total

    def _sum_losses(self, batch: Batch, recomputed: _Recomputed | None) -> tuple[Tensor, dict[str, Tensor]]:
        """Σ weights · token_loss of a batch, and sums over its trained tokens for the metrics."""
        settings, model = self._settings, self.model
        logprobs, entropies = self._score(model, batch)
        rollout_logprobs, advantages = to_tensor(batch.logprobs, model), to_tensor(batch.advantages, model)
        old_logprobs = rollout_logprobs
        if recomputed is not None:
            old_logprobs = to_tensor(np.concatenate([recomputed[id(sample)] for sample in batch.samples]), model)
        reference_logprobs = None
        if self._reference is not None:
            with torch.no_grad(), self._reference() as reference:
                reference_logprobs, _ = self._score(reference, batch)
        found = self._loss(
            TokenBatch(
                logprobs=logprobs,
                old_logprobs=old_logprobs,
                rollout_logprobs=rollout_logprobs,
                reference_logprobs=reference_logprobs,
                advantages=advantages,
                calls=to_tensor(batch.calls, model),
            )
        )
        token_loss = found.losses
        to_rollout = logprobs.detach() - rollout_logprobs
        sums = {
            "kl_rollout": approximate_kl(to_rollout).sum(),
            "ratio": to_rollout.exp().sum(),
            "entropy": entropies.sum(),
            **{name: values.detach().sum() for name, values in found.metrics.items()},
        }
        if settings.importance_cap is not None and recomputed is not None:
            importance = truncated_importance(old_logprobs - rollout_logprobs, settings.importance_cap)
            token_loss = token_loss * importance
            sums["importance"] = importance.sum()
        if reference_logprobs is not None:
            divergence = approximate_kl(reference_logprobs - logprobs)
            token_loss = token_loss + settings.kl_coef * divergence
            sums["kl_reference"] = divergence.detach().sum()
        return (to_tensor(batch.weights, model) * token_loss).sum(), sums

    def recompute(self, samples: Sequence[Sample], model: PreTrainedModel) -> _Recomputed:
        """Logprobs of the samples' trained tokens, by `id(sample)`, of the policy or its reference."""
        _check(samples, self._traits.vocabulary)
        found: dict[int, NDArray[np.float32]] = {}
        for batch in self._batches(samples):
            with torch.no_grad():
                logprobs = self._score(model, batch)[0].cpu().numpy()
            ends = np.cumsum([int(sample.mask.sum()) for sample in batch.samples])
            for sample, part in zip(batch.samples, np.split(logprobs, ends[:-1]), strict=True):
                found[id(sample)] = part
        return found

    def _score(self, model: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor]:
        return score_batch(model, self._traits, batch, autocast=self._settings.dtype == "bfloat16")

    def _batches(self, samples: Sequence[Sample]) -> Iterator[Batch]:
        return build_batches(
            samples,
            max_tokens=self._settings.max_tokens_per_microbatch,
            share_prefixes=self._settings.share_prefixes and self._traits.explicit_masks,
        )

    def _deal(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        """Rollouts at random to minibatches of about the same size; a rollout's rows stay together."""
        if self._settings.minibatches == 1:
            return [list(samples)]
        by_rollout: dict[str, list[Sample]] = {}
        for sample in samples:
            by_rollout.setdefault(sample.rollout_id, []).append(sample)
        rollouts = list(by_rollout.values())
        self.random.shuffle(rollouts)
        count = min(self._settings.minibatches, len(rollouts))
        return [[sample for rollout in rollouts[start::count] for sample in rollout] for start in range(count)]

    @contextlib.contextmanager
    def _training(self) -> Iterator[None]:
        """Evaluation mode also while learning, so that ratios compare like with like; checkpointing alone wants training mode."""
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
        weights = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        optimizer = copy.deepcopy(self.optimizer.state_dict())
        try:
            yield
        except BaseException:
            with torch.no_grad():
                for name, parameter in self.parameters.items():
                    parameter.copy_(weights[name])
            self.optimizer.load_state_dict(optimizer)
            raise

    def state(self) -> dict[str, Any]:
        """All but the weights."""
        return {"step": self.step, "optimizer": self.optimizer.state_dict(), "random": self.random.getstate()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""
        self.optimizer.load_state_dict(state["optimizer"])
        version, internal, gauss = state["random"]
        self.random.setstate((version, tuple(internal), gauss))
        self.step = int(state["step"])


def _check(samples: Sequence[Sample], vocabulary: int) -> None:
    """Raise BackendError for samples that cannot be trained on."""
    if not any(sample.mask.any() for sample in samples):
        raise BackendError(f"none of {len(samples)} samples has a trained token; skip the step")
    for sample in samples:
        if not len(sample.token_ids):
            raise BackendError(f"a sample of rollout {sample.rollout_id!r} has no tokens; leave it out")
        if sample.mask[0]:
            raise BackendError(
                f"a sample of rollout {sample.rollout_id!r} trains its first token, which nothing predicts; start with a prompt"
            )
        if sample.token_ids.min() < 0 or sample.token_ids.max() >= vocabulary:
            raise BackendError(
                f"a sample of rollout {sample.rollout_id!r} has token ids outside 0..{vocabulary - 1}; another policy sampled it"
            )
        for name in ("logprobs", "advantages", "weights", "temperatures"):
            if not np.isfinite(getattr(sample, name)).all():
                raise BackendError(f"a sample of rollout {sample.rollout_id!r} has {name} that are not finite; check rewards and credit")


def _means(totals: Mapping[str, float], epochs: int) -> dict[str, float]:
    """`loss` of the step, `grad_norm` before clipping by update, everything else by trained token."""
    apart = ("loss", "grad_norm", "updates", "tokens")
    metrics = {name: value / totals["tokens"] for name, value in totals.items() if name not in apart}
    metrics["loss"] = totals["loss"] / epochs
    metrics["grad_norm"] = totals["grad_norm"] / totals["updates"]
    return metrics


def _staleness(samples: Sequence[Sample], version: int) -> dict[str, float]:
    """How many versions old the trained tokens are."""
    ages = version - np.concatenate([sample.versions[sample.mask] for sample in samples])
    return {"staleness_mean": float(ages.mean()), "staleness_max": float(ages.max())}
