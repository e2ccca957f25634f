"""The notebook runs from top to bottom in a real kernel; by default with few steps."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from sizes import PATIENCE_S, sized

pytestmark = pytest.mark.slow
NOTEBOOK = Path(__file__).resolve().parents[1] / "dates.ipynb"
SMALL = "steps=2, tasks_per_step=4, group_size=4"
WHOLE = "steps=10, tasks_per_step=8, group_size=8"


def test_the_notebook_trains_its_cells_agent_and_shows_what_it_learned(
    first_agent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(first_agent, tmp_path / "first")
    notebook = nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]
    assert sum(WHOLE in cell.source for cell in notebook.cells) == 1
    for cell in notebook.cells:
        cell.source = cell.source.replace(WHOLE, sized(SMALL, WHOLE))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    NotebookClient(
        notebook, timeout=PATIENCE_S, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    said = [
        "".join(str(output.get("text") or output.get("data")) for output in cell.get("outputs", ()))
        for cell in notebook.cells
    ]
    problems, training, curve, trace, recredit = (text for text in said[4:] if text)
    assert problems == "{'text/plain': '[]'}"
    steps, rollouts = sized((2, 32), (10, 640))
    assert f"{steps}/{steps}" in training
    assert "reward" in training
    assert "image/png" in curve
    assert "Write this date in words" in trace
    assert recredit.startswith(f"{rollouts} rollouts; the largest change")
