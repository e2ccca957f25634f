"""Specification of a store's ledger: rewards, scores, steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lightningrl.errors import StoreError
from lightningrl.records import Score
from lightningrl.types import Evidence, OtherCall, OtherCallKind, Outcome, RolloutMode
from lightningrl_server.store.errors import Conflict, UnknownRecord
from lightningrl_server.store.protocol import Store
from lightningrl_testing._pytest import pytest
from lightningrl_testing.store_conformance.inputs import leased, make_call, make_spec, started, trajectory_of

__all__ = ["LedgerConformance"]


class LedgerConformance:
    """Tests of `lightningrl_server.store.protocol.Ledger`."""

    async def test_what_is_reported_and_what_is_computed_are_kept_apart_by_name_and_none_is_not_zero(
        self, store: Store
    ) -> None:
        lease = await started(store)
        await store.append_calls([make_call(lease, "c0", [1], [2, 3]), make_call(lease, "c1", [1], [2, 3])])
        await store.add_rewards("a", 1, {"style": 0.5})
        await store.add_rewards("a", 1, {"tool": -1.0, "judge": None}, transition_id="c1")
        await store.finish_attempt("a", 1, Outcome.SUCCEEDED)
        score = Score(
            rollout_id="a",
            attempt=1,
            rewards={"match": 1.0, "style": None},
            reward=1.25,
            digests={"rewards.match": "one"},
            transition_rewards={"c0": {"tool": 0.0}},
            advantages={"c0": np.array([0.5, -0.25], np.float32), "c1": None},
        )
        other = replace(score, digests={"rewards.match": "two"}, unrewarded="style: ValueError: \ud800")
        await store.set_scores([other])
        trajectory = await trajectory_of(store)
        assert (trajectory.unrewarded, trajectory.digests) == ("style: ValueError: \ufffd", {"rewards.match": "two"})
        await store.set_scores([score])
        trajectory = await trajectory_of(store)
        assert trajectory.reported == {"style": 0.5}
        assert trajectory.rewards == {"style": None, "match": 1.0} and trajectory.reward == 1.25
        assert (trajectory.unrewarded, trajectory.digests) == (None, {"rewards.match": "one"})
        assert [call.reported for call in trajectory.transitions] == [{}, {"tool": -1.0, "judge": None}]
        assert [call.rewards for call in trajectory.transitions] == [{"tool": 0.0}, {}]
        (stored,) = await store.scores(["a"])
        assert (stored.rewards, stored.digests) == (score.rewards, score.digests)
        assert stored.transition_rewards == score.transition_rewards
        first, second = stored.advantages["c0"], stored.advantages["c1"]
        assert first is not None and first.tolist() == [0.5, -0.25] and second is None
        assert (await store.rollout("a")).reward == 1.25

    async def test_evidence_and_the_calls_of_judges_are_kept_after_the_end_and_a_repeat_adds_nothing(
        self, store: Store
    ) -> None:
        lease = await started(store)
        await store.append_call(make_call(lease, "c0", [1], [2, 3]))
        await store.append_other_calls("a", 1, [OtherCall(kind=OtherCallKind.REFUSED, path="models", started_at=1.0)])
        await store.finish_attempt("a", 1, Outcome.SUCCEEDED)
        evidence = Evidence(
            calls={"grade": np.array([0.5], np.float32)}, tokens={"value": (np.array([0.25, -1.0], np.float32),)}
        )
        judged = OtherCall(
            kind=OtherCallKind.JUDGE, path="chat/completions", request={"a": [1]}, answer="7", started_at=2.0
        )
        score = Score(rollout_id="a", attempt=1, evidence=evidence, asked=(judged,), digests={"credit": "one"})
        await store.set_scores([score])
        await store.set_scores([score])
        await store.set_scores([Score(rollout_id="a", attempt=1, reward=1.0)])  # what is not given stays
        (trajectory,) = await store.trajectories(["a"])
        assert [call.kind for call in trajectory.other_calls] == [OtherCallKind.REFUSED, OtherCallKind.JUDGE]
        assert trajectory.other_calls[1] == judged
        assert trajectory.digests == {"credit": "one"}
        for stored in (trajectory.evidence, (await store.scores(["a"]))[0].evidence):
            assert stored is not None
            assert {name: values.tolist() for name, values in stored.calls.items()} == {"grade": [0.5]}
            assert [values.tolist() for values in stored.tokens["value"]] == [[0.25, -1.0]]

    async def test_a_constant_advantage_comes_back_per_token(self, store: Store) -> None:
        await store.append_call(make_call(await started(store), "c0", [1], [2, 3, 4]))
        await store.finish_attempt("a", 1, Outcome.SUCCEEDED)
        await store.set_scores([Score(rollout_id="a", attempt=1, advantages={"c0": np.full(3, 0.1, np.float32)})])
        stored = (await store.scores(["a"]))[0].advantages["c0"]
        assert stored is not None and stored.tolist() == np.full(3, 0.1, np.float32).tolist()

    async def test_rewards_for_nothing_are_refused(self, store: Store) -> None:
        await started(store)
        with pytest.raises(UnknownRecord, match="no transition 'nope'"):
            await store.add_rewards("a", 1, {"x": 1.0}, transition_id="nope")
        with pytest.raises(StoreError, match="'x' of rollout 'a' is nan"):
            await store.add_rewards("a", 1, {"x": float("nan")})
        with pytest.raises(Conflict, match="still runs"):
            await store.set_scores([Score(rollout_id="a", attempt=1)])

    async def test_a_rollout_is_trained_once(self, store: Store) -> None:
        await store.create_rollouts([make_spec("a"), make_spec("b"), make_spec("c")])
        await store.mark_trained(1, ["a", "b"], {"loss": 0.5})
        await store.mark_trained(1, ["b", "a"], {"loss": 0.5})
        with pytest.raises(Conflict, match="'b' was trained in step 1"):
            await store.mark_trained(2, ["c", "b"], {})
        with pytest.raises(Conflict, match="step 1 is already recorded"):
            await store.mark_trained(1, ["c"], {})
        with pytest.raises(UnknownRecord, match="'nope'"):
            await store.mark_trained(2, ["nope"], {})
        (step,) = await store.steps()
        assert (step.step, step.rollout_ids, step.metrics) == (1, ("a", "b"), {"loss": 0.5})
        assert (await store.rollout("a")).trained_step == 1

    async def test_steps_after_the_checkpoint_are_forgotten(self, store: Store) -> None:
        await store.create_rollouts([make_spec(name) for name in "abc"])
        for step, name in enumerate("abc", 1):
            await store.mark_trained(step, [name], {})
        assert await store.rollback_steps(after=1) == 2
        await store.mark_trained(2, ["c"], {})
        assert [(step.step, step.rollout_ids) for step in await store.steps()] == [(1, ("a",)), (2, ("c",))]

    async def test_rollouts_of_old_steps_are_forgotten_and_their_steps_stay(self, store: Store) -> None:
        validation = {"mode": RolloutMode.VALIDATION}
        await store.create_rollouts([make_spec("v1", step=1, **validation), make_spec("v2", step=2, **validation)])
        await store.create_rollouts([make_spec(name, step=step) for step, name in enumerate(("a", "b", "late", "c"))])
        await store.create_rollouts([make_spec("queued", step=0)])
        for name in ("v1", "v2", "a", "b", "late", "c"):
            lease = await leased(store)
            assert lease.rollout_id == name
            await store.append_call(make_call(lease, f"of-{name}", [1], [2]))
            await store.finish_attempt(name, 1, Outcome.SUCCEEDED, "done")
            await store.set_scores([Score(rollout_id=name, attempt=1, reward=1.0, rewards={"right": 1.0})])
        for step, name in enumerate(("a", "b", "c"), 1):
            await store.mark_trained(step, [name], {"rollouts": 1.0})
        assert await store.forget_rollouts(through=1) == 2  # `late` is planned for step 3
        assert await store.forget_rollouts(through=3, slack=2) == 3
        left = {record.spec.id for record in await store.list_rollouts()}
        assert left == {"late", "queued"}
        assert await store.forget_rollouts(through=3) == 1
        with pytest.raises(UnknownRecord):
            await store.rollout("a")
        await store.create_rollouts([make_spec("later")])
        await store.mark_trained(4, ["later"], {"rollouts": 1.0})
        stored = [(step.step, step.rollout_ids, step.is_forgotten) for step in await store.steps()]
        assert stored == [(1, (), True), (2, (), True), (3, (), True), (4, ("later",), False)]
        counts = await store.counts()
        assert (counts.attempts, counts.calls) == (0, 0)
        assert (await leased(store)).rollout_id == "queued"
