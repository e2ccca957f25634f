"""Rows for the learner: one per call or merged by prefix, the same gradient either way."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightningrl.advantages import teaching_rows
from lightningrl.errors import ConfigError, PluginError
from lightningrl.types import Advantages, RolloutMode, Sample, SamplingSettings, TrajectoryGroup
from lightningrl_credit import IdenticalAssignment
from lightningrl_credit.samples import build_samples
from lightningrl_testing.groups import make_group, make_trajectory, make_transition


def credit_of(group: TrajectoryGroup, value: float = 1.0) -> Advantages:
    return tuple(
        tuple(np.full(len(t.completion_ids), value, dtype=np.float32) for t in trajectory.transitions)
        for trajectory in group.trajectories
    )


def one(*transitions: object) -> TrajectoryGroup:
    return TrajectoryGroup(id="g", trajectories=(make_trajectory("r", transitions),))  # type: ignore[arg-type]


def trained(sample: Sample) -> list[int]:
    return list(sample.token_ids[sample.mask].tolist())


def test_growing_history_becomes_one_row() -> None:
    group = one(
        make_transition("a", prompt=[1, 2], completion=[3, 4], version=7),
        make_transition("b", index=1, parent="a", prompt=[1, 2, 3, 4, 5], completion=[6], version=8, temperature=0.5),
    )
    (row,) = build_samples([group], [credit_of(group)], rows="merged")
    assert row.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert row.mask.tolist() == [False, False, True, True, False, True]
    assert row.versions.tolist() == [-1, -1, 7, 7, -1, 8]
    assert row.temperatures.tolist() == [1.0, 1.0, 1.0, 1.0, 1.0, 0.5]
    np.testing.assert_allclose(row.logprobs, [0, 0, -0.003, -0.004, 0, -0.006])
    np.testing.assert_allclose(row.weights, [0, 0, 1 / 3, 1 / 3, 0, 1 / 3])
    assert [trained(sample) for sample in build_samples([group], [credit_of(group)])] == [[3, 4], [6]]


def test_branches_share_a_history_but_each_token_is_trained_once() -> None:
    group = one(
        make_transition("a", prompt=[1], completion=[2]),
        make_transition("b", index=1, parent="a", prompt=[1, 2, 3], completion=[4]),
        make_transition("c", index=2, parent="a", prompt=[1, 2, 5], completion=[6]),
    )
    left, right = build_samples([group], [credit_of(group)], rows="merged")
    assert (left.token_ids.tolist(), trained(left)) == ([1, 2, 3, 4], [2, 4])
    assert (right.token_ids.tolist(), trained(right)) == ([1, 2, 5, 6], [6])


@pytest.mark.parametrize("change", ["prompt differs", "other policy", "no parent", "parent later"])
def test_calls_that_do_not_continue_their_parent_stay_apart(change: str) -> None:
    group = one(
        make_transition("a", prompt=[1], completion=[2], policy="other" if change == "other policy" else "policy"),
        make_transition(
            "b",
            index=1,
            parent={"no parent": None, "parent later": "c"}.get(change, "a"),
            prompt=[1, 9, 3] if change == "prompt differs" else [1, 2, 3],
            completion=[4],
        ),
        make_transition("c", index=2, prompt=[1], completion=[2]),
    )
    assert [trained(sample) for sample in build_samples([group], [credit_of(group)], rows="merged")] == [[2], [4], [2]]


def test_untrained_call_between_is_context() -> None:
    group = one(
        make_transition("a", prompt=[1], completion=[2]),
        make_transition("b", index=1, parent="a", prompt=[1, 2, 3], completion=[4], trainable=False),
        make_transition("c", index=2, parent="b", prompt=[1, 2, 3, 4, 5], completion=[6]),
        make_transition("d", index=3, parent="c", prompt=[1, 2, 3, 4, 5, 6, 7], completion=[8], trainable=False),
    )
    (row,) = build_samples([group], [credit_of(group)], rows="merged")
    assert (row.token_ids.tolist(), trained(row)) == ([1, 2, 3, 4, 5, 6], [2, 6])


def test_unscored_and_failed_calls_make_no_rows_and_count_nowhere() -> None:
    group = make_group((0.0, 0.0), (1.0,), (9.0,), rewards=(0.0, 1.0, None))
    advantages = IdenticalAssignment().assign(group)
    samples = build_samples([group], [advantages])
    assert [sample.rollout_id for sample in samples] == ["g-0", "g-0", "g-1"]
    assert sum(float(sample.weights.sum()) for sample in samples) == pytest.approx(1.0)


def test_weights_follow_the_aggregation() -> None:
    group = one(make_transition("a", completion=[1, 2, 3]), make_transition("b", index=1, completion=[4]))
    other = TrajectoryGroup(
        id="h", trajectories=(make_trajectory("s", [make_transition("c", completion=[5])], group_id="h"),)
    )

    def weights(aggregation: str, constant: int | None = None) -> list[float]:
        credit = [credit_of(group), credit_of(other)]
        samples = build_samples([group, other], credit, aggregation=aggregation, constant_length=constant)  # type: ignore[arg-type]
        return [float(sample.weights.max()) for sample in samples]

    assert weights("rollout_mean") == pytest.approx([1 / 8, 1 / 8, 1 / 2])
    assert weights("token_mean") == pytest.approx([1 / 5] * 3)
    assert weights("constant", 10) == pytest.approx([1 / 20] * 3)


def test_skipping_rows_without_gradient_changes_no_weight_of_the_others() -> None:
    group = make_group((0.0, 0.0), (1.0, 1.0), (0.5,))
    advantages = IdenticalAssignment().assign(group)
    everything = build_samples([group], [advantages])
    some = teaching_rows(everything)
    assert [sample.rollout_id for sample in some] == ["g-0", "g-0", "g-1", "g-1"]
    for kept, original in zip(some, everything, strict=False):
        np.testing.assert_array_equal(kept.weights, original.weights)


def test_greedy_calls_are_trained_at_the_temperature_of_their_logprobs() -> None:
    group = one(make_transition("a", temperature=0.0))
    assert build_samples([group], [credit_of(group)])[0].temperatures.tolist() == [1.0] * 5


def test_a_token_that_a_grammar_left_no_other_is_context_and_counts_nowhere() -> None:
    bound = SamplingSettings(grammar='start: "a" /[0-9]/')
    logprobs = np.array([0.0, -0.5, 0.0], np.float32)
    call = replace(make_transition("a", prompt=[1], completion=[2, 3, 4]), sampling=bound, logprobs=logprobs)
    no_choice = replace(make_transition("b", prompt=[1], completion=[5]), sampling=bound, logprobs=logprobs[:1])
    group = one(call, no_choice)
    (row,) = build_samples([group], [credit_of(group)])
    assert row.mask.tolist() == [False, False, True, False] and row.token_ids.tolist() == [1, 2, 3, 4]
    assert row.weights.tolist() == [0.0, 0.0, 1.0, 0.0] and row.advantages.tolist() == [0.0, 0.0, 1.0, 0.0]
    assert row.calls.tolist() == [-1, -1, 0, -1]
    free = one(replace(call, sampling=SamplingSettings()))
    (row,) = build_samples([free], [credit_of(free)])
    assert row.mask.tolist() == [False, True, True, True], "without a grammar 0.0 is a probability of 1"


def test_nothing_scored_gives_no_rows() -> None:
    group = make_group((1.0,), (2.0,), rewards=(None, None))
    assert build_samples([group], [IdenticalAssignment().assign(group)], aggregation="token_mean") == []
    assert build_samples([], []) == []


def test_credit_that_does_not_fit_is_named() -> None:
    group = one(make_transition("a", completion=[1, 2]))
    for credit, sentence in (
        ((), "1 trajectories but credit for 0"),
        (((),), "1 calls but credit for 0"),
        (((np.ones(3, np.float32),),), r"'a': 2 completion tokens but advantages of shape \(3,\)"),
        (((np.array([1.0, np.nan], np.float32),),), "'a': advantages are not finite"),
    ):
        with pytest.raises(PluginError, match=sentence):
            build_samples([group], [credit])
    with pytest.raises(PluginError, match="1 groups but advantages for 0"):
        build_samples([group], [])


def test_validation_rollouts_are_refused() -> None:
    from dataclasses import replace

    group = one(make_transition("a"))
    validation = replace(group, trajectories=(replace(group.trajectories[0], mode=RolloutMode.VALIDATION),))
    with pytest.raises(PluginError, match="'r' is for validation"):
        build_samples([validation], [credit_of(validation)])


def test_settings_that_make_no_sense_are_named() -> None:
    with pytest.raises(ConfigError, match="'constant' divides by constant_length"):
        build_samples([], [], aggregation="constant")
    with pytest.raises(ConfigError, match="does not use it"):
        build_samples([], [], constant_length=5)
    with pytest.raises(ConfigError, match="no rows named 'tree'"):
        build_samples([], [], rows="tree")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no aggregation named 'sum'"):
        build_samples([], [], aggregation="sum")  # type: ignore[arg-type]


@st.composite
def groups_with_credit(draw: st.DrawFn) -> tuple[list[TrajectoryGroup], list[Advantages]]:
    """Trajectories that are forests: calls continue an earlier call, break with it, or start anew; some untrained or
    unscored."""
    groups, credit = [], []
    token = iter(range(1, 100_000))
    for g in range(draw(st.integers(1, 2))):
        trajectories, group_credit = [], []
        for i in range(draw(st.integers(1, 3))):
            transitions: list[Any] = []
            trajectory_credit = []
            for t in range(draw(st.integers(0, 7))):
                parent = transitions[draw(st.integers(0, t - 1))] if t and draw(st.integers(0, 3)) else None
                prompt = [next(token)]
                if parent is not None:
                    is_broken = draw(st.integers(0, 4)) == 0
                    history = [*parent.prompt_ids.tolist(), *parent.completion_ids.tolist()]
                    prompt = [
                        *(history[:-1] if is_broken else history),
                        *(next(token) for _ in range(draw(st.integers(0, 2)))),
                    ]
                completion = [next(token) for _ in range(draw(st.integers(1, 3)))]
                call = make_transition(
                    f"{g}/{i}/{t}", index=t, prompt=prompt, completion=completion, parent=parent.id if parent else None,
                    trainable=draw(st.integers(0, 4)) > 0, version=draw(st.integers(0, 2)), temperature=draw(st.sampled_from([0.5, 1.0])),
                )  # fmt: skip
                transitions.append(call)
                values = draw(st.lists(st.floats(-3, 3, width=32), min_size=len(completion), max_size=len(completion)))
                trajectory_credit.append(np.array(values, dtype=np.float32) if draw(st.integers(0, 4)) else None)
            trajectories.append(make_trajectory(f"{g}/{i}", transitions))
            group_credit.append(tuple(trajectory_credit))
        groups.append(TrajectoryGroup(id=str(g), trajectories=tuple(trajectories)))
        credit.append(tuple(group_credit))
    return groups, credit


def gradient(samples: list[Sample]) -> dict[tuple[str, bytes], tuple[float, ...]]:
    """For every trained token, seen in its context, all that its loss is made of. Fails if a token is trained twice."""
    found: dict[tuple[str, bytes], tuple[float, ...]] = {}
    for sample in samples:
        for position in np.flatnonzero(sample.mask):
            key = (sample.rollout_id, sample.token_ids[: position + 1].tobytes())
            assert key not in found, "a token is trained twice"
            fields = (
                sample.advantages,
                sample.weights,
                sample.logprobs,
                sample.versions,
                sample.calls,
                sample.temperatures,
            )
            found[key] = tuple(float(array[position]) for array in fields)
        for array in (sample.advantages, sample.weights, sample.logprobs):
            assert not array[~sample.mask].any()
        assert (sample.versions[~sample.mask] == -1).all()
        np.testing.assert_array_equal(sample.calls >= 0, sample.mask)
    return found


@settings(max_examples=150, deadline=None)
@given(groups_with_credit(), st.sampled_from(["rollout_mean", "token_mean", "constant"]))
def test_call_rows_and_merged_rows_give_the_same_gradient(
    drawn: tuple[list[TrajectoryGroup], list[Advantages]], aggregation: str
) -> None:
    groups, credit = drawn
    options = {"aggregation": aggregation, "constant_length": 4 if aggregation == "constant" else None}
    per_call, merged = (gradient(build_samples(groups, credit, rows=rows, **options)) for rows in ("call", "merged"))  # type: ignore[arg-type]
    assert per_call == merged
    expected = sum(
        len(advantages)
        for group, group_credit in zip(groups, credit, strict=True)
        for trajectory, one_credit in zip(group.trajectories, group_credit, strict=True)
        for transition, advantages in zip(trajectory.transitions, one_credit, strict=True)
        if advantages is not None and transition.trainable
    )
    assert len(merged) == expected
    if expected and aggregation != "constant":
        assert sum(weight for _, weight, *_ in merged.values()) == pytest.approx(1.0, abs=1e-5)
    if aggregation == "rollout_mean" and expected:
        shares: dict[str, float] = {}
        for (rollout, _), (_, weight, *_) in merged.items():
            shares[rollout] = shares.get(rollout, 0.0) + weight
        assert list(shares.values()) == pytest.approx([1 / len(shares)] * len(shares), rel=1e-5)


@settings(max_examples=50, deadline=None)
@given(groups_with_credit(), st.sampled_from(["call", "merged"]))
def test_only_rows_without_gradient_are_no_teaching_rows(
    drawn: tuple[list[TrajectoryGroup], list[Advantages]], rows: str
) -> None:
    samples = build_samples(*drawn, rows=rows)  # type: ignore[arg-type]
    everything, some = gradient(samples), gradient(teaching_rows(samples))
    assert all(everything[key] == value for key, value in some.items())
    assert all(everything[key][0] == 0.0 for key in everything.keys() - some.keys())


@pytest.mark.parametrize("rows", ["call", "merged"])
def test_the_work_of_rows_grows_with_the_turns_and_not_with_their_square(rows: str) -> None:
    """Counted in Python's calls; the milliseconds are in benchmarks/stored.py samples."""
    calls = [count_calls(rows, turns) for turns in (25, 50, 100)]
    assert calls[2] - calls[1] <= 2.5 * (calls[1] - calls[0])


def count_calls(rows: str, turns: int) -> int:
    history: list[int] = list(range(100))
    calls = []
    for t in range(turns):
        completion = list(range(40))
        calls.append(
            make_transition(
                f"r/{t}", index=t, prompt=history, completion=completion, parent=f"r/{t - 1}" if t else None
            )
        )
        history = [*history, *completion, *range(20)]
    group = one(*calls)
    advantages = [IdenticalAssignment().assign(group)]
    build_samples([group], advantages, rows=rows)  # type: ignore[arg-type]
    count = 0

    def count_one(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in {"call", "c_call"}

    sys.setprofile(count_one)
    try:
        built = build_samples([group], advantages, rows=rows)  # type: ignore[arg-type]
    finally:
        sys.setprofile(None)
    assert len(built) == (1 if rows == "merged" else turns)
    return count
