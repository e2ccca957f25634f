"""The house rules that no single package owns: what an import pulls in, and what is public."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = (
    "torch",
    "transformers",
    "langchain_core",
    "langgraph",
    "sqlalchemy",
    "starlette",
    "uvicorn",
    "httpx",
    "matplotlib",
    "verl",
    "vllm",
    "ray",
)


def modules_after(statement: str) -> set[str]:
    code = f"import json, sys; {statement}; print(json.dumps(sorted(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(ran.stdout.splitlines()[-1]))


def test_importing_lightningrl_and_listing_plugins_stays_light() -> None:
    loaded = modules_after("import lightningrl; from lightningrl.plugins import load_plugins; m = load_plugins(); m.trainers; m.adapters")
    assert not loaded.intersection(HEAVY)


@pytest.mark.parametrize("module", ["lightningrl.server.app", "lightningrl.gateway.app", "lightningrl.rendering.renderer"])
def test_the_server_has_no_torch(module: str) -> None:
    assert "torch" not in modules_after(f"import {module}")


def test_the_verl_backend_takes_losses_and_settings_from_the_torch_one_and_nothing_else() -> None:
    sources = (Path(__file__).parents[1] / "packages" / "trainer-verl" / "src").rglob("*.py")
    taken = {name for file in sources for name in re.findall(r"from lightningrl_torch\.(\w+) import", file.read_text(encoding="utf-8"))}
    assert taken == {"chosen_loss", "learner_settings", "losses"}


def test_public_names_are_sorted_and_there() -> None:
    package = importlib.import_module("lightningrl")
    assert package.__all__ == sorted(package.__all__)
    for name in package.__all__:
        assert getattr(package, name) is not None
