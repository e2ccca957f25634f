"""Files at the root that other programs read: forms, workflow, hooks, citation, container files, one version."""

from __future__ import annotations

import re
import shlex
import stat
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from releases import build_release, find_version_slips, read_version

ROOT = Path(__file__).resolve().parents[1]


def read(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def test_one_version_stands_everywhere() -> None:
    assert find_version_slips(ROOT) == []


def test_a_version_that_was_left_behind_is_named(tmp_path: Path) -> None:
    for name in ("core", "client"):
        (tmp_path / "packages" / name).mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "all"\nversion = "0.2.0"\n')
    (tmp_path / "packages/core/pyproject.toml").write_text('[project]\nname = "lightningrl"\nversion = "0.2.0"\n')
    (tmp_path / "packages/client/pyproject.toml").write_text(
        '[project]\nname = "lightningrl-client"\nversion = "0.2.0"\ndependencies = ["lightningrl[a]==0.1.0"]\n'
    )
    (tmp_path / "CITATION.cff").write_text("version: 0.1.0\n")
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 0.2.0\n")
    slips = [slip.removeprefix(f"{tmp_path}/") for slip in find_version_slips(tmp_path)]
    assert slips == [
        "packages/client/pyproject.toml: needs lightningrl[a]==0.1.0, and core has 0.2.0",
        "CITATION.cff: version 0.1.0, and core has 0.2.0",
    ]


def test_the_workflow_runs_all_parts_of_ci_over_our_pythons_with_pinned_actions() -> None:
    jobs = read(".github/workflows/checks.yml")["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    run = {step["run"].removesuffix(" PYTHON=python") for step in steps if "run" in step}
    parts = set(re.findall(r"^ *(make [\w-]+)$", (ROOT / ".ci/run").read_text(encoding="utf-8"), re.MULTILINE))
    assert parts <= run
    assert jobs["test"]["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]
    actions = [step["uses"] for step in steps if "uses" in step]
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action) for action in actions)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert {command.split()[1] for command in run} <= targets


def test_the_changelog_has_what_was_released_and_what_is_next_in_short() -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings in (["0.1.0"], ["Unreleased", "0.1.0"])
    assert len((ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split()) <= 1_000


def test_issue_forms_have_what_github_asks_for() -> None:
    forms = [file.name for file in (ROOT / ".github/ISSUE_TEMPLATE").iterdir() if file.name != "config.yml"]
    assert sorted(forms) == ["bug.yml", "idea.yml"]
    for name in forms:
        form = read(f".github/ISSUE_TEMPLATE/{name}")
        assert form["name"]
        assert form["description"]
        ids = [field["id"] for field in form["body"]]
        assert len(set(ids)) == len(ids)
        assert all(field["attributes"]["label"] for field in form["body"])
    assert "CHANGELOG" in (ROOT / ".github/PULL_REQUEST_TEMPLATE.md").read_text(encoding="utf-8")


def test_hooks_before_a_commit_run_what_is_there() -> None:
    hooks = [hook for repo in read(".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]
    assert {"ruff", "ruff-format", "words"} <= {hook["id"] for hook in hooks}
    for hook in hooks:
        words = shlex.split(hook["entry"])
        assert words[0].startswith(".venv/bin/")
        assert all((ROOT / word).exists() for word in words[1:] if word.endswith(".py"))


def test_the_citation_is_one_by_its_schemas_required_keys() -> None:
    citation = read("CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    assert citation["message"]
    assert citation["title"]
    assert citation["authors"]
    assert str(citation["version"]) == read_version(ROOT)
    assert {
        "cff-version",
        "message",
        "title",
        "authors",
        "version",
        "license",
        "type",
        "keywords",
        "references",
    } >= set(citation)


def test_container_files_name_plain_images_packages_that_exist_and_commands_that_we_have() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    images = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    assert images
    assert all(re.fullmatch(r"python:3\.1[1-3]-slim-\w+", image) for image in images)
    packages = re.findall(r"\./(packages/[\w-]+)", text)
    assert all((ROOT / package / "pyproject.toml").is_file() for package in packages)
    assert f"=={read_version(ROOT)}" in text
    assert re.search(r"^USER \d+$", text, re.MULTILINE), "not root"
    services = read("compose.yaml")["services"]
    assert (services["trainer"]["command"][0], services["worker"]["command"][0]) == ("train", "work")
    assert services["trainer"]["ports"] == ["127.0.0.1:8600:8600"], "on the loopback alone"


def test_a_package_is_built_as_wheel_and_sdist_with_its_readme_and_licence_name(
    tmp_path: Path, certificates: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
    for name, value in certificates.items():  # the build's own tools come from the network
        monkeypatch.setenv(name, value)
    wheel, sdist = sorted(
        build_release(ROOT, tmp_path, only=["lightningrl-credit"]), key=lambda file: file.suffix != ".whl"
    )
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(next(name for name in archive.namelist() if name.endswith("METADATA"))).decode()
    assert f"Version: {read_version(ROOT)}\n" in metadata
    assert "License-Expression: Apache-2.0" in metadata
    assert "Description-Content-Type: text/markdown" in metadata
    with tarfile.open(sdist) as archive:
        assert any(name.endswith("/README.md") for name in archive.getnames())


@pytest.mark.parametrize("script", [".ci/run", "scripts/install.sh"])
def test_scripts_that_are_started_by_name_may_be(script: str) -> None:
    assert (ROOT / script).stat().st_mode & stat.S_IXUSR
