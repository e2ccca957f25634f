"""The recipe's folder, packed here and unpacked on nodes that do not share it. Imports no Ray."""

from __future__ import annotations

import fnmatch
import hashlib
import io
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from lightningrl.errors import ConfigError

__all__ = ["MOST_BYTES", "pack_folder", "unpack_folder"]

MOST_BYTES = 100 * 2**20
"""Largest weight of a recipe's folder on its way to the nodes."""
NEVER = ("__pycache__", ".*", "runs", "node_modules")
"""Names that are left out, wherever they lie: caches, hidden files, environments, run folders."""


def pack_folder(folder: Path, *, exclude: Sequence[str] = (), most_bytes: int = MOST_BYTES) -> bytes:
    """The folder as a tar archive; `exclude` holds patterns of paths below it (`data/*`). Raises ConfigError where it
    is too big."""
    files = list(iterate_files(folder, exclude))
    sizes = {file: file.stat().st_size for file in files}
    if sum(sizes.values()) > most_bytes:
        largest = max(sizes, key=lambda file: sizes[file])
        raise ConfigError(
            f"recipe folder {str(folder)!r} has {_mebibytes(sum(sizes.values()))} to ship to the Ray nodes; at most "
            f"{_mebibytes(most_bytes)} go (largest: {str(largest.relative_to(folder))!r}, "
            f"{_mebibytes(sizes[largest])}); leave files out "
            "with runtime.launchers.ray.exclude, or share the folder between the nodes and set "
            "runtime.launchers.ray.code='shared'"
        )
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", dereference=True) as tar:
        for file in files:
            tar.add(file, arcname=str(file.relative_to(folder)), recursive=False)
    return archive.getvalue()


def iterate_files(folder: Path, exclude: Sequence[str]) -> Iterator[Path]:
    """Files to be shipped, in a fixed order."""
    for root, folders, names in os.walk(folder):
        here = Path(root)
        folders[:] = sorted(name for name in folders if _goes(here / name, folder, exclude))
        for name in sorted(names):
            if _goes(here / name, folder, exclude) and (here / name).is_file():
                yield here / name


def unpack_folder(archive: bytes) -> Path:
    """Where the archive lies unpacked on this machine; the same archive is unpacked once."""
    home = Path(tempfile.gettempdir()) / f"lightningrl-code-{os.getuid()}"
    home.mkdir(mode=0o700, exist_ok=True)
    if home.stat().st_uid != os.getuid():
        raise ConfigError(f"folder {str(home)!r} belongs to another user; remove it, or set TMPDIR on that node")
    final = home / hashlib.sha256(archive).hexdigest()[:20]
    if final.is_dir():
        return final
    scratch = Path(tempfile.mkdtemp(dir=home))
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(scratch, filter="data")
    try:
        scratch.rename(final)
    except OSError:  # another worker was faster
        shutil.rmtree(scratch)
        if not final.is_dir():
            raise
    return final


def _goes(path: Path, folder: Path, exclude: Sequence[str]) -> bool:
    below = path.relative_to(folder).as_posix()
    return not any(fnmatch.fnmatch(path.name, pattern) for pattern in NEVER) and not any(
        fnmatch.fnmatch(below, pattern.rstrip("/")) for pattern in exclude
    )


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
