"""Fixtures: tiny policies, and Python processes that see this package's environment. Collects nothing where it is not
installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from sizes import PATIENCE_S

INSTALLED = importlib.util.find_spec("lightningrl_verl_cpu") is not None
collect_ignore_glob = [] if INSTALLED else ["test_*.py"]


@pytest.fixture(scope="session")
def make_policy(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], str]:
    """A tiny policy's folder, with tied or untied embeddings."""
    from lightningrl_torch.testing import save_policy

    def make(tied: bool) -> str:
        # vLLM's CPU attention wants heads of 32; the vocabulary is the tokenizer's
        shape = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 257}
        return save_policy(tmp_path_factory.mktemp("policy"), tie_word_embeddings=tied, **shape)

    return make


@pytest.fixture
def run_process(tmp_path: Path) -> Callable[..., str]:
    """Run a script beside the tests in a process of its own and return what it printed; fails with its errors."""
    from lightningrl_verl_cpu import environment

    def run(
        script: str, *arguments: str, cpu: bool = True, without: Sequence[str] = (), timeout: float = PATIENCE_S
    ) -> str:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("VERL_", "VLLM_"))}
        added = {name: value for name, value in environment().items() if cpu and name not in without}
        command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
        done = subprocess.run(
            command,
            env=inherited | added,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, f"{script} {arguments} failed:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
        return done.stdout

    return run
