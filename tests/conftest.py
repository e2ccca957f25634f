"""A tiny random policy that follows no instruction, as an ordinary transformers folder."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from lightningrl_testing.tokenizers import tiny_tokenizer
    from lightningrl_torch.testing import make_model

    folder = tmp_path_factory.mktemp("policy")
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 512}
    make_model(**sizes, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id).save_pretrained(
        folder
    )
    return folder
