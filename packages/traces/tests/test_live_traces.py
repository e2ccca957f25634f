"""Live OTLP, taken over HTTP until Ctrl-C makes a run of it."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from planted_traces import Ids, genai_logs, openinference, otlp_export, span, talk
from sizes import PATIENCE_S
from typer.testing import CliRunner

from lightningrl.commands import app
from lightningrl.errors import ConfigError, RunFolderError
from lightningrl.plugins import load_plugins
from lightningrl_testing.loopback import serving
from lightningrl_traces.importing import import_traces
from lightningrl_traces.receiver import OtlpReceiver, receive_traces

JSON = {"content-type": "application/json"}


@asynccontextmanager
async def receiving(folder: Path, **settings: Any) -> AsyncIterator[tuple[OtlpReceiver, httpx.AsyncClient]]:
    with closing(OtlpReceiver(folder, **settings)) as receiver:
        async with serving(receiver.app) as url, httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
            yield receiver, client


def export(*numbers: int) -> dict[str, Any]:
    spans = [span(Ids(number), 1, openinference(*talk(number).calls[0])) for number in numbers]
    return otlp_export(spans, ())


async def graded(receiver: OtlpReceiver, folder: Path) -> Counter[str]:
    return (await asyncio.to_thread(import_traces, receiver.path, folder, None, load_plugins())).grades


async def test_an_sdk_and_json_and_gzip_are_taken_alike(tmp_path: Path) -> None:
    async with receiving(tmp_path / "received") as (receiver, client):
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(f"{client.base_url}/v1/traces")))
        values = {key: value for key, value in openinference(*talk(1).calls[0]).items() if value is not None}
        await asyncio.to_thread(lambda: provider.get_tracer("agent").start_span("chat", attributes=values).end())
        plain = await client.post("/v1/traces", content=json.dumps(export(2)), headers=JSON)
        packed = gzip.compress(json.dumps(export(3)).encode())
        zipped = await client.post("/v1/traces", content=packed, headers={**JSON, "content-encoding": "gzip"})
        assert [plain.json(), zipped.json()] == [{}, {}]
        provider.shutdown()
        assert await graded(receiver, tmp_path / "run") == {"sft-safe": 3}


async def test_messages_in_log_records_join_their_spans(tmp_path: Path) -> None:
    planted = genai_logs(1, random.Random(1))
    async with receiving(tmp_path / "received") as (receiver, client):
        for path, body in (("traces", otlp_export(planted.documents, ())), ("logs", otlp_export((), planted.logs))):
            assert (await client.post(f"/v1/{path}", content=json.dumps(body), headers=JSON)).status_code == 200
        line = {"body": {"stringValue": "started"}, "severityText": "INFO"}
        await client.post("/v1/logs", content=json.dumps(otlp_export((), [line])), headers=JSON)
        expected = Counter(grade for grade, _ in planted.expected.values())
        assert await graded(receiver, tmp_path / "run") == expected, "and a line of another log is no call"


async def test_what_is_no_export_is_refused_and_not_kept(tmp_path: Path) -> None:
    async with receiving(tmp_path / "received") as (receiver, client):
        answers = [
            await client.post("/v1/traces", content=b"\xff\xff", headers={"content-type": "application/x-protobuf"}),
            await client.post("/v1/traces", content=b"[1]", headers=JSON),
            await client.post("/v1/traces", content=b"a", headers={"content-type": "text/plain"}),
            await client.post("/v1/traces", content=bytes(2**24), headers={"content-type": "application/x-protobuf"}),
            await client.get("/v1/traces"),
        ]
        assert [answer.status_code for answer in answers] == [400, 400, 415, 413, 405]
        assert "export with OTLP over HTTP" in answers[0].text
        assert receiver.kept == 0


async def test_web_pages_are_not_taken(tmp_path: Path) -> None:
    async with receiving(tmp_path / "received") as (receiver, client):
        body = json.dumps(export(1))
        answers = [
            await client.post("/v1/traces", content=body),
            await client.post("/v1/traces", content=body, headers={**JSON, "origin": "https://evil.example"}),
            await client.post("/v1/traces", content=body, headers={**JSON, "origin": "null"}),
            await client.post("/v1/traces", content=body, headers={**JSON, "sec-fetch-site": "cross-site"}),
            await client.post("/v1/traces", content=body, headers={**JSON, "host": "evil.example:4318"}),
            await client.post("/v1/traces", content=body, headers={**JSON, "host": "127.0.0.1.evil.example"}),
        ]
        assert [answer.status_code for answer in answers] == [415, 403, 403, 403, 403, 403]
        assert receiver.kept == 0
        for host in ("localhost:4318", "[::1]:4318", "127.0.0.1"):
            taken = await client.post("/v1/traces", content=body, headers={**JSON, "host": host})
            assert taken.status_code == 200


async def test_who_says_nothing_keeps_no_exporter_out(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lightningrl", "import-traces", "--listen", "0", "--into", str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = re.search(r"http://([\d.]+):(\d+)", process.stdout.readline())
            assert url is not None
            silent = [await asyncio.open_connection(url[1], int(url[2])) for _ in range(90)]
            for _, writer in silent[:60]:
                writer.write(b"POST /v1/traces HTTP/1.1\r\nHost: 127.0.0.1\r\n")
                await writer.drain()
            async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
                taken = await client.post(f"{url[0]}/v1/traces", content=json.dumps(export(1)), headers=JSON)
            assert taken.status_code == 200
            for reader, writer in silent:
                await asyncio.wait_for(reader.read(), PATIENCE_S)  # it is sent away
                writer.close()
        finally:
            process.kill()


async def test_with_a_key_nothing_is_taken_without_it(tmp_path: Path) -> None:
    async with receiving(tmp_path / "received", key="sesame-1") as (receiver, client):
        body = json.dumps(export(1))
        for shown in ({}, {"authorization": "Bearer sesame-2"}, {"authorization": "sesame-1"}):
            answer = await client.post("/v1/traces", content=body, headers={**JSON, **shown})
            assert answer.status_code == 401 and "needs the key" in answer.text
        assert receiver.kept == 0
        right = {**JSON, "authorization": "Bearer sesame-1"}
        assert (await client.post("/v1/traces", content=body, headers=right)).status_code == 200


def test_other_machines_are_heard_with_a_key_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LIGHTNINGRL_KEY", raising=False)
    for address in ("0.0.0.0:0", "[::]:0"):
        with pytest.raises(ConfigError, match="is heard by other machines; set LIGHTNINGRL_KEY"):
            receive_traces(address, tmp_path / "run", load_plugins(), print)


async def test_no_more_is_kept_than_there_is_room_for(tmp_path: Path) -> None:
    async with receiving(tmp_path / "received", most=3000) as (receiver, client):
        answers = [await client.post("/v1/traces", content=json.dumps(export(n)), headers=JSON) for n in range(3)]
        assert [answer.status_code for answer in answers] == [200, 507, 507]
        assert "are there already" in answers[1].text
        assert await graded(receiver, tmp_path / "run") == {"sft-safe": 1}


async def test_a_kill_in_the_midst_of_an_export_loses_no_other(tmp_path: Path) -> None:
    async with receiving(tmp_path / "received") as (receiver, client):
        await client.post("/v1/traces", content=json.dumps(export(1)), headers=JSON)
        whole = receiver.kept
    with receiver.path.open("ab") as file:
        file.write((500).to_bytes(4, "big") + b"half of it")
    async with receiving(tmp_path / "received") as (receiver, client):
        assert receiver.kept == whole
        await client.post("/v1/traces", content=json.dumps(export(2)), headers=JSON)
        assert await graded(receiver, tmp_path / "run") == {"sft-safe": 2}


def test_one_command_listens_into_a_folder(tmp_path: Path) -> None:
    listens = pytest.raises(RunFolderError, match="another command listens")
    with closing(OtlpReceiver(tmp_path / ".run.received")), listens:
        receive_traces("0", tmp_path / "run", load_plugins(), print)


@pytest.mark.parametrize("address", ["http", "99999", "localhost:", ""])
def test_an_address_that_is_no_port_is_refused(tmp_path: Path, address: str) -> None:
    with pytest.raises(ConfigError, match="is no port; give PORT or HOST:PORT"):
        receive_traces(address, tmp_path / "run", load_plugins(), print)


def test_a_source_or_a_port_but_not_both(tmp_path: Path) -> None:
    for arguments in (["export.jsonl", "--listen", "4318"], []):
        refused = CliRunner().invoke(app, ["import-traces", *arguments, "--into", str(tmp_path / "run")])
        assert "name an export to import, or a port with --listen" in str(refused.exception)


def test_a_format_is_nothing_to_listen_with(tmp_path: Path) -> None:
    arguments = ["import-traces", "--listen", "4318", "--format", "atif", "--into", str(tmp_path / "run")]
    assert "--listen takes OTLP alone" in str(CliRunner().invoke(app, arguments).exception)


@pytest.mark.parametrize("sent", [2, 0])
def test_ctrl_c_makes_a_run_of_what_came(tmp_path: Path, sent: int) -> None:
    into = tmp_path / "run"
    command = [sys.executable, "-m", "lightningrl", "import-traces", "--listen", "0", "--into", str(into)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = re.search(r"http://\S+", process.stdout.readline())
            assert url is not None
            for number in range(sent):
                body = json.dumps(export(number))
                assert httpx.post(f"{url[0]}/v1/traces", content=body, headers=JSON).status_code == 200
                assert not into.exists(), "nothing half imported is taken for a run"
            process.send_signal(signal.SIGINT)
            said, errors = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    if sent:
        assert process.returncode == 0, errors
        assert "imported 2 rollouts with 2 calls from otlp" in said
        assert len((into / "grades.jsonl").read_text().splitlines()) == 2
    else:
        assert process.returncode == 1 and "no export came to '0': nothing is imported" in errors
    assert [path.name for path in tmp_path.iterdir()] == (["run"] if sent else [])
