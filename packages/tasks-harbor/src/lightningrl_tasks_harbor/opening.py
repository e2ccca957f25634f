"""Opens the box of a task: by a command that runs containers, else by `unshare`, and says once which it is."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final, Literal

from lightningrl.errors import ConfigError
from lightningrl_tasks_harbor.boxes import Box, BoxError, pack
from lightningrl_tasks_harbor.container_box import ContainerBox, build_image, find_engine, remove_orphans
from lightningrl_tasks_harbor.dockerfile import Build, CopyStep, read_dockerfile
from lightningrl_tasks_harbor.namespace_box import NamespaceBox
from lightningrl_tasks_harbor.task_folder import TaskFolder

__all__ = ["BoxSettings", "OpenBox", "check_box", "open_box"]

logger = logging.getLogger(__name__)

STORAGE_MB: Final = 512
"""Where the task names none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BoxSettings:
    """Settings of all boxes of a source."""

    box: Literal["auto", "container", "unshare"] = "auto"
    """`auto` = a container where docker or podman runs one, else `unshare`."""
    trusted: bool | None = None
    """False = a task may be hostile: only a container will do. None = nobody said."""
    network: bool = False
    """True = containers have the network of the machine; a box by `unshare` never has one."""
    storage_mb: int = STORAGE_MB
    """Files of a box, where its task names no size; in memory for a box by `unshare`."""
    host_folders: tuple[str, ...] = ()
    """Further folders of the host that a box by `unshare` shows, read-only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenBox:
    """An open box, and where and how its task's commands run."""

    box: Box
    folder: str
    """Empty = the image's own."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    settings: BoxSettings = field(default_factory=BoxSettings)
    """Settings by which another is opened, for the tests."""


def check_box(task: TaskFolder, settings: BoxSettings) -> str:
    """Name what would run the task: `unshare`, or a container command. Raises ConfigError where nothing would."""
    engine = None if settings.box == "unshare" else find_engine()
    if engine is not None:
        return engine
    if settings.box == "container":
        raise ConfigError(
            "box = 'container': neither docker nor podman runs a container here; start one, or take box = 'unshare'"
        )
    if settings.trusted is False:
        raise ConfigError(
            "trusted = false: a box by unshare shares the kernel and shows the host's programs; start docker or podman"
        )
    if settings.network:
        raise ConfigError("network = true: a box by unshare has none; start docker or podman")
    if not sys.platform.startswith("linux"):
        raise ConfigError("no box for this task: unshare is Linux's; start docker or podman")
    if task.image is not None:
        raise ConfigError(f"task {task.path}: a box by unshare has no images ({task.image!r}); start docker or podman")
    build = _read_build(task)
    if (task.folder or build.folder) == "/":
        raise ConfigError(f"task {task.path}: no WORKDIR, and its tests see its working folder alone; give it one")
    return "unshare"


@contextmanager
def open_box(task: TaskFolder, settings: BoxSettings) -> Iterator[OpenBox]:
    """Open the task's box; it ends with the block, and with this process however that ends.

    Raises ConfigError for a task that no box here runs, BoxError where its box does not come up."""
    kind = check_box(task, settings)
    _say_once(kind, settings.trusted)
    opened = _open_by_unshare(task, settings) if kind == "unshare" else _open_container(kind, task, settings)
    try:
        yield opened
    finally:
        opened.box.close()


@lru_cache(maxsize=8)
def _say_once(kind: str, trusted: bool | None) -> None:
    if kind == "unshare":
        asked = "" if trusted else "; say trusted = true where you know these tasks"
        logger.warning(
            "boxes by unshare: no network, the host's kernel and programs; for tasks that you trust%s", asked
        )
    else:
        removed = remove_orphans(kind)
        logger.info("boxes by %s; %d of earlier processes removed", kind, removed)


def _read_build(task: TaskFolder) -> Build:
    return read_dockerfile(task.path / "environment" / "Dockerfile")


def _open_by_unshare(task: TaskFolder, settings: BoxSettings) -> OpenBox:
    build = _read_build(task)
    box = NamespaceBox(
        storage_mb=task.storage_mb or settings.storage_mb,
        memory_mb=task.memory_mb,
        host_folders=settings.host_folders,
    )
    try:
        for step in build.steps:
            if isinstance(step, CopyStep):
                box.put(pack(step.files), step.target)
                continue
            ended = box.run(
                step.command, folder=step.folder, environment=step.environment, timeout_s=task.build_timeout_s
            )
            if ended.status != 0 or ended.is_late:
                complaint = (ended.output.strip().splitlines() or ["no message"])[-1]
                raise BoxError(f"task {task.path}: RUN {step.command!r} ended with status {ended.status}: {complaint}")
        folder = task.folder or build.folder
        box.put(pack(()), folder)
    except BaseException:
        box.close()
        raise
    return OpenBox(box=box, folder=folder, environment={**build.environment, **task.environment}, settings=settings)


def _open_container(engine: str, task: TaskFolder, settings: BoxSettings) -> OpenBox:
    image = task.image or build_image(engine, task.path / "environment", task.build_timeout_s)
    box = ContainerBox(
        engine,
        image,
        storage_mb=task.storage_mb or settings.storage_mb,
        memory_mb=task.memory_mb,
        cpus=task.cpus,
        network=settings.network,
    )
    return OpenBox(box=box, folder=task.folder or "", environment=dict(task.environment), settings=settings)
