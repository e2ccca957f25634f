"""The check of an export by vLLM, which need not be installed: its program is another's, and may never end."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from lightningrl.errors import BackendError
from lightningrl_testing.groups import make_transition
from lightningrl_training import export_check


def test_a_vllm_that_does_not_answer_is_ended_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_check, "VLLM_PROGRAM", "import time; time.sleep(1000)")
    monkeypatch.setattr(export_check, "PATIENCE_S", 0.5)
    before = time.monotonic()
    with pytest.raises(BackendError, match=r"vLLM did not answer for .*, which was written, in 1 s; check fewer calls"):
        export_check._vllm(tmp_path, 16, [make_transition("c")])
    assert time.monotonic() - before < 60
