"""The verl backend does what every trainer backend does: the same suite that the torch backend passes, with vLLM
replicas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import ray

from lightningrl.backends import Backend
from lightningrl_testing.backend_conformance import BackendConformance
from lightningrl_torch.losses import LOSSES
from lightningrl_verl.plugin import create_backend


@pytest.fixture(scope="module", autouse=True)
def one_ray(cpu_ray: None) -> Iterator[None]:
    """One Ray for all of them; each backend starts verl anew."""
    yield


class TestVerl(BackendConformance):
    learning_rate = 1e-2
    prompt = (65, 66, 67, 68)
    losses = tuple(LOSSES)

    @pytest.fixture(autouse=True)
    def _policy(self, policy: str, resting: dict[str, Backend]) -> None:
        self._folder = policy
        self._resting = resting

    def make_backend(self, **learner: object) -> Backend:
        settings: dict[str, Any] = {
            "policy": self._folder,
            "name": "policy",
            "dtype": "float32",
            "learning_rate": 1e-3,
            **learner,
        }
        return create_backend(**settings)

    @asynccontextmanager
    async def backend(self, **learner: object) -> AsyncIterator[Backend]:
        """Tests that never learn share a backend: verl takes most of a minute to start, and a Ray namespace holds one
        at a time."""
        if learner:
            for idle in self._resting.values():
                await asyncio.to_thread(idle.close)
            self._resting.clear()
            async with super().backend(**learner) as made:
                yield made
            return
        if "resting" not in self._resting:
            self._resting["resting"] = await asyncio.to_thread(self.make_backend)
        yield self._resting["resting"]


@pytest.fixture(scope="module")
def resting(one_ray: None) -> Iterator[dict[str, Backend]]:
    made: dict[str, Backend] = {}
    yield made
    for backend in made.values():
        backend.close()


def test_ray_is_left_running_for_whoever_started_it() -> None:
    assert ray.is_initialized()
