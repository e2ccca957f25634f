"""Predicted memory of the whole run, by what for: what was measured here, and what each policy's plan adds to it.

processes   measured once all is served, less the weights                     Python, libraries, server, workers
rollouts    processes + weights + Adam's moments + packed weights
            + keys and values                                                 measured here + plan(run) - plan(tried)
a step      processes + weights + Adam's moments + gradient + activations + logits
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from lightningrl.backends import MemoryPlan
from lightningrl.machine import gigabytes
from lightningrl_training.doctor.observation import Observation
from lightningrl_training.memory_check import shared_bytes

__all__ = ["MemoryBill", "plan_run", "step_tokens"]

LARGE: Final = 2e8
"""Bytes of weights from which on the engine gives keys and values back before a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryBill:
    """Bytes of a run, by what for."""

    processes: int
    """Python, its libraries, server and workers."""
    weights: int
    """Copies included."""
    optimizer: int
    gradient: int
    activations: int
    logits: int
    packed: int
    """Weights that stand a second time while several calls are decoded."""
    key_values: int
    """Memory of running calls and remembered prompts, and what the C library keeps of it."""
    keeps_key_values: bool
    """A step has them and the packed weights, too: of a small policy."""

    @property
    def always(self) -> int:
        return self.processes + self.weights + self.optimizer

    @property
    def rollouts(self) -> int:
        """Peak while rollouts run."""
        return self.always + self.packed + self.key_values

    @property
    def step(self) -> int:
        """Peak of a step of the learner."""
        beside = self.packed + self.key_values if self.keeps_key_values else 0
        return self.always + self.gradient + self.activations + self.logits + beside

    @property
    def peak(self) -> int:
        return max(self.rollouts, self.step)

    @property
    def parts(self) -> dict[str, int]:
        """Each part by its name."""
        names = ("processes", "weights", "optimizer", "gradient", "activations", "logits", "packed", "key_values")
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        packed = f"{gigabytes(self.packed)} weights in the order of decoding + " if self.packed else ""
        return (
            f"{gigabytes(self.weights)} weights + {gigabytes(self.optimizer)} Adam's moments + "
            f"{gigabytes(self.processes)} Python, libraries, server and workers, always; + "
            f"{packed}{gigabytes(self.key_values)} keys and values in rollouts: {gigabytes(self.rollouts)}; + "
            f"{gigabytes(self.gradient)} gradient + {gigabytes(self.activations)} activations + "
            f"{gigabytes(self.logits)} logits in a step: {gigabytes(self.step)}"
        )


def plan_run(seen: Observation, *, longer: float = 1.0) -> MemoryBill | None:
    """Predict the memory of the run; None where no policy is planned on this machine's memory, or it does not say what
    is used. `longer`: prompts of the run's end, in multiples of those tried."""
    plans = {name: plan for name, plan in seen.plans.items() if not plan.on_gpu}
    if not plans or seen.memory_idle is None:
        return None
    weights = sum(plan.weights for plan in plans.values()) - shared_bytes(plans)
    here, whole = _key_values(seen, plans, longer)
    packed = sum(plan.packed for plan in plans.values())
    grown = max(0, (seen.memory_rollouts or 0) - seen.memory_idle - packed)
    prompts, completions = step_tokens(seen)
    tokens = prompts * max(1.0, longer) + completions
    largest = max(plans.values(), key=lambda plan: plan.activations(tokens))
    return MemoryBill(
        processes=max(0, seen.memory_idle - weights),
        weights=weights + sum(plan.copies for plan in plans.values()),
        optimizer=sum(plan.optimizer for plan in plans.values()),
        gradient=sum(plan.gradient for plan in plans.values()),
        activations=largest.activations(tokens),
        logits=largest.logits(completions),
        packed=packed,
        key_values=int(grown + max(0.0, whole - here)),
        keeps_key_values=weights < LARGE,
    )


def _key_values(seen: Observation, plans: Mapping[str, MemoryPlan], longer: float) -> tuple[float, float]:
    """Planned bytes of keys and values: here, and in the run, whose further calls ask what no other has asked."""
    loop, runtime = seen.recipe.loop, seen.recipe.runtime
    most = max(1, runtime.workers * runtime.concurrency)
    wave = loop.tasks_per_step * loop.group_size
    held_out = len(seen.tasks.validation) if seen.recipe.validation.every else 0
    here = whole = 0.0
    for name, plan in plans.items():
        calls = [call for rollout in seen.tried for call in rollout.transitions if call.policy == name]
        if not calls:
            continue
        longest = max(len(call.prompt_ids) + len(call.completion_ids) for call in calls)
        prompts = sum(len(call.prompt_ids) for call in calls) / len(seen.tried)
        different = sum(map(len, {tuple(call.prompt_ids.tolist()) for call in calls}))  # one that comes again is there
        each = different / len(seen.tried) + max(0.0, longer - 1.0) * prompts
        here += plan.caches(min(most, wave), longest, different)
        whole += plan.caches(min(most, max(wave, held_out)), longest, int(each * (wave + held_out)))
    return here, whole


def step_tokens(seen: Observation) -> tuple[float, float]:
    """Different tokens of prompts and of completions in the rows of the run's largest step: a group's prompts are read
    once, and a group without an advantage has no rows."""
    loop = seen.recipe.loop
    calls = [call for rollout in seen.rollouts for call in rollout.transitions]
    rollouts = _most_groups(seen) * loop.group_size / max(1, len(seen.rollouts))
    prompts = sum(len(call.prompt_ids) / loop.group_size for call in calls)
    return rollouts * prompts, rollouts * sum(len(call.completion_ids) for call in calls)


def _most_groups(seen: Observation) -> float:
    """Groups with an advantage in the step that has the most of them, as is to be expected of the share that was seen:
    the greatest of `loop.steps` draws of a binomial distribution, at least one group."""
    loop = seen.recipe.loop
    signals = [signal for step in seen.steps for signal in step.signals]
    if loop.dynamic_sampling or not signals or all(signals):
        return loop.tasks_per_step
    share = (sum(signals) + 1) / (len(signals) + 2)  # of few groups it is known badly (Laplace)
    below = most = 0.0
    for count in range(loop.tasks_per_step):
        ways = math.comb(loop.tasks_per_step, count)
        below += ways * share**count * (1 - share) ** (loop.tasks_per_step - count)
        most += 1 - below ** max(1, loop.steps)  # E[max] = Σ P(max > count)
    return max(1.0, most)
