"""Reads the Dockerfiles that a box without images can honour: FROM, WORKDIR, ENV, COPY, RUN."""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from lightningrl.errors import ConfigError
from lightningrl_tasks_harbor.boxes import PLAIN_PATH

__all__ = ["Build", "CopyStep", "RunStep", "read_dockerfile"]

WITHOUT_EFFECT: Final = frozenset({"CMD", "LABEL", "EXPOSE", "MAINTAINER", "STOPSIGNAL"})
"""Harbor starts a box with a command of its own, and a box has no ports."""
NEEDS_NETWORK: Final = re.compile(
    r"(?<![\w/.-])(apt|apt-get|apk|dnf|yum|pip|pip3|uv|npm|yarn|pnpm|cargo|gem|conda|curl|wget|git\s+clone)(?![\w/.-])"
)
SHOWN: Final = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/proc", "/dev", "/etc/ssl")
"""Folders that a box shows, read-only, of the host."""
VARIABLE: Final = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyStep:
    """Files that are put into the box."""

    files: tuple[tuple[Path, str], ...]
    """Each file or folder, and its name below `target`."""
    target: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStep:
    """A command that prepares the box."""

    command: str
    folder: str
    environment: dict[str, str]


@dataclass(kw_only=True, slots=True)
class Build:
    """A Dockerfile, read."""

    steps: list[CopyStep | RunStep] = field(default_factory=list[CopyStep | RunStep])
    folder: str = "/"
    environment: dict[str, str] = field(
        default_factory=lambda: {"PATH": PLAIN_PATH, "HOME": "/root", "LANG": "C.UTF-8"}
    )


def read_dockerfile(path: Path) -> Build:
    """Read it. Raises ConfigError at the first line that a box without images cannot honour."""
    build, has_base = Build(), False
    for number, text in _iterate_lines(path.read_text(encoding="utf-8")):
        word, _, rest = text.partition(" ")
        word, rest = word.upper(), rest.strip()

        def refuse(why: str, line: int = number, word: str = word) -> ConfigError:
            return ConfigError(f"{path}, line {line}: {word} {why}; run this task with docker or podman")

        if word == "FROM":
            if has_base or rest.startswith("--"):
                raise refuse("a second time (stages) is beyond a box by unshare")
            has_base = True
        elif word == "WORKDIR":
            build.folder = posixpath.normpath(posixpath.join(build.folder, _expand(rest, build)))
            _refuse_shown(build.folder, refuse)
            build.steps.append(CopyStep(files=(), target=build.folder))
        elif word == "ENV":
            build.environment |= _variables(rest, build, refuse)
        elif word == "COPY":
            build.steps += _copy(rest, path.parent, build, refuse)
        elif word == "RUN":
            if rest.startswith(("[", "--")) or "<<" in rest:
                raise refuse("in this form is beyond a box by unshare")
            if match := NEEDS_NETWORK.search(rest):
                raise refuse(f"{match.group(1)!r} wants a network, and a box by unshare has none")
            build.steps.append(RunStep(command=rest, folder=build.folder, environment=dict(build.environment)))
        elif word not in WITHOUT_EFFECT and not (word == "USER" and rest in ("root", "0")):
            raise refuse("is beyond a box by unshare (FROM, WORKDIR, ENV, COPY, RUN)")
    return build


def _iterate_lines(text: str) -> Iterator[tuple[int, str]]:
    """Iterate over instructions with the numbers of their first lines: lines that go on are joined."""
    parts: list[str] = []
    first = 0
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        first = first if parts else number
        parts.append(stripped.removesuffix("\\").strip())
        if not stripped.endswith("\\"):
            yield first, " ".join(parts)
            parts = []
    if parts:
        yield first, " ".join(parts)


def _expand(text: str, build: Build) -> str:
    return VARIABLE.sub(lambda match: build.environment.get(match.group(1) or match.group(2), ""), text)


def _variables(text: str, build: Build, refuse: _Refusal) -> dict[str, str]:
    if "=" not in text.split(maxsplit=1)[0]:
        name, _, value = text.partition(" ")
        return {name: _expand(value.strip(), build)}
    try:
        pairs = [part.partition("=") for part in shlex.split(text)]
    except ValueError:
        raise refuse("has a quote that nothing closes") from None
    return {name: _expand(value, build) for name, _, value in pairs}


def _copy(text: str, context: Path, build: Build, refuse: _Refusal) -> list[CopyStep | RunStep]:
    if text.startswith("--"):
        raise refuse(f"with {text.split()[0]!r} is beyond a box by unshare")
    names = [str(name) for name in json.loads(text)] if text.startswith("[") else shlex.split(text)
    if len(names) < 2:
        raise refuse("wants what and where")
    *sources, given = [_expand(name, build) for name in names]
    target = posixpath.normpath(posixpath.join(build.folder, given))
    folders = {"/", *(step.target for step in build.steps if isinstance(step, CopyStep))}
    is_folder = given.endswith(("/", "/.")) or given in (".", "..") or len(sources) > 1 or target in folders
    files: list[tuple[Path, str]] = []
    for source in sources:
        pattern = posixpath.normpath(source).lstrip("/")
        match = [context] if pattern == "." else sorted(context.glob(pattern))
        if not match or any(not path.resolve().is_relative_to(context.resolve()) for path in match):
            raise refuse(f"{source!r} is no file of {context}")
        for path in match:
            if path.is_dir():
                files += [(child, child.name) for child in sorted(path.iterdir())]
                is_folder = True
            else:
                files.append((path, path.name))
    if not is_folder and len(files) == 1:
        target, name = posixpath.split(target)
        files = [(files[0][0], name)]
    _refuse_shown(target, refuse)
    return [CopyStep(files=tuple(files), target=target)]


def _refuse_shown(target: str, refuse: _Refusal) -> None:
    if any(target == folder or target.startswith(f"{folder}/") for folder in SHOWN):
        raise refuse(f"to {target!r} is beyond a box by unshare, which shows that folder of the host read-only")


class _Refusal(Protocol):
    """Type of what builds a refusal."""

    def __call__(self, why: str) -> ConfigError: ...
