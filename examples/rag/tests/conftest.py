"""The example's modules are plain files, as a user's are: their folder is on the path while its tests are collected and run, and no longer."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLE = Path(__file__).resolve().parent.parent
NAMES = {path.stem for path in EXAMPLE.glob("*.py")}
loaded: dict[str, ModuleType] = {}


@contextmanager
def example_modules() -> Iterator[None]:
    """Other examples have files of the same names: theirs are put aside meanwhile."""
    theirs = {name: sys.modules.pop(name) for name in NAMES & set(sys.modules)}
    sys.modules.update(loaded)
    path = list(sys.path)
    sys.path.insert(0, str(EXAMPLE))
    try:
        yield
    finally:
        loaded.update({name: sys.modules.pop(name) for name in NAMES & set(sys.modules)})
        sys.modules.update(theirs)
        sys.path[:] = path


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    with example_modules():
        yield


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    with example_modules():
        yield


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    if not os.environ.get("OPENAI_API_KEY"):
        monkeypatch.setenv("OPENAI_API_KEY", "test")


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rag")
