"""vLLM's kernels on the CPU are exact, prefill and decode; what differs under verl is the padding of the vocabulary."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.mark.slow
def test_probabilities_are_those_of_transformers_over_the_tokenizers_ids(
    run_process: Callable[..., str], tmp_path: Path
) -> None:
    from lightningrl_torch.testing import save_policy

    # a tokenizer of 258 tokens, and a table of embeddings that is padded, as most published models' are
    shape = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 320}
    policy = save_policy(tmp_path / "policy", **shape)
    # sharper than the trained example policy (0.3 to 0.4); at 4 (0.96 here)
    # float32 itself is 7e-5 from float64, and vLLM 1.5e-5 from transformers
    report = json.loads(run_process("process_vllm_exactness.py", policy, "2").splitlines()[-1])
    assert report["rows"][0] - report["rows"][1] > 50, "the table of embeddings is padded"
    assert report["sharpest"] > 0.7, "attention is sharp enough to show an inexact exponential"
    for phase in ("prefill", "decode"):
        assert report["plain"][phase] < 1e-5, report
        assert report["masked"][phase] < 1e-5, report
        assert report["masked, all rows"][phase] > 1e-3, (
            f"verl left the padding out, so a softmax over all rows is another one: {report}"
        )
