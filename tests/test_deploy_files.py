"""The files of deploy/ and the Dockerfile are what Kubernetes, Docker, Compose and Slurm read, and their commands are ours."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import wait_for
from sizes import PATIENCE_S

from lightningrl.keys import KEY_VARIABLE
from lightningrl_client.commands import parse_workers

yaml: Any = importlib.import_module("yaml")
ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
MANIFEST = DEPLOY / "kubernetes.yaml"
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
        POD: "containers initContainers volumes nodeSelector tolerations restartPolicy terminationGracePeriodSeconds "
        "automountServiceAccountToken securityContext",
        f"{POD}.securityContext": "runAsNonRoot runAsUser runAsGroup fsGroup seccompProfile",
        f"{POD}.containers": "name image command args env envFrom resources volumeMounts workingDir ports imagePullPolicy "
        "securityContext",
        f"{POD}.containers.securityContext": "allowPrivilegeEscalation capabilities readOnlyRootFilesystem privileged",
        f"{POD}.containers.env": "name value valueFrom",
        f"{POD}.containers.env.valueFrom": "secretKeyRef configMapKeyRef fieldRef resourceFieldRef",
        f"{POD}.containers.env.valueFrom.secretKeyRef": "name key optional",
        f"{POD}.containers.resources": "requests limits claims",
    },
}
"""Of Secret v1 and Deployment apps/v1, by path; below a path that is not here names are the user's."""


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    documents = yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8"))
    return {document["kind"]: document for document in documents}


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


def test_pods_run_without_rights_and_without_a_key_of_the_cluster(manifest: dict[str, Any]) -> None:
    pod = manifest["Deployment"]["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    (container,) = pod["containers"]
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def test_workers_in_containers_see_the_agent_alone_and_have_no_rights() -> None:
    worker = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"]["worker"]
    assert worker["volumes"] == ["${AGENT:-./agent}:/agent:ro"]
    assert "/agent/recipe.toml" in worker["command"]
    assert (worker["cap_drop"], worker["security_opt"]) == (["ALL"], ["no-new-privileges"])


def lint(*command: str) -> str:
    ran = subprocess.run(
        [str(Path(sys.executable).parent / command[0]), *command[1:]], capture_output=True, text=True, check=False
    )
    return ran.stdout + ran.stderr


def test_the_linters_of_dockerfiles_and_shell_scripts_find_nothing() -> None:
    assert lint("hadolint", str(ROOT / "Dockerfile")) == ""
    assert lint("shellcheck", str(DEPLOY / "slurm.sbatch")) == ""


def test_a_linter_would_find_something(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM python\nRUN cd /tmp && pip install uv\n")
    assert "DL3006" in lint("hadolint", str(tmp_path / "Dockerfile"))


def test_composes_services_have_fields_of_compose_and_wait_for_the_store_that_the_recipe_is_given() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.postgresql.yaml").read_text(encoding="utf-8"))
    known = {"image", "build", "command", "environment", "depends_on", "healthcheck", "volumes", "ports", "user"}
    assert set(compose) == {"services", "volumes"}
    assert all(set(service) <= known for service in compose["services"].values())
    train, store = compose["services"]["train"], compose["services"]["store"]
    assert train["build"] == "."
    assert train["depends_on"] == {"store": {"condition": "service_healthy"}} and "healthcheck" in store
    user, name = store["environment"]["POSTGRES_USER"], store["environment"]["POSTGRES_DB"]
    assert f"--set=store_url=postgresql://{user}@store/{name}" in train["command"]


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of a job, with programs of the names that the script calls, which write down how."""
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    for name, after in (("lightningrl", "sleep ${LASTS:-0}"), ("scontrol", "true")):
        (bin_ / name).write_text(
            f'#!/bin/bash\ntrap "exit 130" TERM\necho {name} "$@" >> {tmp_path}/calls\n{after} & wait\n'
        )
        (bin_ / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "mine", "RECIPE": "recipe.toml"}
    return {**job, "PATH": f"{bin_}:{os.environ['PATH']}"}


def test_a_slurm_job_trains_and_one_that_was_queued_again_resumes(slurm: dict[str, str], tmp_path: Path) -> None:
    script = ["bash", str(DEPLOY / "slurm.sbatch")]
    subprocess.run(script, cwd=tmp_path, env=slurm, check=True)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "run.json").touch()
    subprocess.run(script, cwd=tmp_path, env=slurm, check=True)
    assert (tmp_path / "calls").read_text().splitlines() == [
        "lightningrl train recipe.toml --run runs/mine",
        "lightningrl train --resume --run runs/mine",
    ]


def test_a_slurm_job_whose_time_ends_stops_its_run_and_queues_itself_again(
    slurm: dict[str, str], tmp_path: Path
) -> None:
    calls = tmp_path / "calls"
    job = subprocess.Popen(["bash", str(DEPLOY / "slurm.sbatch")], cwd=tmp_path, env={**slurm, "LASTS": "60"})
    wait_for(calls.is_file, lambda: "the job does not train")
    job.terminate()
    assert job.wait(PATIENCE_S) == 0
    assert calls.read_text().splitlines()[-1] == "scontrol requeue 7"
