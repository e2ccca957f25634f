"""Examples are folders of plain files, as a user's are, and several have an `agent.py`: each example's tests import their own."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parent
os.environ.setdefault("OPENAI_API_KEY", "test")


class Isolation:
    """The example whose modules and path are in place; those of the others wait until their tests go on."""

    def __init__(self) -> None:
        self._current: str | None = None
        self._modules: dict[str, dict[str, ModuleType]] = {}

    def enter(self, path: Path) -> None:
        """Before a test, or a file of tests, below `path` is run or read."""
        if not path.is_relative_to(EXAMPLES) or path == EXAMPLES:
            return
        example = path.relative_to(EXAMPLES).parts[0]
        if example == self._current:
            return
        ours = {name: module for name, module in sys.modules.items() if _is_of_an_example(module)}
        if self._current is not None:
            self._modules[self._current] = ours
        for name in ours:
            del sys.modules[name]
        sys.modules.update(self._modules.get(example, {}))
        sys.path[:] = [str(EXAMPLES / example), *(path for path in sys.path if not Path(path).is_relative_to(EXAMPLES))]
        self._current = example


isolation = Isolation()


def _is_of_an_example(module: Any) -> bool:
    file = getattr(module, "__file__", None)
    return bool(file) and Path(file).is_relative_to(EXAMPLES) and "tests" not in Path(file).parts and Path(file).name != "conftest.py"


@pytest.hookimpl(tryfirst=True)
def pytest_make_collect_report(collector: pytest.Collector) -> None:
    isolation.enter(collector.path)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    isolation.enter(item.path)
