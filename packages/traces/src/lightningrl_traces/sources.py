"""The files of a source of traces, and the importer of each: named, or told by the file's beginning."""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lightningrl.errors import ConfigError
from lightningrl.plugins import PluginManager
from lightningrl_traces.documents import UNREADABLE, begin, refuse
from lightningrl_traces.records import Sample, TraceImporter

__all__ = ["HOOK", "Source", "fingerprint", "open_source_files"]

HOOK: Final = "lightningrl_trace_importers"
_IGNORED: Final = (".", "_")


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A file with what reads it."""

    path: Path
    form: str
    """Name of the importer."""
    importer: TraceImporter


def open_source_files(source: Path, form: str | None, plugins: PluginManager) -> tuple[Source, ...]:
    """Find the files of a source, a file or a folder, in the order of their names. Raises ConfigError naming the file
    that no importer knows."""
    if not source.exists():
        raise ConfigError(f"no file or folder {str(source)!r}; name the export to import")
    paths = [source] if source.is_file() else [path for path in sorted(source.rglob("*")) if _is_data(path, source)]
    if not paths:
        raise ConfigError(f"{str(source)!r} holds no files; name the export to import")
    importers: Mapping[str, TraceImporter] = {
        name: record.build() for name, record in plugins.records(HOOK).items() if form in (None, name)
    }
    if not importers:
        plugins.find(HOOK, form or "")
    return tuple(_told(path, form, importers) for path in paths)


def fingerprint(sources: Sequence[Source]) -> str:
    """Digest of names, formats, sizes and times: a source that has changed is another one."""
    parts: list[Any] = [
        (str(item.path.resolve()), item.form, (stat := item.path.stat()).st_size, stat.st_mtime_ns) for item in sources
    ]
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _is_data(path: Path, root: Path) -> bool:
    return path.is_file() and not any(part.startswith(_IGNORED) for part in path.relative_to(root).parts)


def _told(path: Path, form: str | None, importers: Mapping[str, TraceImporter]) -> Source:
    if form is not None:
        return Source(path=path, form=form, importer=importers[form])
    try:
        head, first = begin(path)
    except UNREADABLE as error:
        raise refuse(path, "at its beginning", error) from error
    sample = Sample(path=path, head=head, first=first)
    for name, importer in importers.items():
        if importer.fits(sample):
            return Source(path=path, form=name, importer=importer)
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ConfigError(f"{str(path)!r} is text in UTF-16; save the file as UTF-8")
    problem = "is empty" if not head.strip() else "is of no format that an importer knows"
    raise ConfigError(f"{str(path)!r} {problem}; say which it is with --format: {', '.join(importers)}")
