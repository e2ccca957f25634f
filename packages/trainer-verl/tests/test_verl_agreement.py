"""The same samples have the same loss and gradient on both backends, and the test would notice credit that went
astray."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from lightningrl_torch.losses import LOSSES
from lightningrl_torch.testing import save_policy


@pytest.fixture(scope="module", params=LOSSES)
def report(
    request: pytest.FixtureRequest, run_script: Callable[..., str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """On a policy without padding: what its padding weighs, the two count differently
    (`lightningrl_verl.losses`)."""
    shape = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 257}
    policy = save_policy(tmp_path_factory.mktemp("policy"), **shape)
    return dict(json.loads(run_script("process_agreement.py", policy, request.param).strip().splitlines()[-1]))


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
