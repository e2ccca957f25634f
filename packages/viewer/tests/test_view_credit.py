"""The credit page of a viewer: its X-rays are made by whatever process an installed package names."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from lightningrl.errors import LightningError
from lightningrl_runs.xray import Question
from lightningrl_server.store.errors import UnknownRecord
from lightningrl_viewer import credit
from lightningrl_viewer.credit import ENTRY_POINTS, CreditXRays

PROCESS = """
import sys
for line in sys.stdin:
    print('{"error": "%s of %s"}' % (line.count("g7"), sys.argv[1]), flush=True)
"""


async def test_an_x_ray_names_what_is_missing_where_the_trainer_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(credit, "entry_points", lambda **_: ())
    xrays = CreditXRays(tmp_path)
    try:
        with pytest.raises(
            LightningError, match=r"lightningrl-training, which is not installed here; .*lightningrl\[torch\]"
        ):
            await xrays.ask(Question())
    finally:
        xrays.close()


async def test_the_process_that_an_entry_point_names_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_xrays.py").write_text(PROCESS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    point = EntryPoint(name="process", group=ENTRY_POINTS, value="some_xrays")
    monkeypatch.setattr(
        credit, "entry_points", lambda group, name: [point] if (group, name) == (point.group, point.name) else []
    )
    xrays = CreditXRays(tmp_path)
    try:
        with pytest.raises(UnknownRecord, match=f"^1 of {tmp_path}$"):
            await xrays.ask(Question(group="g7"))
    finally:
        xrays.close()
