"""Fixtures: a tiny policy, and backends that are closed afterwards."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from lightningrl_torch.backend import TorchBackend
from lightningrl_torch.testing import save_policy

torch.set_num_threads(1)
DEVICE = os.environ.get("LIGHTNINGRL_TEST_DEVICE", "cpu")
"""`cuda` runs these tests on a GPU (scripts/gpu_check.py)."""


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def make_backend(policy: str) -> Iterator[Callable[..., TorchBackend]]:
    made: list[TorchBackend] = []

    def make(**settings: Any) -> TorchBackend:
        backend = TorchBackend(**{"policy": policy, "device": DEVICE, "threads": 1, "learning_rate": 1e-2, **settings})
        made.append(backend)
        return backend

    yield make
    for backend in made:
        backend.close()
