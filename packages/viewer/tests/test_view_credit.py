"""The credit page of a viewer that is installed without the trainer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lightningrl.errors import LightningError
from lightningrl_viewer.credit import CreditXRays, Question


async def test_an_x_ray_names_what_is_missing_where_the_trainer_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lightningrl_training", None)
    xrays = CreditXRays(tmp_path)
    try:
        with pytest.raises(
            LightningError, match=r"lightningrl-training, which is not installed here; .*lightningrl\[torch\]"
        ):
            await xrays.ask(Question())
    finally:
        xrays.close()
