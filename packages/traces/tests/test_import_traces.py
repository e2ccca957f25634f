"""Imports of what is whole, broken, killed, large or strange."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span
from planted_traces import (
    MAKERS,
    Ids,
    openinference,
    otlp_export,
    plant,
    raw_tokens,
    span,
    talk,
    write_lines,
    write_sources,
)
from sizes import sized
from typer.testing import CliRunner

from lightningrl.commands import app
from lightningrl.errors import ConfigError, LightningError, RunFolderError
from lightningrl.plugins import Plugin, PluginManager, hookimpl, load_plugins
from lightningrl.records import RolloutFilter
from lightningrl.types import Trajectory, TrajectoryGroup
from lightningrl_credit.trained_calls import only_trained, trained_calls_of
from lightningrl_runs.origin import RunOrigin
from lightningrl_runs.reader import open_run
from lightningrl_runs.rollout_files import read_rollouts
from lightningrl_traces import Call, Ending, Sample
from lightningrl_traces.grades import grade_call
from lightningrl_traces.importing import ImportReport, import_traces, open_source_files
from lightningrl_traces.joins import join_records
from lightningrl_traces.run_store import read_calls
from lightningrl_traces.secrets import mask_call, mask_text


def imported(source: Path, into: Path, form: str | None = None) -> ImportReport:
    return import_traces(source, into, form, load_plugins())


def read(folder: Path) -> list[Trajectory]:
    async def ask() -> list[Trajectory]:
        async with open_run(folder) as run:
            records = await run.list_rollouts(RolloutFilter(limit=1000))
            return list(await run.look.trajectories([record.id for record in records]))

    return asyncio.run(ask())


def simple(path: Path, rows: int = 3) -> Path:
    messages = [{"role": "user", "content": "Say it."}]
    write_lines(path, [{"messages": [*messages, {"role": "assistant", "content": f"it {row}"}]} for row in range(rows)])
    return path


def nothing_is_left(folder: Path, *names: str) -> bool:
    return sorted(path.name for path in folder.iterdir()) == sorted(names)


# ---------------------------------------------------------------------- what opens an import


def test_an_imported_run_is_listed_shown_and_exported(tmp_path: Path) -> None:
    write_sources(tmp_path, list(plant(len(MAKERS), 1)), random.Random(1))
    run = CliRunner()
    into = str(tmp_path / "runs" / "mine")
    told = run.invoke(app, ["import-traces", str(tmp_path), "--into", into])
    assert told.exit_code == 0, told.output
    assert "rl-safe" in told.output
    words = " ".join(told.output.split())
    assert "not rl-safe: " in words and "not sft-safe: " in words, "reasons say which grade they speak against"
    listed = run.invoke(app, ["rollouts", "list", "--run", into, "--json"])
    rows = [json.loads(line) for line in listed.stdout.splitlines()]
    assert rows
    shown = run.invoke(app, ["rollouts", "show", rows[0]["rollout"], "--run", into])
    assert shown.exit_code == 0
    to = tmp_path / "out.jsonl"
    assert run.invoke(app, ["export-rollouts", into, "--format", "atif", "--to", str(to)]).exit_code == 0
    with_tokens = [stored for stored in read_rollouts(to) if stored.trajectory.transitions]
    assert with_tokens
    assert not any(mask.any() for stored in with_tokens for mask in stored.masks.values())


def test_an_export_of_an_imported_run_is_imported_again_with_the_same_tokens(tmp_path: Path) -> None:
    write_sources(tmp_path, [plant_one("oi_rl")], random.Random(1))
    imported(tmp_path, tmp_path / "runs" / "first")
    to = tmp_path / "again.jsonl"
    CliRunner().invoke(app, ["export-rollouts", str(tmp_path / "runs" / "first"), "--to", str(to)])
    report = imported(to, tmp_path / "runs" / "second")
    assert report.grades["rl-safe"] == 2
    first, second = (read(tmp_path / "runs" / name)[0].transitions for name in ("first", "second"))
    assert [call.id for call in first] == [call.id for call in second]
    for one, other in zip(first, second, strict=True):
        assert np.array_equal(one.prompt_ids, other.prompt_ids)
        assert np.array_equal(one.logprobs, other.logprobs)
        assert (one.policy_version, one.sampling.temperature) == (other.policy_version, other.sampling.temperature)


def plant_one(name: str) -> Any:
    maker = next(maker for maker in MAKERS if getattr(maker, "__name__", "") == name)
    return maker(5, random.Random(5))


def test_rl_safe_calls_of_others_are_off_policy_and_never_rows_of_a_step(tmp_path: Path) -> None:
    write_sources(tmp_path, [plant_one("oi_rl")], random.Random(1))
    imported(tmp_path, tmp_path / "runs" / "mine")
    recipe = RunOrigin.read(tmp_path / "runs" / "mine").recipe
    trajectories = read(tmp_path / "runs" / "mine")
    assert trained_calls_of(recipe) == {}, "the policy `foreign` is trained by no recipe of ours"
    for trajectory in trajectories:
        assert trajectory.transitions
        assert not any(call.trainable for call in trajectory.transitions)
        marked = only_trained(trajectory, trained_calls_of(recipe))
        group = TrajectoryGroup(id="g", trajectories=(marked,))
        assert not any(call.trainable for member in group.members for call in member.transitions)


# ---------------------------------------------------------------------- formats


def test_protobuf_gives_what_json_gives(tmp_path: Path) -> None:
    tokens = raw_tokens(random.Random(2))
    values = openinference(*talk(1).calls[0], tokens=tokens, temperature=tokens["temperature"])
    ids = Ids(1)
    proto = Span(
        trace_id=bytes.fromhex(ids.trace),
        span_id=bytes.fromhex(ids.span(1)),
        name="chat",
        start_time_unix_nano=10**18,
        end_time_unix_nano=10**18 + 10**9,
        attributes=[
            KeyValue(key=key, value=AnyValue(string_value=value)) for key, value in values.items() if value is not None
        ],
    )
    request = ExportTraceServiceRequest(resource_spans=[ResourceSpans(scope_spans=[ScopeSpans(spans=[proto])])])
    body = request.SerializeToString()
    plain, framed, packed = tmp_path / "plain.pb", tmp_path / "framed.pb", tmp_path / "packed.pb.gz"
    plain.write_bytes(body)
    framed.write_bytes(len(body).to_bytes(4, "big") + body)
    packed.write_bytes(gzip.compress(body))
    for path in (plain, framed, packed):
        report = imported(path, tmp_path / "runs" / path.name)
        assert (report.formats, dict(report.grades)) == (("otlp",), {"rl-safe": 1})
        assert read(tmp_path / "runs" / path.name)[0].transitions[0].prompt_ids.tolist() == tokens["prompt_ids"]


def test_an_importer_of_a_plugin_reads_a_format_of_its_own(tmp_path: Path) -> None:
    class Shouts:
        def fits(self, sample: Sample) -> bool:
            return sample.head.startswith(b"SHOUT")

        def read(self, path: Path) -> Any:
            messages = [{"role": "user", "content": path.read_text()}]
            answer = {"role": "assistant", "content": "HEY"}
            yield Call(id="c", trace_id="t", messages=messages, answer=answer, finish_reason="stop")
            yield Ending(trace_id="t", reward=0.5)

    class Brings:
        @hookimpl
        def lightningrl_trace_importers(self) -> Any:
            yield Plugin(name="shouts", summary="shouting", factory=Shouts)

    manager = PluginManager()
    manager.register(Brings())
    (tmp_path / "loud").write_text("SHOUT hello")
    report = import_traces(tmp_path / "loud", tmp_path / "mine", None, manager)
    assert dict(report.grades) == {"sft-safe": 1}


def test_traces_that_go_on_from_each_other_are_one_rollout_whatever_their_clocks_say(tmp_path: Path) -> None:
    planted = plant_one("oi_apart")
    write_sources(tmp_path, [planted], random.Random(1))
    imported(tmp_path, tmp_path / "runs" / "mine")
    (trajectory,) = read(tmp_path / "runs" / "mine")
    assert [call.id for call in read_calls(trajectory)] == list(planted.expected)
    assert trajectory.tool_calls[0].result == "meaning 5"


@pytest.mark.parametrize(
    "text",
    [
        "https://example.org/a/b?c=d",
        "call_9f8e7d6c5b4a39281706",
        "2026-09-21T10:00:00.123456+00:00",
        "3.14159265358979",
        "order 1234567890123456",
        "def f(x): return x + 1  # 0 1 2 3 4 5 6 7 8 9 10 11 12 13",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert mask_text(text) == (text, False, False, False)


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"\x89PNG\r\n\x1a\n", "of no format that an importer knows"),
        ('{"messages": []}'.encode("utf-16"), "is text in UTF-16; save the file as UTF-8"),
        (b'{"hello": "world"}\n', "of no format that an importer knows"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_with_what_to_do(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "odd").write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        imported(tmp_path / "odd", tmp_path / "mine")
    assert nothing_is_left(tmp_path, "odd")


def test_a_truncated_file_imports_nothing_and_names_the_place(tmp_path: Path) -> None:
    path = simple(tmp_path / "cut.jsonl", rows=1200)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ConfigError, match=r"at line 1200.*nothing is imported"):
        imported(path, tmp_path / "mine")
    assert nothing_is_left(tmp_path, "cut.jsonl")


def test_a_truncated_export_in_one_document_imports_nothing(tmp_path: Path) -> None:
    path = tmp_path / "cut.json"
    values = openinference(*talk(1).calls[0])
    text = json.dumps(otlp_export([span(Ids(number), 1, values) for number in range(30)], ()), indent=1)
    path.write_text(text[: len(text) // 2])
    with pytest.raises(ConfigError, match="cannot be read after document"):
        imported(path, tmp_path / "mine")
    assert nothing_is_left(tmp_path, "cut.json")


@pytest.mark.parametrize("name", ["cut.pb", "cut.framed.pb", "cut.json.gz", "cut.pb.gz"])
def test_a_truncated_export_of_any_form_imports_nothing(tmp_path: Path, name: str) -> None:
    document = otlp_export([span(Ids(number), 1, openinference(*talk(number).calls[0])) for number in range(30)], ())
    whole = json_format.ParseDict(with_base64_ids(document), ExportTraceServiceRequest()).SerializeToString()
    if "framed" in name:
        whole = len(whole).to_bytes(4, "big") + whole
    elif "json" in name:
        whole = json.dumps(document).encode()
    whole = gzip.compress(whole) if name.endswith("gz") else whole
    (tmp_path / name).write_bytes(whole[: len(whole) * 2 // 3])
    with pytest.raises(ConfigError, match=r"cannot be read .*nothing is imported"):
        imported(tmp_path / name, tmp_path / "mine")
    assert nothing_is_left(tmp_path, name)


def with_base64_ids(value: Any) -> Any:
    """Ids as protobuf's own JSON has them, where OTLP's has them hexadecimal."""
    if isinstance(value, list):
        return [with_base64_ids(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: base64.b64encode(bytes.fromhex(inner)).decode()
        if key in ("traceId", "spanId", "parentSpanId")
        else with_base64_ids(inner)
        for key, inner in value.items()
    }


def test_traces_of_another_agent_are_not_added_to_an_import(tmp_path: Path) -> None:
    imported(simple(tmp_path / "mine.jsonl"), tmp_path / "run")
    before = (tmp_path / "run" / "grades.jsonl").read_bytes()
    with pytest.raises(RunFolderError, match="holds something already; name a new folder"):
        imported(simple(tmp_path / "theirs.jsonl", rows=5), tmp_path / "run")
    assert (tmp_path / "run" / "grades.jsonl").read_bytes() == before


@pytest.mark.parametrize("maker", MAKERS)
def test_whatever_stands_where_something_else_should_is_imported_or_refused_by_a_sentence(
    tmp_path: Path, maker: Any
) -> None:
    rng = random.Random(8)
    for number in range(sized(12, 300)):
        folder = tmp_path / str(number)
        folder.mkdir()
        planted = maker(number, rng)
        for _ in range(3):
            damage(planted.documents, rng)
        if planted.form == "codex":
            write_lines(folder / "rollout.jsonl", planted.documents)
        else:
            write_sources(folder, [planted], rng)
        try:
            for item in open_source_files(folder, None, load_plugins()):
                records = list(item.importer.read(item.path))
                calls = join_records("r", [each if each.trace_id else replace(each, trace_id="t") for each in records])
                for call in calls.calls:
                    grade_call(mask_call(call))
        except LightningError as error:
            assert str(folder) in str(error)


def damage(value: Any, rng: random.Random) -> None:
    """Put something else in the place of a value somewhere within."""
    while isinstance(value, list | dict) and value:
        place = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
        inner = value[place]
        if not isinstance(inner, list | dict) or not inner or rng.random() < 0.25:
            value[place] = rng.choice([None, 7, -1.5, "text", "{", [], {}, [[]], [None], {"a": 1}, True, "2026", ""])
            return
        value = inner


def test_traces_without_a_model_call_are_refused(tmp_path: Path) -> None:
    write_lines(tmp_path / "http.jsonl", [otlp_export([span(Ids(1), 1, {"http.method": "GET"})], ())])
    with pytest.raises(RunFolderError, match="no model call"):
        imported(tmp_path / "http.jsonl", tmp_path / "mine")
    assert nothing_is_left(tmp_path, "http.jsonl")


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    path = simple(tmp_path / "a.jsonl")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("dear")
    with pytest.raises(RunFolderError, match="holds something already"):
        imported(path, tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "dear"


def test_an_unknown_format_names_those_that_there_are(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"no trace importer named 'otpl'.*did you mean 'otlp'"):
        imported(simple(tmp_path / "a.jsonl"), tmp_path / "mine", form="otpl")


def test_an_import_that_is_there_already_is_not_made_again(tmp_path: Path) -> None:
    path = simple(tmp_path / "a.jsonl")
    assert not imported(path, tmp_path / "mine").is_old
    assert imported(path, tmp_path / "mine").is_old


@pytest.mark.long
def test_a_killed_import_goes_on_by_the_same_command_and_nothing_is_there_twice(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    write_sources(source, list(plant(150, 7)), random.Random(7))
    whole = imported(source, tmp_path / "whole")
    work, into = tmp_path / ".killed.importing", tmp_path / "killed"
    command = [sys.executable, "-m", "lightningrl", "import-traces", str(source), "--into", str(into)]
    kills = 0
    for wait in (0.05,):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
        give_up = time.monotonic() + 60
        while not (work / ".spool.sqlite").exists() and process.poll() is None and time.monotonic() < give_up:
            time.sleep(0.01)
        time.sleep(wait)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            kills += 1
            assert not into.exists(), "nothing half imported is taken for a run"
        process.wait()
    assert kills
    imported(source, into)
    assert (into / "grades.jsonl").read_text() == (tmp_path / "whole" / "grades.jsonl").read_text()
    assert len(read(into)) == whole.rollouts
    assert not work.exists()


def test_memory_does_not_grow_with_the_spans_that_are_imported(tmp_path: Path) -> None:
    few, many = (resident_after(tmp_path / str(size), size) for size in sized((5, 25), (20, 2_000)))
    assert many - few < 20, f"{few} and {many} MB are resident at most"


def resident_after(folder: Path, megabytes: int) -> int:
    """The most megabytes that a process has resident which imports so many of spans, 100 kB each."""
    folder.mkdir()
    path = folder / "large.jsonl"
    filler = "word " * 20_000
    spans = megabytes * 10
    with path.open("w", encoding="utf-8") as file:
        for number in range(spans):
            values = openinference(*talk(number, filler).calls[0], with_bodies=False)
            file.write(json.dumps(otlp_export([span(Ids(number), 1, values)], ())) + "\n")
    assert path.stat().st_size > megabytes * 10**6
    code = (
        "import sys; from pathlib import Path; from lightningrl.plugins import load_plugins; "
        "from lightningrl_traces.importing import import_traces; "
        "report = import_traces(Path(sys.argv[1]), Path(sys.argv[2]), None, load_plugins()); "
        "status = Path('/proc/self/status').read_text(); "
        "print(sum(report.grades.values()), status.partition('VmHWM:')[2].split()[0])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, str(path), str(folder / "run")], capture_output=True, text=True, check=True
    )
    calls, kilobytes = map(int, ran.stdout.split())
    assert calls == spans
    shutil.rmtree(folder)
    return kilobytes // 1024
