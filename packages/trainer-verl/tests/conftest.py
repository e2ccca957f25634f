"""Fixtures: a tiny policy, and processes with verl's environment. Collects nothing where verl and its CPU support are
not installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sizes import PATIENCE_S

INSTALLED = all(
    importlib.util.find_spec(name) is not None
    for name in ("lightningrl_verl", "lightningrl_verl_cpu", "ray", "transfer_queue")
)
collect_ignore_glob = [] if INSTALLED else ["test_*.py"]

if INSTALLED:  # verl reads it when it is imported, and pytest imports test files first
    from lightningrl_verl_cpu.settings import environment

    os.environ.update(environment())


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny policy that vLLM serves too: heads of 32, and more embeddings than its tokenizer has tokens, as many
    models have."""
    from lightningrl_torch.testing import save_policy

    return save_policy(
        tmp_path_factory.mktemp("policy"), hidden_size=64, num_attention_heads=2, num_key_value_heads=1, vocab_size=320
    )


@pytest.fixture(scope="session")
def run_script(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Run a script beside the tests in a process of its own and return what it printed; fails with its errors."""

    def run(script: str, *arguments: str, timeout: float = PATIENCE_S) -> str:
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name(script)), *arguments],
            cwd=tmp_path_factory.mktemp("process"),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    return run


@pytest.fixture(scope="session")
def cpu_ray() -> Iterator[None]:
    """A Ray of this machine with logical GPUs, as the backend would start it; backends find it and leave it."""
    import ray

    ray.init(
        num_cpus=32,
        num_gpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        runtime_env={"env_vars": {**environment(), "TRANSFER_QUEUE_ENABLE": "1"}},
    )
    yield
    ray.shutdown()
