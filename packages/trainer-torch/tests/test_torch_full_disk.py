"""A checkpoint that finds no room says so in a sentence, whatever writes it, and leaves the last one alone."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from lightningrl.errors import BackendError
from lightningrl_torch.checkpoint import read_checkpoint, write_checkpoint


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """No file of this process may become longer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(("weights", "state"), [(100_000, 1), (1, 100_000)], ids=["weights", "optimiser"])
def test_a_checkpoint_without_room_is_told_of_and_the_last_one_stays(tmp_path: Path, weights: int, state: int) -> None:
    folder = tmp_path / "policy"
    write_checkpoint(folder, {"w": torch.zeros(1)}, {"version": 1})
    sentence = (
        r"folder '.*policy' cannot be written: .*[Ff]ile too large.*; nothing of it was kept: mend that, then run again"
    )
    with room_for(65_536), pytest.raises(BackendError, match=sentence):
        write_checkpoint(folder, {"w": torch.ones(weights)}, {"moments": torch.ones(state)})
    kept, _ = read_checkpoint(folder, torch.device("cpu"))
    assert kept["w"].tolist() == [0.0]
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]
