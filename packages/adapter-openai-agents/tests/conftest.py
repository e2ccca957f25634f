"""`Runner.run_sync` leaves a loop open in each thread that calls it; they end with the tests of this package."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "adapter-openai-agents" in item.path.parts:
            item.add_marker(pytest.mark.filterwarnings("ignore::ResourceWarning"))


@pytest.fixture(autouse=True, scope="module")
def loops_end_with_the_tests() -> Iterator[None]:
    """Not later, in a test of somebody else's, which knows no such warning."""
    yield
    gc.collect()
