"""`lightningrl import-traces`: a source of traces, read, joined, masked, graded and kept as a run.

source ─► spool (scratch, beside the folder) ─► rollouts ─► store, grades.jsonl ─► renamed to the folder

store.sqlite   the rollouts        grades.jsonl   a line for each call: rollout_id, call_id, grade, reasons
run.json       where they came from               recipe.json    a recipe of no agent, whose policy is never trained

The folder is there when all of it is. A killed import goes on by the same command; one that is refused leaves nothing.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec

from lightningrl.errors import ConfigError, RunFolderError
from lightningrl.files import lock, write_durably
from lightningrl.plugins import PluginManager
from lightningrl.recipe import Recipe
from lightningrl_runs.origin import read_import
from lightningrl_traces.documents import UNREADABLE, begin, refuse
from lightningrl_traces.grades import GradedCall, Reason, grade_call
from lightningrl_traces.joins import ForeignRollout, history_before, history_of, join_records
from lightningrl_traces.records import Call, Sample, TraceImporter
from lightningrl_traces.run_store import FOREIGN, TraceStore, score_of
from lightningrl_traces.secrets import mask_call, mask_ending, mask_id, mask_text, mask_tool
from lightningrl_traces.spool import Spool

__all__ = ["ImportReport", "Source", "import_traces", "open_source_files"]

_ROLLOUTS: Final = 32
_BYTES: Final = 4 * 2**20
"""Rollouts, and bytes of their records, that are kept in one commit."""
_HOOK: Final = "lightningrl_trace_importers"
_PLAIN: Final = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A file with what reads it."""

    path: Path
    form: str
    """Name of the importer."""
    importer: TraceImporter


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportReport:
    """Result of an import."""

    folder: Path
    formats: tuple[str, ...]
    rollouts: int
    grades: Counter[str]
    reasons: Counter[tuple[str, str]]
    """Calls by grade and reason."""
    facts: Counter[str] = field(default_factory=Counter[str])
    """Oddities by sentence: duplicates, traces without a call, circles."""
    scores: tuple[str, ...] = ()
    """Names of all scores."""
    reward: str | None = None
    """The score that is the reward; None = none stands alone."""
    is_old: bool = False
    """The folder held this import already."""


def import_traces(
    source: Path, into: Path, form: str | None, plugins: PluginManager, reward: str | None = None
) -> ImportReport:
    """Import a source into a new folder. `reward`: name of the score that is the reward; None = the only score that the
    traces have. Raises ConfigError for what cannot be read, RunFolderError for a folder that holds something else."""
    sources = open_source_files(source, form, plugins)
    formats = tuple(dict.fromkeys(item.form for item in sources))
    mark = _fingerprint(sources) if reward is None else f"{_fingerprint(sources)} {reward}"
    if into.exists() and (not into.is_dir() or any(into.iterdir())):
        if _read_mark(into) != mark:
            raise RunFolderError(f"folder {str(into)!r} holds something already; name a new folder with --into")
        return ImportReport(folder=into, formats=formats, rollouts=0, grades=Counter(), reasons=Counter(), is_old=True)
    work = into.parent / f".{into.name}.importing"
    with _scratch(work, mark) as spool:
        try:
            _spool(sources, spool)
            _link(spool)
            chosen, names = _find_reward(spool, reward)
            asyncio.run(_make_rollouts(work, spool, chosen, is_asked=reward is not None))
            report = replace(_count(spool, into, formats), scores=names, reward=chosen)
        except Exception:
            shutil.rmtree(work, ignore_errors=True)
            raise
        _write_folder(work, mark, source, formats, (lines for lines, _ in spool.grades()))
    for scratch in work.glob(".spool*"):
        scratch.unlink()
    if into.is_dir():
        into.rmdir()
    work.rename(into)
    return report


def open_source_files(source: Path, form: str | None, plugins: PluginManager) -> tuple[Source, ...]:
    """Find the files of a source, a file or a folder, in the order of their names. Raises ConfigError naming the file
    that no importer knows."""
    if not source.exists():
        raise ConfigError(f"no file or folder {str(source)!r}; name the export to import")
    paths = [source] if source.is_file() else [path for path in sorted(source.rglob("*")) if _is_data(path, source)]
    if not paths:
        raise ConfigError(f"{str(source)!r} holds no files; name the export to import")
    importers: Mapping[str, TraceImporter] = {
        name: record.build() for name, record in plugins.records(_HOOK).items() if form in (None, name)
    }
    if not importers:
        plugins.find(_HOOK, form or "")
    return tuple(_told(path, form, importers) for path in paths)


def _fingerprint(sources: Sequence[Source]) -> str:
    """Digest of names, formats, sizes and times: a source that has changed is another one."""
    parts = [
        (str(item.path.resolve()), item.form, (stat := item.path.stat()).st_size, stat.st_mtime_ns) for item in sources
    ]
    return blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _is_data(path: Path, root: Path) -> bool:
    return path.is_file() and not any(part.startswith((".", "_")) for part in path.relative_to(root).parts)


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


@contextmanager
def _scratch(work: Path, mark: str) -> Iterator[Spool]:
    """Open the scratch folder of an import, as a killed one left it, or anew where that was of another source."""
    work.parent.mkdir(parents=True, exist_ok=True)
    with (work.parent / f"{work.name}.lock").open("w") as file:
        try:
            lock(file)
        except BlockingIOError:
            raise RunFolderError(f"another import into {str(work)!r} is running; wait for it") from None
        work.mkdir(mode=0o700, exist_ok=True)
        spool = Spool(work / ".spool.sqlite")
        if spool.get("mark") not in (None, mark):
            spool.close()
            shutil.rmtree(work)
            work.mkdir(mode=0o700)
            spool = Spool(work / ".spool.sqlite")
        spool.put("mark", mark)
        spool.commit()
        try:
            yield spool
        finally:
            spool.close()
            (work.parent / f"{work.name}.lock").unlink(missing_ok=True)


def _spool(sources: Sequence[Source], spool: Spool) -> None:
    for number, source in enumerate(sources):
        key = f"file {number}"
        if (done := spool.get(key) or "0") != "all":
            records = islice(source.importer.read(source.path), int(done), None)
            traced = (item if item.trace_id else replace(item, trace_id=_UNTRACED) for item in records)
            spool.add_all(traced, key, int(done))


_UNTRACED: Final = "records-without-a-trace"


def _link(spool: Spool) -> None:
    """Find traces that go on from others, and calls that other traces have word for word."""
    if spool.get("scores") is not None:
        return
    of_traces, of_calls = set[str](), set[str]()
    for trace in spool.traces():
        rollout = join_records(trace, spool.records([trace]))
        calls = rollout.calls
        of_traces |= rollout.ending.rewards.keys()
        of_calls |= {name for call in calls for name in call.rewards}
        histories = [(history_of(call), call.started_at + call.duration_s) for call in calls if call.answer]
        before = history_before(calls[0]) if calls else None
        spool.add_histories(trace, histories, None if before is None else (before, calls[0].started_at))
    spool.link()
    spool.put("scores", msgspec.json.encode([sorted(of_traces), sorted(of_calls - of_traces)]).decode())
    spool.commit()


def _find_reward(spool: Spool, asked: str | None) -> tuple[str | None, tuple[str, ...]]:
    """Return the name of the score that is the reward, None where none stands alone, and all names."""
    of_traces, of_calls = msgspec.json.decode(spool.get("scores") or "[[], []]")
    names = tuple(mask_text(name).text for name in (*of_traces, *of_calls))
    if asked is not None and asked not in names:
        there = f"there are: {', '.join(names)}" if names else "the traces have no scores"
        raise ConfigError(f"no score is named {asked!r}; {there}")
    return asked or (names[0] if len(names) == len(of_traces) == 1 else None), names


async def _make_rollouts(work: Path, spool: Spool, reward: str | None, *, is_asked: bool) -> None:
    """Keep rollouts in the store, then their grades; a kill between repeats what the store takes once."""
    store = await TraceStore.open(f"sqlite:///{(work / 'store.sqlite').resolve()}")
    try:
        for batch in _batches(spool):
            await store.add_rollouts(batch)
            scores = [score_of(rollout, reward, is_asked=is_asked) for rollout, _ in batch]
            await store.set_scores([score for score in scores if score is not None])
            for rollout, graded in batch:
                oddities = {
                    "calls told twice, kept once": rollout.duplicates,
                    "spans whose parents form a circle": rollout.circles,
                    "calls with a clock that is late": rollout.skewed,
                    "records without a trace id, taken as one trace": int(rollout.id == _UNTRACED),
                }
                lines = "".join(_line(rollout.id, item) for item in graded)
                spool.add_grades(rollout.id, lines, {name: count for name, count in oddities.items() if count})
            spool.commit()
    finally:
        await store.close()


def _batches(spool: Spool) -> Iterator[list[tuple[ForeignRollout, list[GradedCall]]]]:
    """Join, mask and grade the rollouts that are not kept yet, a few at a time."""
    batch: list[tuple[ForeignRollout, list[GradedCall]]] = []
    held = 0
    for traces in spool.rollouts():
        rollout_id = _rollout_id(traces[0])
        if spool.is_graded(rollout_id):
            continue
        rollout = join_records(rollout_id, spool.records(traces))
        if not rollout.calls:
            spool.add_grades(rollout_id, "", {"traces without a model call": 1})
            continue
        batch.append(_graded(rollout, traces, spool))
        held += spool.size(traces)
        if len(batch) == _ROLLOUTS or held > _BYTES:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def _graded(rollout: ForeignRollout, traces: Sequence[str], spool: Spool) -> tuple[ForeignRollout, list[GradedCall]]:
    """Mask and grade a rollout; each call gets an id that no other of it has."""
    calls: list[Call] = []
    seen: set[str] = set()
    for number, call in enumerate(rollout.calls):
        call_id = call.id if call.id and call.id not in seen else f"{call.id or 'call'}-{number}"
        seen.add(call_id)
        is_repeated = bool(call.answer) and spool.is_told_before(history_of(call), traces)
        notes = (*call.notes, Reason.REPEATED.value) if is_repeated else call.notes
        calls.append(mask_call(replace(call, id=call_id, notes=notes)))
    masked = replace(
        rollout,
        calls=tuple(calls),
        tools=tuple(mask_tool(tool) for tool in rollout.tools),
        ending=mask_ending(rollout.ending),
    )
    return masked, [grade_call(call) for call in masked.calls]


def _line(rollout_id: str, item: GradedCall) -> str:
    row = {"rollout_id": rollout_id, "call_id": item.call.id, "grade": item.grade.value, "reasons": list(item.reasons)}
    return msgspec.json.encode(row).decode() + "\n"


def _count(spool: Spool, into: Path, formats: tuple[str, ...]) -> ImportReport:
    """Count the rollouts and grades of an import. Raises RunFolderError where there are none."""
    report = ImportReport(folder=into, formats=formats, rollouts=0, grades=Counter(), reasons=Counter())
    made = 0
    for lines, oddities in spool.grades():
        report.facts.update(oddities)
        made += bool(lines)
        for line in filter(None, lines.split("\n")):
            graded = msgspec.json.decode(line)
            report.grades[graded["grade"]] += 1
            report.reasons.update((graded["grade"], reason) for reason in graded["reasons"])
    if not made:
        raise RunFolderError(
            f"no model call among the traces for {str(into)!r}: nothing is imported; export spans of a model's calls, "
            "with their messages"
        )
    return replace(report, rollouts=made)


def _rollout_id(trace: str) -> str:
    """Return a trace's id as one that an address and a command line can hold."""
    trace = mask_id(trace)
    plain = _PLAIN.sub("-", trace)[:80].strip("-.") or "trace"
    return (
        plain if plain == trace else f"{plain}-{blake2b(trace.encode('utf-8', 'replace'), digest_size=4).hexdigest()}"
    )


def _read_mark(folder: Path) -> str | None:
    """The mark of the source that a folder was imported from; None where it holds no import."""
    traces = read_import(folder)
    return None if traces is None else str(traces.get("mark"))


def _write_folder(folder: Path, mark: str, source: Path, formats: Sequence[str], grades: Iterable[str]) -> None:
    """Write what makes a folder with a store a run; `run.json`, which says that it is one, last."""
    path = folder / "grades.jsonl"
    path.touch(mode=0o600)
    with path.open("w", encoding="utf-8") as file:
        file.writelines(grades)
    (folder / "metrics.jsonl").touch(mode=0o600)
    write_durably(folder / "recipe.json", _recipe(folder.name).frozen_text())
    origin = {
        "source": None,
        "folder": str(folder.parent.resolve()),
        "run": str(folder.resolve()),
        "models": {},
        "settings": {},
        "traces": {"mark": mark, "source": str(source.resolve()), "formats": list(formats)},
    }
    write_durably(folder / "run.json", json.dumps(origin, indent=2) + "\n")


def _recipe(name: str) -> Recipe:
    return Recipe.model_validate(
        {
            "name": name.strip(".").removesuffix(".importing") or FOREIGN,
            "agent": "traces:none",
            "tasks": {"train": "traces:none"},
            "policy": {"name": FOREIGN, "model": FOREIGN, "trainable": False},
            "rewards": {"reported": {"use": "traces:none"}},
        }
    )
