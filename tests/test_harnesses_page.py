"""docs/how-to/agents/harnesses.md says of each harness what its row says, and of each client what tests/clients pins and expects,
and nothing else; nothing is installed for that."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from lightningrl_client.runtime.harnesses.rows import read_table

ROOT = Path(__file__).resolve().parents[1]
CLIENTS: dict[str, dict[str, Any]] = tomllib.loads((ROOT / "tests" / "clients" / "clients.toml").read_text())
PAGE = (ROOT / "docs" / "how-to" / "agents" / "harnesses.md").read_text()
HEAD = ("| harness", "| client", "|--")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("|") and not line.startswith(HEAD)
]


def version_of(name: str) -> str:
    (file,) = (ROOT / "tests" / "clients").glob(f"{name}_client.*")
    pins = re.search(r"^(?:#|//) dependencies = (\[.*\])$", file.read_text(), re.MULTILINE)
    assert pins is not None, f"{file.name} pins nothing"
    package, version = re.fullmatch(r"(@?[^=@]+)(?:==|@)(.+)", json.loads(pins[1])[0]).groups()  # type: ignore[union-attr]
    return f"{package} {version}"


SDKS = [name for name, client in CLIENTS.items() if not client.keys() & {"command", "harness"}]
HARNESSES = read_table()


@pytest.mark.parametrize("name", SDKS)
def test_the_row_of_a_client_says_its_version_and_its_calls(name: str) -> None:
    (row,) = [row for row in ROWS if row[0] == version_of(name)]
    assert str(CLIENTS[name]["calls"]) == row[-1]


@pytest.mark.parametrize("name", HARNESSES)
def test_the_row_of_a_harness_says_how_it_is_installed_its_calls_and_what_it_needs(name: str) -> None:
    harness = HARNESSES[name]
    (row,) = [row for row in ROWS if row[0] == f"`{name}`"]
    calls = [str(client["calls"]) for client in CLIENTS.values() if client.get("harness") == name] or ["–"]
    sizes = [f"{size:,}" if size else "–" for size in (harness.prompt, harness.context)]
    assert row[1:] == [f"`{harness.install}`", *calls, *sizes]


def test_there_is_no_row_without_a_client() -> None:
    assert len(ROWS) == len(SDKS) + len(HARNESSES)


def test_every_harness_is_tried() -> None:
    assert {client["harness"] for client in CLIENTS.values() if "harness" in client} == set(HARNESSES)
