"""Everything that knows verl's row format: samples in, TransferQueue rows and tags out.

    sample   [prompt | first trained token … last token]   mask, logprobs, advantages, weights: one per token
    row      prompts │ responses                            response_mask, rollout_log_probs, rm_scores: one per
                                                            token of the response

verl 0.9 (docs/extend_guide.rst, "Agent Framework Developer"; trainer/ppo/v1/replay_buffer.py): a row's key is
`{prompt}_{session}_{index}`, the prompt's own key carries the status, and a prompt's name has no underscore. A step of
ours is one prompt; a session is one rollout.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from lightningrl.advantages import teaching_rows
from lightningrl.errors import BackendError
from lightningrl.types import Sample
from lightningrl_verl.settings import Settings

__all__ = ["Rows", "build_rows", "choose_samples", "row_weights", "separate_calls"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Rows of one learning step, as they go into TransferQueue."""

    keys: list[str]
    fields: list[dict[str, Any]]
    """One table of tensors a row."""
    tags: list[dict[str, Any]]
    temperature: float
    """Temperature of all sampled tokens; verl has one a batch."""


def choose_samples(samples: Iterable[Sample], settings: Settings) -> list[Sample]:
    """The samples that verl's loss needs: those with an advantage, and all of them where the loss has other terms.

    Where verl averages, all of them too if one has an advantage: weights, 1 / all tokens, and verl's division cancel.
    """
    rows = list(samples)
    teaching = teaching_rows(rows)
    return rows if settings.learns_silent_rows or (teaching and settings.is_averaged) else teaching


def row_weights(sample: Sample, scale: float, *, as_reward: bool) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Numbers of a row in `rm_scores`, one per token.

    Credit: `scale` · weight · advantage on each trained token; the losses are linear in it. As a reward (PPO's critic):
    the advantage of the last trained token, there alone, unweighted.
    """
    if not as_reward:
        return (sample.weights * sample.advantages * np.float32(scale)).astype(np.float32)
    reward = np.zeros_like(sample.advantages)
    last = np.flatnonzero(sample.mask)[-1]
    reward[last] = sample.advantages[last]
    return reward


def build_rows(
    samples: Sequence[Sample], prompt: str, step: int, *, scale: float = 1.0, as_reward: bool = False
) -> Rows:
    """Rows of a learning step. `step`: the weights' next version. Raises BackendError for samples verl cannot train."""
    sessions: dict[str, int] = {}
    counts: dict[str, int] = {}
    rows = Rows(keys=[], fields=[], tags=[], temperature=_temperature(samples))
    for sample in itertools.chain.from_iterable(map(separate_calls, samples)):
        session = sessions.setdefault(sample.rollout_id, len(sessions))
        index = counts.get(sample.rollout_id, 0)
        counts[sample.rollout_id] = index + 1
        start = _first_trained(sample)
        values = row_weights(sample, scale, as_reward=as_reward)
        rows.keys.append(f"{prompt}_{session}_{index}")
        rows.fields.append(_fields(sample, start, values, prompt=prompt, session=session))
        versions = sample.versions[sample.mask]
        rows.tags.append(
            {
                "status": "success",
                "prompt_len": start,
                "response_len": len(sample.token_ids) - start,
                "seq_len": len(sample.token_ids),
                "global_steps": step,
                "min_global_steps": int(versions.min()),
                "max_global_steps": int(versions.max()),
            }
        )
    return rows


def separate_calls(sample: Sample) -> list[Sample]:
    """The sample as rows with something between two calls: verl's losses see the mask alone, and calls by its gaps.

    mask    ··████··████████··    two calls meet       rows    ··████··████······
    calls     0000  11112222                                   ············2222··
    """
    meet = sample.mask[1:] & sample.mask[:-1] & (sample.calls[1:] != sample.calls[:-1])
    if not meet.any():
        return [sample]
    side = np.cumsum(np.concatenate(([False], meet))) % 2
    return [_train_only(sample, sample.mask & (side == number)) for number in (0, 1)]


def _train_only(sample: Sample, mask: np.ndarray[Any, np.dtype[np.bool_]]) -> Sample:
    elsewhere = {"logprobs": 0.0, "advantages": 0.0, "weights": 0.0, "versions": -1, "calls": -1, "temperatures": 1.0}
    arrays = {
        name: np.where(mask, getattr(sample, name), value).astype(getattr(sample, name).dtype)
        for name, value in elsewhere.items()
    }
    return replace(sample, mask=mask, **arrays)  # type: ignore[arg-type]


def _fields(sample: Sample, start: int, values: np.ndarray[Any, Any], *, prompt: str, session: int) -> dict[str, Any]:
    token_ids = torch.from_numpy(sample.token_ids.astype(np.int64))
    mask = torch.from_numpy(sample.mask[start:].astype(np.int64))
    return {
        "prompts": token_ids[:start],
        "responses": token_ids[start:],
        "response_mask": mask,
        "loss_mask": mask.clone(),
        "input_ids": token_ids,
        "position_ids": torch.arange(len(token_ids)),
        "rollout_log_probs": torch.from_numpy(sample.logprobs[start:].astype(np.float32)),
        "rm_scores": torch.from_numpy(values[start:].astype(np.float32)),
        "num_turns": 1,
        "uid": prompt,
        "session_id": session,
        "data_source": "lightningrl",
        "reward_model": {"ground_truth": ""},
        "multi_modal_inputs": {},
        "extra_fields": {},
    }


def _first_trained(sample: Sample) -> int:
    trained = np.flatnonzero(sample.mask)
    if not len(trained):
        raise BackendError(f"a sample of rollout {sample.rollout_id!r} has no trained token; leave it out")
    if trained[0] == 0:
        raise BackendError(
            f"a sample of rollout {sample.rollout_id!r} trains its first token, which nothing predicts; start with a "
            "prompt"
        )
    for name in ("logprobs", "advantages", "weights"):
        if not np.isfinite(getattr(sample, name)).all():
            raise BackendError(
                f"a sample of rollout {sample.rollout_id!r} has {name} that are not finite; check rewards and credit"
            )
    return int(trained[0])


def _temperature(samples: Sequence[Sample]) -> float:
    if not samples:
        raise BackendError("no samples to learn from; skip the step")
    temperatures = {float(value) for sample in samples for value in np.unique(sample.temperatures[sample.mask])}
    if len(temperatures) > 1:
        raise BackendError(
            f"samples of temperatures {sorted(temperatures)} in one step; verl computes logprobs at one temperature, "
            "so sample all trained calls alike"
        )
    return temperatures.pop() if temperatures else 1.0
