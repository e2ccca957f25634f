"""Adapters never bring a framework along: it is an extra of theirs, and what is missing or of another version is said
in one sentence."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.instrumentation.instrumentor import BaseInstrumentor  # type: ignore[attr-defined]
from opentelemetry.sdk.trace import TracerProvider

from lightningrl.errors import PluginError
from lightningrl.plugins import load_plugins
from lightningrl_client.runtime.telemetry import instrument

ADAPTERS = {
    "autogen": "lightningrl-autogen",
    "langchain": "lightningrl-langchain",
    "openai-agents": "lightningrl-openai-agents",
}
SITE = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"agents", "autogen_agentchat", "autogen_core", "langchain_core", "langgraph"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""


class OfAnotherTime(BaseInstrumentor):  # type: ignore[misc]
    """Instruments a version that is not installed."""

    def instrumentation_dependencies(self) -> tuple[str]:
        return ("httpx < 0.1",)

    def call_origin(self) -> None:
        return None

    def _instrument(self, **kwargs: Any) -> None: ...

    def _uninstrument(self, **kwargs: Any) -> None: ...


def plain(requirement: str) -> str:
    """A requirement as one writes it: `a>=1,<2`."""
    name, bounds = re.match(r"([\w.-]+)([^;]*)", requirement.replace(" ", "")).groups()  # type: ignore[union-attr]
    return name + ",".join(sorted(bounds.split(",")))


@pytest.mark.parametrize(("name", "distribution"), ADAPTERS.items())
def test_a_framework_is_an_extra_of_its_adapter_in_the_versions_that_it_instruments(
    name: str, distribution: str
) -> None:
    asked = requires(distribution) or []
    always = {re.split(r"[^\w-]", requirement)[0] for requirement in asked if "extra" not in requirement}
    assert always <= {"lightningrl", "opentelemetry-instrumentation", "wrapt"}
    extra = {plain(requirement) for requirement in asked if "instruments" in requirement}
    adapter = load_plugins().find("lightningrl_adapters", name).factory()
    assert {plain(dependency) for dependency in adapter.instrumentation_dependencies()} <= extra


def test_an_adapter_without_its_framework_says_what_installs_it(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SITE)
    code = (
        "from lightningrl.errors import PluginError\nfrom lightningrl.plugins import load_plugins\n"
        "from lightningrl_client.runtime.telemetry import load_adapter\n"
        "print(sorted(load_plugins().adapters))\n"
        f"for name in {list(ADAPTERS)!r}:\n    try: load_adapter(name)\n    except PluginError as error: print(error)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    there, *said = ran.stdout.splitlines()
    assert all(repr(name) in there for name in ADAPTERS)
    assert len(said) == len(ADAPTERS)
    for (name, distribution), sentence in zip(ADAPTERS.items(), said, strict=True):
        assert sentence.startswith(f"adapter {name!r} cannot find its framework: No module named ")
        assert sentence.endswith(f"pip install '{distribution}[instruments]'")


def test_a_framework_of_another_version_stops_the_worker_instead_of_leaving_calls_without_roles() -> None:
    with pytest.raises(
        PluginError, match=r"adapter OfAnotherTime cannot be hooked in: .*httpx < 0\.1.*falls outside of that range"
    ):
        instrument(OfAnotherTime(), TracerProvider())
