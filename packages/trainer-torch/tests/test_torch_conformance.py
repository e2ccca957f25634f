"""The torch backend does what every trainer backend does, fully fine-tuned and with LoRA."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from lightningrl.backends import Backend
from lightningrl_testing.backend_conformance import BackendConformance
from lightningrl_torch.backend import TorchBackend
from lightningrl_torch.losses import LOSSES
from lightningrl_torch.testing import save_policy


class TestFullFineTuning(BackendConformance):
    losses = tuple(LOSSES)

    @pytest.fixture(autouse=True)
    def _policy(self, tmp_path: Path) -> None:
        self.policy = save_policy(tmp_path / "policy")

    def make_backend(self, **learner: Any) -> Backend:
        return TorchBackend(
            policy=self.policy, device=os.environ.get("LIGHTNINGRL_TEST_DEVICE", "cpu"), threads=1, **learner
        )


class TestLora(TestFullFineTuning):
    def make_backend(self, **learner: Any) -> Backend:
        return super().make_backend(lora={"rank": 8, "alpha": 32.0}, **learner)
