"""Samples become verl's rows token for token; what a row weighs does not depend on how many there are."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch

from lightningrl.errors import BackendError
from lightningrl.types import Sample, TrajectoryGroup
from lightningrl_credit.samples import build_samples
from lightningrl_testing.groups import make_trajectory, make_transition
from lightningrl_torch.testing import make_sample
from lightningrl_verl.rows import build_rows, choose_samples, row_weights, separate_calls
from lightningrl_verl.settings import Settings


def make_group() -> tuple[TrajectoryGroup, tuple[tuple[np.ndarray | None, ...], ...]]:
    """Two rollouts: one of three calls that grow from each other, one of a single call; each call has its own
    advantage."""
    first = make_transition("a/0", prompt=(1, 2), completion=(3, 4))
    second = make_transition("a/1", prompt=(1, 2, 3, 4, 5), completion=(6,), parent="a/0")
    third = make_transition("a/2", prompt=(1, 2, 3, 4, 5, 6, 7), completion=(8, 9, 10), parent="a/1")
    alone = make_transition("b/0", prompt=(1, 2), completion=(11, 12))
    group = TrajectoryGroup(
        id="g",
        trajectories=(
            make_trajectory("a", [first, second, third], reward=1.0),
            make_trajectory("b", [alone], reward=0.0),
        ),
    )
    advantages = tuple(
        tuple(
            np.full(len(call.completion_ids), value, np.float32)
            for call, value in zip(trajectory.transitions, values, strict=True)
        )
        for trajectory, values in zip(group.trajectories, ((1.0, -2.0, 3.0), (-4.0,)), strict=True)
    )
    return group, advantages


def samples(rows: str, aggregation: str = "rollout_mean") -> list[Sample]:
    group, advantages = make_group()
    return build_samples([group], [advantages], rows=rows, aggregation=aggregation)  # type: ignore[arg-type]


def credit_of_tokens(rows_as: str, aggregation: str) -> dict[str, dict[int, float]]:
    """What verl's rows say: by rollout, each trained token's credit (token ids are unique here)."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    built = build_rows(samples(rows_as, aggregation), "step", 1)
    for key, fields in zip(built.keys, built.fields, strict=True):
        for token, sampled, value in zip(
            fields["responses"], fields["response_mask"], fields["rm_scores"], strict=True
        ):
            if sampled:
                assert int(token) not in found[key.split("_")[1]], "each sampled token is trained in exactly one row"
                found[key.split("_")[1]][int(token)] = float(value)
            else:
                assert float(value) == 0.0
    return found


@pytest.mark.parametrize("aggregation", ["rollout_mean", "token_mean"])
def test_a_rollout_weighs_the_same_however_many_rows_it_becomes(aggregation: str) -> None:
    by_call, merged = credit_of_tokens("call", aggregation), credit_of_tokens("merged", aggregation)
    assert len(samples("call")) == 4
    assert len(samples("merged")) == 2
    assert by_call == merged


def test_each_call_gets_its_own_advantage() -> None:
    credit = credit_of_tokens("merged", "rollout_mean")
    weight = 1 / (2 * 6)  # two rollouts, six trained tokens in the first
    expected = {3: 1.0, 4: 1.0, 6: -2.0, 8: 3.0, 9: 3.0, 10: 3.0}
    assert credit["0"] == pytest.approx({token: weight * value for token, value in expected.items()})
    assert credit["1"] == pytest.approx({11: -4.0 / (2 * 2), 12: -4.0 / (2 * 2)})


def test_a_row_is_the_sample_token_for_token() -> None:
    sample = samples("merged")[0]
    built = build_rows([sample], "step", 7)
    fields = built.fields[0]
    assert built.keys == ["step_0_0"]
    assert torch.equal(torch.cat((fields["prompts"], fields["responses"])), fields["input_ids"])
    assert fields["input_ids"].tolist() == sample.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert fields["response_mask"].tolist() == [1, 1, 0, 1, 0, 1, 1, 1]
    assert fields["rollout_log_probs"].tolist() == sample.logprobs[2:].tolist()
    assert built.tags[0]["seq_len"] == 10
    assert (built.tags[0]["min_global_steps"], built.tags[0]["max_global_steps"]) == (0, 0)


def test_rows_of_a_rollout_share_a_session_and_differ_in_the_index() -> None:
    assert build_rows(samples("call"), "p", 1).keys == ["p_0_0", "p_0_1", "p_0_2", "p_1_0"]


def test_for_a_critic_a_call_carries_its_reward_once() -> None:
    sample = samples("call")[2]
    assert row_weights(sample, 5.0, as_reward=True).tolist() == [0.0] * 9 + [3.0]


CUBED = """
from lightningrl_torch.losses import TokenLosses

def loss(batch):
    return TokenLosses(losses=-(batch.logprobs - batch.old_logprobs).exp() * batch.advantages**3)
"""


def test_a_loss_that_is_not_proportional_sees_the_advantages_as_they_are_beside_rows_without_any(
    tmp_path: Path,
) -> None:
    """As on torch, where a token weighs 1 / all tokens and the loss is of its advantage alone."""
    (tmp_path / "verl_cubed.py").write_text(CUBED, encoding="utf-8")
    settings = Settings(policy="tiny", loss=f"{tmp_path / 'verl_cubed.py'}:loss")
    group, (first, (silent,)) = make_group()
    rows = build_samples([group], [(first, (np.zeros_like(silent),))], aggregation="token_mean")
    chosen = choose_samples(rows, settings)
    tokens = sum(int(sample.mask.sum()) for sample in chosen)  # what verl divides by
    credit = np.concatenate([row_weights(sample, tokens, as_reward=False)[sample.mask] for sample in chosen])
    np.testing.assert_allclose(credit, [1.0, 1.0, -2.0, 3.0, 3.0, 3.0, 0.0, 0.0], rtol=1e-6)
    torchs = sum(float((sample.weights * sample.advantages**3).sum()) for sample in rows)
    assert float((credit**3).sum()) / tokens == pytest.approx(torchs)


def test_rows_of_which_none_teaches_are_no_step(tmp_path: Path) -> None:
    (tmp_path / "verl_cubed.py").write_text(CUBED, encoding="utf-8")
    group, advantages = make_group()
    rows = build_samples(
        [group], [tuple(tuple(np.zeros_like(call) for call in calls) for calls in advantages)], aggregation="token_mean"
    )
    assert choose_samples(rows, Settings(policy="tiny", loss=f"{tmp_path / 'verl_cubed.py'}:loss")) == []


def test_what_verl_cannot_train_is_refused_with_its_rollout() -> None:
    good = make_sample([1, 2], [3, 4])
    with pytest.raises(BackendError, match="no samples"):
        build_rows([], "p", 1)
    with pytest.raises(BackendError, match="first token"):
        build_rows([make_sample([], [3, 4], rollout="r7")], "p", 1)
    warm = make_sample([1, 2], [3, 4])
    warm.temperatures[warm.mask] = 0.5
    with pytest.raises(BackendError, match=r"temperatures \[0.5, 1.0\]"):
        build_rows([good, warm], "p", 1)
    broken = make_sample([1, 2], [3, 4], rollout="r8")
    broken.advantages[-1] = np.nan
    with pytest.raises(BackendError, match=r"'r8' has advantages that are not finite"):
        build_rows([broken], "p", 1)


def test_calls_that_meet_are_rows_of_their_own_and_lose_nothing() -> None:
    """verl's losses tell calls apart by the gaps between them."""
    calls = [
        make_transition("a/0", prompt=(1, 2), completion=(3, 4)),
        make_transition("a/1", prompt=(1, 2, 3, 4), completion=(5,), parent="a/0"),
        make_transition("a/2", prompt=(1, 2, 3, 4, 5, 6), completion=(7, 8), parent="a/1"),
    ]
    group = TrajectoryGroup(id="g", trajectories=(make_trajectory("a", calls, reward=1.0),))
    credit = tuple(
        np.full(len(call.completion_ids), value, np.float32)
        for call, value in zip(calls, (1.0, -2.0, 3.0), strict=True)
    )
    (merged,) = build_samples([group], [(credit,)], rows="merged")
    assert merged.calls.tolist() == [-1, -1, 0, 0, 1, -1, 2, 2]
    parts = separate_calls(merged)
    assert [part.calls.tolist() for part in parts] == [[-1, -1, 0, 0, -1, -1, -1, -1], [-1, -1, -1, -1, 1, -1, 2, 2]]
    for name in ("advantages", "weights", "logprobs"):
        np.testing.assert_array_equal(sum(getattr(part, name) for part in parts), getattr(merged, name))
    assert separate_calls(parts[1])[0] is parts[1]
    assert len(build_rows([merged], "step", 1).keys) == 2
