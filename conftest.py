"""Fixtures that tests of several packages share."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("lightningrl", deadline=None)  # a first call of torch, on a busy machine, takes longer than any deadline
settings.load_profile("lightningrl")


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


@pytest.fixture
def run_page(tmp_path: Path) -> Callable[..., str]:
    """Run every fenced block of a page, top to bottom: titled ones are files, bash is run. Returns what the commands said."""
    root = Path(__file__).parent
    fence = re.compile(r"^```(\w+)(?: title=(\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)

    def run(page: str, **environment: str) -> str:
        (tmp_path / "starter").symlink_to(root / "examples" / "text_to_sql" / "starter")
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        whole = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160", "PATH": path, **environment}
        said = ""
        for language, title, body in (match.groups() for match in fence.finditer((root / page).read_text(encoding="utf-8"))):
            assert title or language in {"bash", "text"}, f"a block of {page} in {language} has no title, so nothing runs it"
            if title:
                (tmp_path / title).write_text(body, encoding="utf-8")
            elif language == "bash":
                for line in body.strip().splitlines():
                    ran = subprocess.run(
                        shlex.split(line), cwd=tmp_path, capture_output=True, text=True, check=False, env=whole, timeout=280
                    )
                    assert ran.returncode == 0, f"{line}\n{ran.stdout}\n{ran.stderr}"
                    said += ran.stdout
        return said

    return run
