"""The same samples have the same loss and gradient on both backends, and the test would notice credit that went astray."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="module")
def report(request: pytest.FixtureRequest, policy: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    run: Callable[..., str] = request.getfixturevalue("run_script")
    return json.loads(run("process_agreement.py", policy, "ppo_clip").strip().splitlines()[-1])


def test_loss_and_gradient_are_those_of_the_torch_backend(report: dict[str, Any]) -> None:
    ours, theirs = report["losses"]
    assert theirs == pytest.approx(ours, rel=1e-5)
    assert report["call"]["cosine"] > 1 - 1e-5
    assert report["call"]["ratio"] == pytest.approx(1.0, abs=1e-3)


def test_merged_rows_have_the_same_gradient(report: dict[str, Any]) -> None:
    assert report["rows"] == [10, 4]
    assert report["merged"]["cosine"] > 1 - 1e-5
    assert report["merged"]["ratio"] == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("wrong", ["permuted", "only_last", "unweighted"])
def test_credit_that_goes_astray_would_be_seen(report: dict[str, Any], wrong: str) -> None:
    """Rows permuted, only the last row's credit used, a rollout weighed by its rows: each is another gradient."""
    assert report[wrong]["cosine"] < 0.9 or abs(report[wrong]["ratio"] - 1.0) > 0.1
