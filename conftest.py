"""Fixtures that tests of several packages share."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def core_algos() -> Iterator[Any]:
    """verl's own algorithm module. The package around it imports Ray and the workers' configuration, which the algorithms do not use."""
    found = importlib.util.find_spec("verl")
    assert found is not None and found.submodule_search_locations is not None, "verl is a development dependency; run `make test`"
    before = set(sys.modules)
    verl, workers, config = (types.ModuleType(name) for name in ("verl", "verl.workers", "verl.workers.config"))
    verl.__path__ = list(found.submodule_search_locations)
    workers.__path__ = []
    config.ActorConfig = type("ActorConfig", (), {})  # type: ignore[attr-defined]
    sys.modules.update({module.__name__: module for module in (verl, workers, config)})
    try:
        yield importlib.import_module("verl.trainer.ppo.core_algos")
    finally:
        for name in [name for name in sys.modules if name not in before and name.partition(".")[0] == "verl"]:
            del sys.modules[name]
