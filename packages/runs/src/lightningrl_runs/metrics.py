"""A run's numbers, read: `metrics.jsonl`, one JSON object per line; and what each of them means, for the page Run and
the reference.

{"step": 3, "time": 1763690000.5, "reward": 0.41, "minutes": 0.7}

find_metric("learn/entropy") ─► Metric(title="Entropy", group=EXPLORATION, unit="nats", means="…", healthy="…")
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Literal

from lightningrl.errors import RunFolderError

__all__ = ["METRICS", "Metric", "MetricGroup", "find_metric", "read_lines", "read_metrics", "read_rows"]


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """The metrics of a run's folder as `read_metrics` gives them, read anew when they change; empty where there are
    none."""
    path = folder / "metrics.jsonl"
    try:
        stat = path.stat()
    except OSError:
        return []
    return _read_cached(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=64)
def _read_cached(path: Path, _changed: int, _size: int) -> list[dict[str, Any]]:
    return read_metrics(path)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The metrics by step, in order: lines of one step are joined, the last value of a name counts; null values are
    left out.

    An unfinished last line is skipped. Raises RunFolderError naming a broken line.
    """
    steps: dict[int, dict[str, Any]] = {}
    for step, _, entry in read_lines(path):
        steps.setdefault(step, {}).update({name: value for name, value in entry.items() if value is not None})
    return [steps[step] for step in sorted(steps)]


def read_lines(path: Path) -> Iterator[tuple[int, bytes, dict[str, Any]]]:
    """Finished lines: each one's step, its bytes, and what it says. Raises RunFolderError naming a broken one."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n") and line.strip():
                try:
                    entry = json.loads(line)
                    yield int(entry["step"]), line, entry
                except (ValueError, KeyError, TypeError, RecursionError) as error:
                    raise RunFolderError(
                        f"line {number} of {str(path)!r} is no metrics entry: {error!r}; remove it"
                    ) from error


Unit = Literal["number", "share", "tokens", "tokens/s", "seconds", "bytes", "nats"]


class MetricGroup(StrEnum):
    """Part of the page on which a metric is drawn."""

    REWARD = "Reward"
    LEARNING = "Learning"
    EXPLORATION = "Exploration"
    LENGTHS = "Lengths"
    HEALTH = "Health"
    SPEED = "Speed"
    MEMORY = "Memory"
    OTHERS = "Others"


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """A number that steps have."""

    name: str
    """Name in `metrics.jsonl`; `reward/*` stands for all that begin so; of `learn/loss` and its like a policy's name
    may stand after `learn/`."""
    title: str
    group: MetricGroup
    unit: Unit = "number"
    means: str
    healthy: str = ""
    """Range or course that it has in a run that goes well, in a sentence; empty where there is none to name."""
    over: str | None = None
    """Metric that it is drawn divided by: of what is counted in a step, the share or the mean of a rollout."""


_R, _L, _E, _N, _H, _S, _M = tuple(MetricGroup)[:7]

METRICS: Final[tuple[Metric, ...]] = (
    Metric(
        name="reward", title="Reward", group=_R,
        means="Mean reward of the step's rollouts, at the sampling temperature; what the policy broke earns the least.",
        healthy="It rises, then stays; noise from step to step is the tasks' own.",
    ),
    Metric(
        name="validation/reward", title="Validation", group=_R,
        means="Mean reward of the held-out tasks; an agent's own failures earn the least there is.",
        healthy="It rises with the training reward; where it falls alone, the policy learns the tasks by heart.",
    ),
    Metric(
        name="reward/*", title="Reward", group=_R,
        means="Mean of one of the rewards that the reward is made of, before its weight.",
        healthy="All rise; one that rises while the others fall is being exploited.",
    ),
    Metric(
        name="air/*", title="Intermediate reward", group=_R,
        means="Pay of a rollout's calls by an intermediate reward.",
        healthy="It rises with the outcome; alone it is being farmed.",
    ),
    Metric(
        name="air/correlation", title="Intermediate and outcome", group=_R,
        means="Correlation of the intermediate rewards with the outcome, over the step's rollouts.",
        healthy="Above 0.",
    ),
    Metric(
        name="learn/loss", title="Loss", group=_L,
        means="Loss of the policy, as the recipe's learner.loss has it.",
        healthy="Near 0 and without a trend: in reinforcement learning it says nothing of progress; the reward does.",
    ),
    Metric(
        name="learn/kl_rollout", title="KL to the sampler", group=_L, unit="nats",
        means="Distance of the trainer's probabilities of the sampled tokens from the engine's, per token.",
        healthy="Below 0.01 on-policy; from 0.1 on the two do not compute alike, or the rows are old.",
    ),
    Metric(
        name="learn/kl_reference", title="KL to the reference", group=_L, unit="nats",
        means="Distance of the policy from the weights that it began with, per token (learner.kl_coef).",
        healthy="It grows slowly; a jump is a step that was too large.",
    ),
    Metric(
        name="learn/grad_norm", title="Gradient norm", group=_L,
        means="Length of the gradient before it is clipped, mean over the step's updates.",
        healthy="Within a factor of ten from step to step; peaks far above learner.max_grad_norm ask for a lower "
        "learning rate.",
    ),
    Metric(
        name="learn/lr", title="Learning rate", group=_L,
        means="Learning rate of the step, warm-up and schedule in it.",
        healthy="2e-6 for all weights of 135 million parameters, 3e-4 for adapters, 1e-3 for starters.",
    ),
    Metric(
        name="learn/clip_fraction", title="Clipped tokens", group=_L, unit="share",
        means="Tokens whose ratio to the sampled probability was clipped.",
        healthy="0 in the first update of an on-policy step; below 20 %.",
    ),
    Metric(
        name="learn/dual_clip_fraction", title="Tokens clipped twice", group=_L, unit="share",
        means="Tokens of negative advantage whose loss met the second bound.", healthy="Below 1 %.",
    ),
    Metric(
        name="learn/ratio", title="Ratio to the sampler", group=_L,
        means="Mean ratio of the trainer's probability of a token to the engine's.", healthy="0.99 to 1.01 on-policy.",
    ),
    Metric(
        name="learn/importance", title="Importance weight", group=_L,
        means="Mean weight that corrects for older or other weights of the sampler.", healthy="0.9 to 1.1.",
    ),
    Metric(
        name="learn/masked", title="Tokens left out", group=_L, unit="share",
        means="Tokens that importance_mask or sequence_mask leaves out, for their ratio or their call's.",
        healthy="A few percent at most.",
    ),
    Metric(
        name="learn/probability_gap_max", title="Largest probability gap", group=_L,
        means="Largest difference between trainer and engine in a token's probability.", healthy="Below 0.1.",
    ),
    Metric(
        name="learn/value_loss", title="Critic's loss", group=_L,
        means="Loss of the critic, by target.", healthy="It falls within the first tens of steps.",
    ),
    Metric(
        name="learn/value_explained", title="Explained by the critic", group=_L, unit="share",
        means="Share of the returns' variance that the critic explains; below 0 it is worse than their mean.",
        healthy="It rises towards 1; above 0.3 the critic helps.",
    ),
    Metric(
        name="learn/value_grad_norm", title="Critic's gradient norm", group=_L,
        means="Length of the critic's gradient before it is clipped.", healthy="As the policy's.",
    ),
    Metric(
        name="learn/entropy", title="Entropy", group=_E, unit="nats",
        means="Uncertainty of the policy, per sampled token: near 0 it no longer tries anything else.",
        healthy="It falls slowly; below a tenth of its beginning while the reward is low, the policy has stopped "
        "exploring: lower the learning rate, or set learner.entropy_coef.",
    ),
    Metric(
        name="groups_without_signal", title="Groups without signal", group=_E, unit="share", over="groups",
        means="Groups whose rollouts all earned the same: nothing is learned from them.",
        healthy="Below 50 %; at first tasks are too hard, at last too easy.",
    ),
    Metric(
        name="completion_tokens", title="Tokens of a rollout", group=_N, unit="tokens", over="rollouts",
        means="Tokens that the policy sampled in a rollout, over all its calls.",
        healthy="Without a jump; growth without reward is rambling, a fall to a few tokens is giving up.",
    ),
    Metric(
        name="prompt_tokens", title="Prompt tokens of a rollout", group=_N, unit="tokens", over="rollouts",
        means="Tokens that the policy read in a rollout, over all its calls.", healthy="Well below the context.",
    ),
    Metric(
        name="calls_per_rollout", title="Calls of a rollout", group=_N,
        means="Calls of policies in a rollout.", healthy="As many as the agent's work needs.",
    ),
    Metric(
        name="trained_tokens", title="Trained tokens", group=_N, unit="tokens",
        means="Tokens of the step that had an advantage, in rows of the learner.",
    ),
    Metric(
        name="outcome/succeeded", title="Rollouts that ended well", group=_H, unit="share", over="rollouts",
        means="Rollouts that ended without an error or a time-out, whatever they earned.", healthy="Above 95 %.",
    ),
    Metric(
        name="failures/*", title="Rollouts that failed", group=_H, unit="share",
        means="Rollouts that ended so: an error of the agent, a time-out or too long a context earn the lowest reward; "
        "an infrastructure error teaches nothing.",
        healthy="Near 0, and it falls; growth means that the policy breaks its agent.",
    ),
    Metric(
        name="breaks", title="Breaks", group=_H, over="rollouts",
        means="Calls of a rollout whose messages go on from an earlier call while their tokens do not: the history was "
        "rendered anew.",
        healthy="0; a break costs memory and time, and splits the rollout's row.",
    ),
    Metric(
        name="malformed_tool_calls", title="Malformed tool calls", group=_H, unit="share",
        means="Answers that begin a tool call which cannot be read, of those that were offered tools.",
        healthy="Under 5 %, and it falls; `malformed_calls` charges for it.",
    ),
    Metric(
        name="calls_refused", title="Refused calls", group=_H, over="rollouts",
        means="Calls of a rollout that the gateway answered with an error.", healthy="0.",
    ),
    Metric(
        name="rewards_failed", title="Failed rewards", group=_H, unit="share", over="rollouts",
        means="Rollouts on which a reward or a judge failed after all its tries. Where it works on other outputs, they "
        "count as the lowest reward, else they are left out.",
        healthy="0.",
    ),
    Metric(
        name="learn/staleness_max", title="Staleness", group=_H,
        means="Versions between the weights that sampled a token and those that learn from it, at most.",
        healthy="0 on-policy, else at most loop.max_staleness.",
    ),
    Metric(
        name="staleness_slow", title="Staleness of the slowest", group=_H,
        means="Versions between sampling and learning, the mean of the quarter of rollouts that took the longest.",
        healthy="At most loop.max_staleness; near it, steps wait for slow tasks.",
    ),
    Metric(
        name="tokens_per_second", title="Tokens a second", group=_S, unit="tokens/s",
        means="Tokens sampled for each second of collecting, over all rollouts at once.",
        healthy="Steady; a fall means longer prompts, fewer rollouts at once, or a busy machine.",
    ),
    Metric(
        name="seconds", title="Seconds of a step", group=_S, unit="seconds",
        means="Time of the step; below it what it was spent on.", healthy="Steady; it grows with the lengths.",
    ),
    Metric(
        name="learn/trie_efficiency", title="Tokens computed once", group=_S, unit="share",
        means="Different tokens of the rows, of those that the learner computed: what rows share is computed once.",
        healthy="Near 1.",
    ),
    Metric(
        name="memory/*", title="Memory", group=_M, unit="bytes",
        means="Resident memory of the trainer, of the server and of the workers together, at the end of the step.",
        healthy="Level after the first steps; steady growth is a leak.",
    ),
    Metric(
        name="learn/gpu_memory_peak", title="GPU memory", group=_M, unit="bytes",
        means="Most memory of the GPU that was in use while the policy learned.",
        healthy="Below nine tenths of what the GPU has (learn/gpu_memory).",
    ),
)  # fmt: skip
"""Every metric with a meaning of its own, in the order in which they are drawn."""

HIDDEN: Final = frozenset(
    {
        "step", "time", "minutes", "rollouts", "groups", "rows", "policy_version", "hooks_failed",
        "rollouts_unrewarded", "seconds_collect", "seconds_reward", "seconds_credit", "seconds_learn",
        "learn/staleness_mean", "learn/gpu_memory_before", "learn/gpu_memory", "forecast_step_seconds", "went_back_to",
    }
)  # fmt: skip
"""Metrics that are no curve of their own: they are in another's, or in the table of steps."""


@lru_cache(maxsize=4096)
def find_metric(name: str) -> Metric | None:
    """Return what is known of a metric: `learn/entropy`, `learn/writer/entropy`, `reward/right`; None = nothing."""
    by_name = {metric.name: metric for metric in METRICS}
    room, _, last = name.rpartition("/")
    whole = f"learn/{last}" if room.startswith("learn/") else name
    return by_name.get(whole) or by_name.get(f"{name.partition('/')[0]}/*")
