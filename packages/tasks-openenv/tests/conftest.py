"""Servers of the tests: one of ours that speaks the wire, and, where `make test-openenv` has made its environment, a real
one of openenv."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from lightningrl_tasks_openenv.source import find_port

HERE = Path(__file__).parent
REAL = Path(__file__).parents[3] / ".venv-openenv" / "bin" / "python"
StartServer = Callable[..., str]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("ours", id="ours"),
        pytest.param("openenv", marks=pytest.mark.skipif(not REAL.exists(), reason="make test-openenv")),
    ],
)
def command(request: pytest.FixtureRequest) -> list[str]:
    """Words that start a server; its port, its kind and the number of its sessions follow."""
    if request.param == "ours":
        return [sys.executable, str(HERE / "wire_server.py")]
    return [str(REAL), str(HERE / "sums_server.py")]


@pytest.fixture(scope="module")
def start_server(command: list[str]) -> Iterator[StartServer]:
    """Start a server once for each kind; return its URL."""
    running: dict[tuple[str, ...], tuple[subprocess.Popen[bytes], str]] = {}

    def start(*words: str) -> str:
        if words not in running:
            url = f"http://127.0.0.1:{(port := find_port())}"
            running[words] = subprocess.Popen([*command, str(port), *words]), url
            await_health(url)
        return running[words][1]

    yield start
    for process, _ in running.values():
        process.kill()
        process.wait()


def await_health(url: str) -> None:
    ends = time.monotonic() + 120
    while time.monotonic() < ends:
        try:
            if httpx.get(f"{url}/health").is_success:
                return
        except httpx.HTTPError:
            time.sleep(0.05)
    raise AssertionError(f"no server at {url}")
