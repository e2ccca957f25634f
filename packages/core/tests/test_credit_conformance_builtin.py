"""Every built-in credit assigner passes the conformance suite."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from lightningrl.credit import DiscountedReturns, IdenticalAssignment, assign_credit
from lightningrl.protocols import CreditAssigner
from lightningrl.testing.credit_conformance import CreditConformance
from lightningrl.testing.groups import make_group


class TestGRPO(CreditConformance):
    def make_assigner(self) -> CreditAssigner:
        return IdenticalAssignment()


class TestDrGRPO(CreditConformance):
    def make_assigner(self) -> CreditAssigner:
        return IdenticalAssignment(baseline="dr_grpo")

    def expected(self, rewards: Sequence[float]) -> list[float]:
        return [reward - statistics.fmean(rewards) for reward in rewards]


class TestRLOO(CreditConformance):
    def make_assigner(self) -> CreditAssigner:
        return IdenticalAssignment(baseline="rloo")

    def expected(self, rewards: Sequence[float]) -> list[float]:
        return [reward - statistics.fmean([*rewards[:i], *rewards[i + 1 :]]) for i, reward in enumerate(rewards)]


class TestReinforce(CreditConformance):
    is_group_relative = False

    def make_assigner(self) -> CreditAssigner:
        return IdenticalAssignment(baseline="none")

    def expected(self, rewards: Sequence[float]) -> list[float]:
        return list(rewards)


class TestDiscounted(CreditConformance):
    def make_assigner(self) -> CreditAssigner:
        return DiscountedReturns()


class TestDiscountedRLOO(TestRLOO):
    def make_assigner(self) -> CreditAssigner:
        return DiscountedReturns(baseline="rloo")


class TestByRole(CreditConformance):
    compare = "role"

    def make_assigner(self) -> CreditAssigner:
        return IdenticalAssignment()

    def test_without_turn_rewards_it_is_the_outcome_method(self) -> None:
        group = make_group((0.0, 0.0), (1.0,), (1.0, 1.0), (0.5,))
        credit = assign_credit(self.make_assigner(), group, compare="role")
        write, check = self.expected([0.0, 1.0, 1.0, 0.5]), self.expected([0.0, 1.0])
        for i, advantages in enumerate(credit):
            np.testing.assert_allclose(np.unique(advantages[0]), [write[i]], atol=1e-6)  # type: ignore[arg-type]
        np.testing.assert_allclose([credit[0][1][0], credit[2][1][0]], check, atol=1e-6)  # type: ignore[arg-type, index]


class TestByRoleDiscounted(TestByRole):
    def make_assigner(self) -> CreditAssigner:
        return DiscountedReturns()
