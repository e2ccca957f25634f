"""Reads one task folder in Harbor's format (`schema_version` 1.0 to 1.4), and refuses what no box here can run.

task.toml · instruction.md · environment/Dockerfile · solution/solve.sh · tests/test.sh
"""

from __future__ import annotations

import os
import posixpath
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lightningrl.errors import ConfigError

__all__ = ["TaskFolder", "is_task_folder", "read_task_folder"]

SCHEMAS: Final = ("1.0", "1.1", "1.2", "1.3", "1.4")
TEMPLATE: Final = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")
SECTIONS: Final[Mapping[str, frozenset[str]]] = {
    "agent": frozenset({"timeout_sec", "user", "network_mode", "allowed_hosts"}),
    "verifier": frozenset({"timeout_sec", "env", "user", "network_mode", "allowed_hosts", "environment_mode",
                           "environment", "collect"}),
    "environment": frozenset({"build_timeout_sec", "docker_image", "os", "cpus", "memory_mb", "memory", "storage_mb",
                              "storage", "gpus", "gpu_types", "tpu", "mcp_servers", "env", "skills_dir", "healthcheck",
                              "workdir", "network_mode", "allowed_hosts", "allow_internet"}),
    "solution": frozenset({"env"}),
}  # fmt: skip
"""Keys that Harbor 0.26 reads; metadata and the package's own section change no rollout."""
UNITS: Final = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskFolder:
    """A task that can be run."""

    path: Path
    name: str
    """The name of its package, `org/name`, or of its folder."""
    instruction: str
    image: str | None
    """An image that is there already; None = `environment/Dockerfile`."""
    folder: str | None
    """Where commands run; None = the image's own."""
    environment: Mapping[str, str]
    verifier_environment: Mapping[str, str]
    solution_environment: Mapping[str, str]
    agent_timeout_s: float | None
    """Time of all the agent's commands together."""
    verifier_timeout_s: float
    build_timeout_s: float
    storage_mb: int | None
    memory_mb: int | None
    cpus: float | None
    artifacts: tuple[str, ...]
    """Paths beside the working folder that the tests see."""
    metadata: Mapping[str, Any]

    @property
    def has_solution(self) -> bool:
        """True where gold is known: `solution/solve.sh`."""
        return (self.path / "solution" / "solve.sh").is_file()


def is_task_folder(path: Path) -> bool:
    """True for a folder with a `task.toml`."""
    return (path / "task.toml").is_file()


def read_task_folder(path: Path) -> TaskFolder:
    """Read a task. Raises ConfigError, one sentence, for one that is broken or that no box here can run."""
    try:
        table = tomllib.loads((path / "task.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"task {path}: task.toml cannot be read: {error}; mend it") from None
    _refuse_shape(path, table)
    agent, verifier, environment, solution = (_section(path, table, name) for name in SECTIONS)
    _refuse_environment(path, environment)
    _refuse_phases(path, agent, verifier)
    package = table.get("task") or {}
    return TaskFolder(
        path=path,
        name=str(package.get("name") or path.name),
        instruction=(path / "instruction.md").read_text(encoding="utf-8"),
        image=environment.get("docker_image"),
        folder=environment.get("workdir"),
        environment=_variables(path, "environment", environment),
        verifier_environment=_variables(path, "verifier", verifier),
        solution_environment=_variables(path, "solution", solution),
        agent_timeout_s=_number(path, "agent.timeout_sec", agent.get("timeout_sec")),
        verifier_timeout_s=_number(path, "verifier.timeout_sec", verifier.get("timeout_sec")) or 600.0,
        build_timeout_s=_number(path, "environment.build_timeout_sec", environment.get("build_timeout_sec")) or 600.0,
        storage_mb=_megabytes(path, environment, "storage"),
        memory_mb=_megabytes(path, environment, "memory"),
        cpus=_number(path, "environment.cpus", environment.get("cpus")),
        artifacts=_artifacts(path, table.get("artifacts", [])),
        metadata=table.get("metadata") or {},
    )


def _refuse(path: Path, what: str, remedy: str = "leave this task out") -> ConfigError:
    return ConfigError(f"task {path}: {what}; {remedy}")


def _refuse_shape(path: Path, table: Mapping[str, Any]) -> None:
    schema = str(table.get("schema_version", table.get("version", SCHEMAS[-1])))
    if schema not in SCHEMAS:
        raise _refuse(
            path,
            f"schema_version {schema!r} is none of {', '.join(SCHEMAS)}",
            "install a newer lightningrl-tasks-harbor",
        )
    if table.get("steps") or (path / "steps").is_dir():
        raise _refuse(path, "it has several steps, and a rollout here has one instruction")
    for name in ("instruction.md", "tests/test.sh"):
        if not (path / name).is_file():
            raise _refuse(
                path, f"no {name!r}", "a task needs task.toml, instruction.md, environment/ and tests/test.sh"
            )
    for name in ("trajectory.json", "environment/docker-compose.yaml"):
        if (path / name).exists():
            raise _refuse(path, f"{name!r} is beyond a box of one container and a fresh dialogue")
    has_image = (table.get("environment") or {}).get("docker_image")
    if not has_image and not (path / "environment" / "Dockerfile").is_file():
        raise _refuse(path, "neither environment/Dockerfile nor environment.docker_image", "give it one")


def _section(path: Path, table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = table.get(name) or {}
    if not isinstance(section, Mapping):
        raise _refuse(path, f"[{name}] is no table", "mend task.toml")
    if unknown := sorted(set(section) - SECTIONS[name]):
        raise _refuse(
            path, f"[{name}] has {', '.join(map(repr, unknown))}, which Harbor 0.26 does not know", "mend task.toml"
        )
    return section


def _refuse_environment(path: Path, environment: Mapping[str, Any]) -> None:
    if str(environment.get("os", "linux")).lower() != "linux":
        raise _refuse(path, f"environment.os is {environment['os']!r}, and boxes are Linux")
    for key in ("gpus", "gpu_types", "tpu", "mcp_servers", "skills_dir", "healthcheck"):
        if environment.get(key):
            raise _refuse(path, f"environment.{key} is beyond the boxes of this package")


def _refuse_phases(path: Path, agent: Mapping[str, Any], verifier: Mapping[str, Any]) -> None:
    if verifier.get("environment") or verifier.get("environment_mode") == "separate" or verifier.get("collect"):
        raise _refuse(
            path, "its verifier wants an environment of its own, and tests/test.sh runs in the task's own here"
        )
    for name, section in (("agent", agent), ("verifier", verifier)):
        if section.get("user") not in (None, "root", 0, "0"):
            raise _refuse(path, f"{name}.user is {section['user']!r}, and a box has root alone")
        if section.get("network_mode") not in (None, "no-network"):
            raise _refuse(path, f"{name}.network_mode is {section['network_mode']!r}, and boxes are without a network")


def _artifacts(path: Path, listed: Any) -> tuple[str, ...]:
    """Paths in the box, of texts or of tables with a `source`."""
    sources: list[str] = []
    for item in listed if isinstance(listed, list) else [listed]:
        source = item.get("source") if isinstance(item, Mapping) else item
        if not isinstance(source, str) or source[:1] != "/" or source in ("/", "//") or "/.." in source:
            raise _refuse(path, f"artifacts has {source!r}, which is no absolute path", "mend task.toml")
        sources.append(posixpath.normpath(source))
    return tuple(sources)


def _variables(path: Path, name: str, section: Mapping[str, Any]) -> dict[str, str]:
    """Variables of a section; `${NAME}` and `${NAME:-default}` are read from this process."""
    variables: dict[str, str] = {}
    for key, value in (section.get("env") or {}).items():
        match = TEMPLATE.fullmatch(str(value))
        given = os.environ.get(match.group(1), match.group(2)) if match else str(value)
        if given is None:
            raise _refuse(
                path, f"{name}.env.{key} wants the variable {value}, which is not set", f"export {value[2:-1]}"
            )
        variables[key] = given
    return variables


def _number(path: Path, key: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise _refuse(path, f"{key} is {value!r}, which is no number above 0", "mend task.toml")
    return float(value)


def _megabytes(path: Path, environment: Mapping[str, Any], name: str) -> int | None:
    """`storage_mb`, or its older spelling `storage = "1G"`."""
    if f"{name}_mb" in environment:
        number = _number(path, f"environment.{name}_mb", environment[f"{name}_mb"])
        return None if number is None else int(number)
    if name not in environment:
        return None
    text = str(environment[name]).strip().upper()
    try:
        return int(float(text[:-1]) * UNITS[text[-1:]])
    except (KeyError, ValueError):
        raise _refuse(
            path, f"environment.{name} is {environment[name]!r}, not '1G' or '512M'", "mend task.toml"
        ) from None
