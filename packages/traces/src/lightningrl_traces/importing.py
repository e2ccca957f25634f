"""`lightningrl import-traces`: a source of traces, read, joined, masked, graded and kept as a run.

source ─► spool (scratch, beside the folder) ─► rollouts ─► store, grades.jsonl ─► renamed to the folder

The folder is there when all of it is. A killed import goes on by the same command; one that is refused leaves nothing.
"""

from __future__ import annotations

import asyncio
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec

from lightningrl.errors import ConfigError, RunFolderError
from lightningrl.files import lock
from lightningrl.plugins import PluginManager
from lightningrl_traces.folder import read_mark, write_folder
from lightningrl_traces.grades import GradedCall, Reason, grade_call
from lightningrl_traces.joins import ForeignRollout, history_before, history_of, join_records
from lightningrl_traces.records import Call
from lightningrl_traces.run_store import TraceStore, score_of
from lightningrl_traces.secrets import mask_call, mask_ending, mask_id, mask_text, mask_tool
from lightningrl_traces.sources import Source, fingerprint, open_source_files
from lightningrl_traces.spool import Spool

__all__ = ["ImportReport", "import_traces"]

_ROLLOUTS: Final = 32
_BYTES: Final = 4 * 2**20
"""Rollouts, and bytes of their records, that are kept in one commit."""
_PLAIN: Final = re.compile(r"[^A-Za-z0-9._-]+")


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
    mark = fingerprint(sources) if reward is None else f"{fingerprint(sources)} {reward}"
    if into.exists() and (not into.is_dir() or any(into.iterdir())):
        if read_mark(into) != mark:
            raise RunFolderError(f"folder {str(into)!r} holds something already; name a new folder with --into")
        return ImportReport(
            folder=into, formats=_formats(sources), rollouts=0, grades=Counter(), reasons=Counter(), is_old=True
        )
    work = into.parent / f".{into.name}.importing"
    with _scratch(work, mark) as spool:
        try:
            _spool(sources, spool)
            _link(spool)
            report = asyncio.run(_make_rollouts(work, spool, into, _formats(sources), reward))
        except Exception:
            shutil.rmtree(work, ignore_errors=True)
            raise
        write_folder(work, mark, source, report.formats, (lines for lines, _ in spool.grades()))
    for scratch in work.glob(".spool*"):
        scratch.unlink()
    if into.is_dir():
        into.rmdir()
    work.rename(into)
    return report


def _formats(sources: Sequence[Source]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(source.form for source in sources))


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
        try:
            yield spool
        finally:
            spool.close()
            (work.parent / f"{work.name}.lock").unlink(missing_ok=True)


def _spool(sources: Sequence[Source], spool: Spool) -> None:
    for number, source in enumerate(sources):
        key = f"file {number}"
        done = spool.get(key) or "0"
        if done == "all":
            continue
        read = int(done)
        records = islice(source.importer.read(source.path), read, None)
        spool.add_all((item if item.trace_id else replace(item, trace_id=_UNTRACED) for item in records), key, read)
        spool.put(key, "all")


_UNTRACED: Final = "records-without-a-trace"


def _link(spool: Spool) -> None:
    """Find traces that go on from others, and calls that other traces have word for word."""
    if spool.get("linked") is not None:
        return
    spool.forget_links()
    spool.begin()
    of_traces, of_calls = set[str](), set[str]()
    for trace in spool.traces():
        rollout = join_records(trace, spool.records([trace]))
        calls = rollout.calls
        of_traces |= rollout.ending.rewards.keys()
        of_calls |= {name for call in calls for name in call.rewards}
        histories = [(history_of(call), call.started_at + call.duration_s) for call in calls if call.answer]
        before = history_before(calls[0]) if calls else None
        spool.add_histories(trace, histories, None if before is None else (before, calls[0].started_at))
    spool.commit()
    spool.link()
    spool.put("scores", msgspec.json.encode([sorted(of_traces), sorted(of_calls - of_traces)]).decode())
    spool.put("linked", "yes")


def _find_reward(spool: Spool, asked: str | None) -> tuple[str | None, tuple[str, ...]]:
    """Return the name of the score that is the reward, None where none stands alone, and all names."""
    of_traces, of_calls = msgspec.json.decode(spool.get("scores") or "[[], []]")
    names = tuple(mask_text(name).text for name in (*of_traces, *of_calls))
    if asked is not None and asked not in names:
        there = f"there are: {', '.join(names)}" if names else "the traces have no scores"
        raise ConfigError(f"no score is named {asked!r}; {there}")
    return asked or (names[0] if len(names) == len(of_traces) == 1 else None), names


async def _make_rollouts(
    work: Path, spool: Spool, into: Path, formats: tuple[str, ...], asked: str | None
) -> ImportReport:
    reward, names = _find_reward(spool, asked)
    keep = partial(_keep, reward=reward, is_asked=asked is not None)
    facts: Counter[str] = Counter()
    store = await TraceStore.open(f"sqlite:///{(work / 'store.sqlite').resolve()}")
    try:
        batch: list[tuple[ForeignRollout, list[GradedCall]]] = []
        held = 0
        for root, traces in spool.rollouts():
            rollout_id = _rollout_id(root)
            if spool.is_graded(rollout_id):
                continue
            rollout = join_records(rollout_id, spool.records(traces))
            if not rollout.calls:
                spool.add_grades(rollout_id, "", {"traces without a model call": 1})
                continue
            batch.append(_graded(rollout, traces, spool))
            held += spool.size(traces)
            if len(batch) == _ROLLOUTS or held > _BYTES:
                await keep(store, spool, batch)
                batch, held = [], 0
        await keep(store, spool, batch)
    finally:
        await store.close()
    grades: Counter[str] = Counter()
    reasons: Counter[tuple[str, str]] = Counter()
    made = 0
    for lines, oddities in spool.grades():
        facts.update(oddities)
        made += bool(lines)
        for line in filter(None, lines.split("\n")):
            graded = msgspec.json.decode(line)
            grades[graded["grade"]] += 1
            reasons.update((graded["grade"], reason) for reason in graded["reasons"])
    if not made:
        raise RunFolderError(
            f"no model call among the traces for {str(into)!r}: nothing is imported; export spans of a model's calls, "
            "with their messages"
        )
    return ImportReport(
        folder=into,
        formats=formats,
        rollouts=made,
        grades=grades,
        reasons=reasons,
        facts=facts,
        scores=names,
        reward=reward,
    )


def _graded(rollout: ForeignRollout, traces: Sequence[str], spool: Spool) -> tuple[ForeignRollout, list[GradedCall]]:
    """Mask and grade a rollout."""
    again = [_note_repeated(call, traces, spool) for call in _with_own_ids(rollout.calls)]
    calls = [mask_call(call) for call in again]
    masked = replace(
        rollout,
        calls=tuple(calls),
        tools=tuple(mask_tool(tool) for tool in rollout.tools),
        ending=mask_ending(rollout.ending),
    )
    return masked, [grade_call(call) for call in calls]


def _with_own_ids(calls: Sequence[Call]) -> Iterator[Call]:
    """Give each call an id that no other of the rollout has."""
    seen: set[str] = set()
    for number, call in enumerate(calls):
        call_id = call.id if call.id and call.id not in seen else f"{call.id or 'call'}-{number}"
        seen.add(call_id)
        yield call if call_id == call.id else replace(call, id=call_id)


def _note_repeated(call: Call, traces: Sequence[str], spool: Spool) -> Call:
    if not call.answer or not spool.is_told_before(history_of(call), traces):
        return call
    return replace(call, notes=(*call.notes, Reason.REPEATED.value))


async def _keep(
    store: TraceStore,
    spool: Spool,
    batch: Sequence[tuple[ForeignRollout, list[GradedCall]]],
    *,
    reward: str | None,
    is_asked: bool,
) -> None:
    """Keep rollouts in the store, then their grades; a kill between repeats what the store takes once."""
    if not batch:
        return
    await store.add_rollouts(batch)
    scores = [score_of(rollout, reward, is_asked=is_asked) for rollout, _ in batch]
    await store.set_scores([score for score in scores if score is not None])
    spool.begin()
    for rollout, graded in batch:
        lines = "".join(_line(rollout.id, item) for item in graded)
        oddities = {
            "calls told twice, kept once": rollout.duplicates,
            "spans whose parents form a circle": rollout.circles,
            "calls with a clock that is late": rollout.skewed,
            "records without a trace id, taken as one trace": rollout.id == _UNTRACED,
        }
        spool.add_grades(rollout.id, lines, {name: int(count) for name, count in oddities.items() if count})
    spool.commit()


def _line(rollout_id: str, item: GradedCall) -> str:
    row = {"rollout_id": rollout_id, "call_id": item.call.id, "grade": item.grade.value, "reasons": list(item.reasons)}
    return msgspec.json.encode(row).decode() + "\n"


def _rollout_id(trace: str) -> str:
    """Return a trace's id as one that an address and a command line can hold."""
    trace = mask_id(trace)
    plain = _PLAIN.sub("-", trace)[:80].strip("-.") or "trace"
    return (
        plain if plain == trace else f"{plain}-{blake2b(trace.encode('utf-8', 'replace'), digest_size=4).hexdigest()}"
    )
