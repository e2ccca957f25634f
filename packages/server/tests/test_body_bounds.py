"""Bodies that are small when packed and would be gigabytes of objects: refused before anything is made of them."""

from __future__ import annotations

import asyncio
import gzip
import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import cast
from weakref import WeakValueDictionary

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from lightningrl_server.inflate import MOST_VALUES, BadBody, check_values, inflate
from lightningrl_server.rendering.arguments import TooDeep, parse_arguments
from lightningrl_server.spans.otlp import ParsedExport
from lightningrl_server.store.protocol import CallLog
from lightningrl_server.telemetry_routes import ExportReader
from lightningrl_testing.live_gateway import live_gateway

MEASURED = """
import os, sys, time
from pathlib import Path
from lightningrl.errors import ServerError
from lightningrl_server.inflate import TELEMETRY_BYTES
from lightningrl_server.spans.otlp import JSON, PROTOBUF, parse_export

def resident(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))

for path in sorted(Path(sys.argv[1]).iterdir()):
    if os.fork() == 0:
        Path("/proc/self/clear_refs").write_text("5")
        before, started = resident("VmRSS"), time.process_time()
        try:
            parse_export(path.read_bytes(), JSON if "JSON" in path.name else PROTOBUF, "gzip", TELEMETRY_BYTES)
            sentence = ""
        except ServerError as error:
            sentence = str(error)
        print(path.name, time.process_time() - started, (resident("VmHWM") - before) // 1024, sentence, sep=";", flush=True)
        os._exit(0)
    os.wait()
"""


def varint(number: int) -> bytes:
    out = b""
    while number > 127:
        out, number = out + bytes([number & 127 | 128]), number >> 7
    return out + bytes([number])


def nested(*numbers: int, inside: bytes) -> bytes:
    for number in reversed(numbers):
        inside = varint(number << 3 | 2) + varint(len(inside)) + inside
    return inside


SPANS = b'{"resourceSpans":[{"scopeSpans":[{"spans":[%s]}]}]}'
BOMBS = {
    "empty spans": nested(1, 2, inside=b"\x12\x00" * 8_000_000),
    "fewer empty spans": nested(1, 2, inside=b"\x12\x00" * 3_000_000),
    "empty attributes": nested(1, 2, 2, inside=b"\x4a\x00" * 3_000_000),
    "empty values of a list": nested(1, 2, 2, 9, 2, 5, inside=b"\x0a\x00" * 3_000_000),
    "empty resources": b"\x0a\x00" * 4_000_000,
    "spans in JSON": SPANS % b",".join([b"{}"] * 2_000_000),
    "many spans in JSON": SPANS % b",".join([b"{}"] * 5_000_000),
    "lists that nobody reads in JSON": b'{"x":[' + b",".join([b"[]"] * 2_000_000) + b"]}",
    "short texts in JSON": b'{"x":[' + b",".join([b'"ab"'] * 1_600_000) + b"]}",
    "brackets alone in JSON": b"[" * 8_000_000,
    "texts that are none in JSON": b'{"a":"' + b'",' * 2_700_000,
}


def test_a_packed_export_of_a_few_kilobytes_costs_no_more_than_it_should(tmp_path: Path) -> None:
    for name, body in BOMBS.items():
        (tmp_path / name).write_bytes(packed := gzip.compress(body))
        assert len(packed) < 16_000
    command = [sys.executable, "-c", MEASURED, str(tmp_path)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(told) == len(BOMBS)
    for line in told:
        _, seconds, megabytes, sentence = line.split(";", 3)
        assert float(seconds) < 2.0 and int(megabytes) < 150, line
        assert "more than" in sentence or "larger than" in sentence, line


async def test_a_client_that_leaves_in_its_body_is_no_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with live_gateway(tmp_path) as gateway:
        attempt = await gateway.attempt()
        base = f"/api/v1/rollouts/{attempt.rollout_id}/attempts/1"
        host, port = gateway.url.removeprefix("http://").split(":")
        for path in (f"{base}/v1/traces", f"{base}/rewards", f"/rollouts/{attempt.rollout_id}/attempts/1/v1/responses"):
            _, writer = await asyncio.open_connection(host, int(port))
            head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {attempt.key}\r\n"
            writer.write(f"{head}content-type: application/json\r\ncontent-length: 100\r\n\r\n{{".encode())
            await writer.drain()
            await asyncio.sleep(0.2)
            writer.close()
            await writer.wait_closed()
        await asyncio.sleep(0.5)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("depth", [70, 900, 100_000])
def test_arguments_of_any_depth_are_read_or_refused(depth: int) -> None:
    assert parse_arguments("[" * 64 + "]" * 64)
    with pytest.raises(TooDeep, match="nested more than 64 deep"):
        parse_arguments("[" * depth + "]" * depth)


async def test_exports_of_one_attempt_are_decoded_one_at_a_time() -> None:
    running: list[str] = []
    most = 0

    def parse(body: bytes, *_: object) -> ParsedExport:
        nonlocal most
        running.append(body.decode())
        most = max(most, sum(place == running[-1] for place in running))
        time.sleep(0.05)
        running.remove(body.decode())
        return ParsedExport(request=ExportTraceServiceRequest(), evaluations=())

    decoding = WeakValueDictionary[tuple[str, int], asyncio.Lock]()
    reader = ExportReader(log=cast("CallLog", None), parse=parse, limit=10, decoding=decoding)
    await asyncio.gather(*(reader.read((place, 1), place.encode(), encoding="gzip") for place in "aaaabbbb"))
    assert most == 1 and not decoding


def test_texts_full_of_brackets_are_no_values() -> None:
    check_values(b'{"text": "%s"}' % (b'\\"[{,' * MOST_VALUES))
    with pytest.raises(BadBody, match=r"more than 500000 values; send less at a time"):
        check_values(b"[%s]" % (b"[]," * MOST_VALUES))


def test_a_body_is_unpacked_in_whatever_parts_it_comes() -> None:
    parts = gzip.compress(b"a" * 100_000) + gzip.compress(b"b")
    assert inflate(parts, "GZIP", 200_000) == b"a" * 100_000 + b"b"
    assert inflate(parts, "", 200_000) == inflate(parts, "x-gzip", 200_000)
    with pytest.raises(BadBody, match="in more than 1000 parts"):
        inflate(gzip.compress(b"") * 1_002, "gzip", 10)
