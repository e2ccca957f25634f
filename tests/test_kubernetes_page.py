"""The manifest of docs/how-to/cluster.md is YAML of fields that Kubernetes has, and its command is one of ours."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from lightningrl.keys import KEY_VARIABLE
from lightningrl_client.commands import parse_workers

yaml: Any = importlib.import_module("yaml")
PAGE = (Path(__file__).resolve().parents[1] / "docs" / "how-to" / "cluster.md").read_text(encoding="utf-8")
POD = "spec.template.spec"
FIELDS = {
    "Secret": {
        "": "apiVersion kind metadata type data stringData immutable",
        "metadata": "name namespace labels annotations",
    },
    "Deployment": {
        "": "apiVersion kind metadata spec",
        "metadata": "name namespace labels annotations",
        "spec": "replicas selector template strategy minReadySeconds revisionHistoryLimit progressDeadlineSeconds paused",
        "spec.selector": "matchLabels matchExpressions",
        "spec.template": "metadata spec",
        "spec.template.metadata": "labels annotations",
        POD: "containers initContainers volumes nodeSelector tolerations restartPolicy terminationGracePeriodSeconds",
        f"{POD}.containers": "name image command args env envFrom resources volumeMounts workingDir ports imagePullPolicy",
        f"{POD}.containers.env": "name value valueFrom",
        f"{POD}.containers.env.valueFrom": "secretKeyRef configMapKeyRef fieldRef resourceFieldRef",
        f"{POD}.containers.env.valueFrom.secretKeyRef": "name key optional",
        f"{POD}.containers.resources": "requests limits claims",
    },
}
"""Of Secret v1 and Deployment apps/v1, by path; below a path that is not here names are the user's."""


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return {found["kind"]: found for found in yaml.safe_load_all(block)}


def unknown_fields(value: Any, known: dict[str, str], path: str = "") -> list[str]:
    if isinstance(value, list):
        return [name for one in value for name in unknown_fields(one, known, path)]
    if not isinstance(value, dict) or path not in known:
        return []
    below = {name: f"{path}.{name}".lstrip(".") for name in value}
    wrong = [place for name, place in below.items() if name not in known[path].split()]
    return wrong + [name for key, place in below.items() for name in unknown_fields(value[key], known, place)]


def test_its_fields_are_kubernetes_own(manifest: dict[str, Any]) -> None:
    assert {kind: unknown_fields(found, FIELDS[kind]) for kind, found in manifest.items()} == {
        "Secret": [],
        "Deployment": [],
    }
    assert {kind: found["apiVersion"] for kind, found in manifest.items()} == {"Secret": "v1", "Deployment": "apps/v1"}


def test_a_misspelt_field_would_be_told() -> None:
    assert unknown_fields({"spec": {"template": {"spec": {"container": []}}}}, FIELDS["Deployment"]) == [
        f"{POD}.container"
    ]


def test_it_runs_our_command_with_the_key_of_its_secret(manifest: dict[str, Any]) -> None:
    spec = manifest["Deployment"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    assert container["command"][:2] == ["lightningrl", "work"]
    options = dict(zip(container["args"][::2], container["args"][1::2], strict=True))
    assert set(options) == {"--server", "--workers"} and parse_workers(options["--workers"]) == {"runtime.workers": 8}
    (variable,) = container["env"]
    source = variable["valueFrom"]["secretKeyRef"]
    assert (variable["name"], source["name"]) == (KEY_VARIABLE, manifest["Secret"]["metadata"]["name"])
    assert source["key"] in manifest["Secret"]["stringData"]
