"""vLLM on the CPU takes new weights, exactly, with tied and untied embeddings."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_new_weights_are_served_exactly(
    run_process: Callable[..., str], make_policy: Callable[[bool], str], tied: bool
) -> None:
    gaps = json.loads(run_process("process_vllm.py", make_policy(tied)).splitlines()[-1])
    assert gaps["trained, not sent"] > 0.1, "the update is large enough to see"
    assert max(gaps["start"], gaps["sent"], gaps["sent again"]) < 1e-5, gaps
