"""Run real instrumentations and coding harnesses against a scripted model, and import what they exported.

    python scripts/try_instrumentations.py            all, and the table of docs/how-to/import-traces.md
    python scripts/try_instrumentations.py NAME…      some of them; the table is printed
    tests/instrumentations/NAME.py                    a program as its users write it; its first line pins what it needs
    tests/instrumentations/recorded/NAME-HOW.*.gz     what it exported: tests import it and hold the table against it

pins ─► .peers/NAME (environment) ─► program ─┬─► a gateway here with a scripted policy, or answers as vLLM's
                                              └─► OTLP, LangSmith's API, logs below HOME ─► recorded/ ─► import ─► row
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lightningrl.plugins import load_plugins
from lightningrl.types import SamplingSettings
from lightningrl_server.gateway.settings import GatewaySettings
from lightningrl_testing.live_gateway import live_gateway
from lightningrl_testing.loopback import serving
from lightningrl_testing.scripted_engine import ScriptedEngine
from lightningrl_testing.tokenizers import tiny_tokenizer
from lightningrl_traces.importing import import_traces, open_source_files
from lightningrl_traces.joins import join_records
from lightningrl_traces.receiver import OtlpReceiver
from lightningrl_traces.records import Call, TraceRecord

__all__ = ["CASES", "RECORDED", "Case", "rows_of", "table"]

ROOT: Final = Path(__file__).parents[1]
PROGRAMS: Final = ROOT / "tests/instrumentations"
RECORDED: Final = PROGRAMS / "recorded"
PAGE: Final = ROOT / "docs/how-to/import-traces.md"
PLACE: Final = re.compile(r"(<!-- instrumentations -->\n).*?(<!-- end -->)", re.DOTALL)
PINS: Final = re.compile(r"^# dependencies = (\[.*\])$", re.MULTILINE)
LIMIT_S: Final = 300.0
TASK: Final = "Write the file answer.txt with the text 42 in it."
SAYS: Final = {"": ['call look_up {"day":  "today"}', "Serendipity."]}
"""Two spaces in the arguments: an instrumentation that parses them and writes them anew loses one."""
CHAT: Final = ("chat", "stream")
LATEST: Final = {
    "OTEL_SEMCONV_STABILITY_OPT_IN": "gen_ai_latest_experimental",
    "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT": "span_and_event",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """An instrumentation, and the ways in which it is tried."""

    name: str
    title: str = ""
    """Name in the table; empty = its package and version."""
    hows: Sequence[str] = CHAT
    program: str = ""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    harness: str = ""
    """Row of a coding harness, in place of a program."""
    log: str = ""
    """Pattern of its log below HOME."""

    @property
    def packages(self) -> list[str]:
        """Packages with their versions; the first names the case."""
        if self.harness:
            from lightningrl_client.runtime.harnesses.rows import read_table

            return list(read_table()[self.harness].packages)
        pins = PINS.search((PROGRAMS / f"{self.program or self.name}.py").read_text())
        assert pins is not None, f"{self.name} pins nothing"
        return list(json.loads(pins[1]))

    @property
    def label(self) -> str:
        name, _, version = self.packages[0].replace("==", "@").rpartition("@")
        short = name.replace("opentelemetry-instrumentation", "otel").replace(
            "openinference-instrumentation", "openinference"
        )
        return f"{short} {version}{f', {self.title}' if self.title else ''}"

    @property
    def recorded(self) -> list[tuple[str, Path]]:
        """The ways that are recorded, with their files."""
        files = [(how, next(RECORDED.glob(f"{self.name}-{how}.*"), None)) for how in self.hows]
        return [(how, path) for how, path in files if path is not None]


CASES: Final = (
    Case(
        name="openinference_openai",
        hows=("chat", "stream", "responses", "responses-stream", "chat-ids", "stream-ids"),
    ),
    Case(name="traceloop_openai", title="Traceloop", hows=("chat", "stream", "responses", "responses-stream")),
    Case(
        name="openai_v2",
        title="logs",
        environment={"OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT": "true"},
    ),
    Case(name="openai_v2_latest", title="latest", program="openai_v2", environment=LATEST),
    Case(name="openinference_langchain"),
    Case(name="langsmith_langchain", title="LangChain"),
    Case(name="langsmith_openai", title="wrap_openai", hows=("chat", "stream", "responses")),
    Case(name="claude_code", hows=("session",), harness="claude-code", log=".claude/projects/*/*.jsonl"),
    Case(name="codex", hows=("session",), harness="codex", log=".codex/sessions/**/*.jsonl"),
)


# ---------------------------------------------------------------------- a model


def with_vllm(app: ASGIApp) -> ASGIApp:
    """Answer as vLLM where a request asks for token ids, which our gateway does not give."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].endswith("/chat/completions"):
            await app(scope, receive, send)
            return
        body = await Request(scope, receive).body()
        asked = json.loads(body)
        if asked.get("return_token_ids"):
            await answer_with_ids(asked)(scope, receive, send)
            return
        parts: list[Message] = [{"type": "http.request", "body": body}]

        async def again() -> Message:
            return parts.pop() if parts else await receive()

        await app(scope, again, send)

    return serve


def answer_with_ids(asked: Mapping[str, Any]) -> Response:
    """A response of vLLM's with `return_token_ids`: of a stream, the prompt's ids are in the first chunk."""
    turn = sum(message["role"] == "assistant" for message in asked["messages"])
    prompt = list(range(100, 110 + 5 * turn))
    function = {"name": "look_up", "arguments": '{"day":  "today"}'}
    pieces: list[dict[str, Any]] = [{"content": "Seren"}, {"content": "dipity."}]
    message: dict[str, Any] = {"role": "assistant", "content": "Serendipity."}
    if turn == 0:
        call = {"id": "call_1", "type": "function", "function": function}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        first = {"index": 0, "id": "call_1", "type": "function", "function": {**function, "arguments": '{"day":  '}}
        second = {"index": 0, "function": {"arguments": '"today"}'}}
        pieces = [{"tool_calls": [first]}, {"tool_calls": [second]}]
    finish = "stop" if turn else "tool_calls"
    logprobs: list[dict[str, Any]] = [
        {"token": "a", "logprob": -0.25, "bytes": None, "top_logprobs": []} for _ in pieces
    ]
    ids = [200 + number for number in range(len(pieces))]
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)}
    whole = {"id": f"chatcmpl-{turn}", "created": 1, "model": "policy", "system_fingerprint": "policy@3"}
    if not asked.get("stream"):
        choice = {"index": 0, "message": message, "finish_reason": finish, "token_ids": ids}
        choice["logprobs"] = {"content": logprobs}
        body = {**whole, "object": "chat.completion", "choices": [choice], "usage": usage, "prompt_token_ids": prompt}
        return JSONResponse(body)
    head = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    chunks: list[dict[str, Any]] = [{"choices": [head], "prompt_token_ids": prompt}]
    for number, piece in enumerate(pieces):
        reason = finish if number == len(pieces) - 1 else None
        choice = {"index": 0, "delta": piece, "finish_reason": reason, "token_ids": [ids[number]]}
        chunks.append({"choices": [{**choice, "logprobs": {"content": [logprobs[number]]}}]})
    lines = [json.dumps({**whole, "object": "chat.completion.chunk", **chunk}) for chunk in chunks]
    return StreamingResponse(iter([f"data: {line}\n\n" for line in [*lines, "[DONE]"]]), media_type="text/event-stream")


# ---------------------------------------------------------------------- LangSmith's API


class RunsReceiver:
    """LangSmith's API as its SDK calls it without a network: runs that begin, and what changes when they end."""

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, Any]] = {}
        settings = {"use_multipart_endpoint": False, "size_limit": 100, "size_limit_bytes": 20_000_000}
        info = {
            "version": "0",
            "batch_ingest_config": {**settings, "scale_up_nthreads_limit": 1, "scale_up_qsize_trigger": 1000},
        }

        async def tell(_: Request) -> Response:
            return JSONResponse(info)

        self.app = Starlette(
            routes=[
                Route("/info", tell),
                Route("/runs/batch", self._batch, methods=["POST"]),
                Route("/runs", self._one, methods=["POST"]),
                Route("/runs/{run}", self._one, methods=["PATCH"]),
            ]
        )

    async def _batch(self, request: Request) -> Response:
        batch = json.loads(await request.body())
        for run in (*batch.get("post", ()), *batch.get("patch", ())):
            self._add(run)
        return JSONResponse({}, 202)

    async def _one(self, request: Request) -> Response:
        self._add({"id": request.path_params.get("run"), **json.loads(await request.body())})
        return JSONResponse({}, 202)

    def _add(self, run: dict[str, Any]) -> None:
        merged = self.runs.setdefault(str(run["id"]), {})
        merged |= {key: value for key, value in run.items() if value is not None}

    def lines(self) -> bytes:
        """The runs as an export has them."""
        for run in self.runs.values():
            run.get("extra", {}).pop("runtime", None)
        return "".join(json.dumps(run) + "\n" for run in self.runs.values()).encode()


# ---------------------------------------------------------------------- recording


async def record(case: Case, how: str) -> None:
    """Run a case in one way, and keep what it exports."""
    from scripted_policy import reply_of
    from try_clients import load_clients

    says = next((client.says for client in load_clients() if client.name == case.name), SAYS)
    engine = ScriptedEngine(tiny_tokenizer(), context_length=1_000_000, reply=reply_of(says), chunk_tokens=8)
    with tempfile.TemporaryDirectory(prefix="traces-") as name:
        folder, home = Path(name), Path(name) / "home"
        home.mkdir()
        async with AsyncExitStack() as stack:
            settings = GatewaySettings(sampling={engine.policy: SamplingSettings(max_tokens=8192)})
            serving_policy = live_gateway(folder, engine=engine, settings=settings, around=with_vllm)
            gateway = await stack.enter_async_context(serving_policy)
            receiver, runs = stack.enter_context(closing(OtlpReceiver(folder / "otlp"))), RunsReceiver()
            collector = await stack.enter_async_context(serving(receiver.app))
            langsmith = await stack.enter_async_context(serving(runs.app))
            attempt = await gateway.attempt()
            environment = {
                "HOME": str(home),
                "PATH": os.environ["PATH"],
                "OPENAI_BASE_URL": attempt.base_url,
                "OPENAI_API_KEY": attempt.key,
                "ANTHROPIC_BASE_URL": attempt.base_url.removesuffix("/v1"),
                "ANTHROPIC_API_KEY": attempt.key,
                "OTEL_EXPORTER_OTLP_ENDPOINT": collector,
                **case.environment,
            }
            if case.name.startswith("langsmith"):
                more = {"LANGSMITH_TRACING": "true", "LANGSMITH_ENDPOINT": langsmith, "LANGSMITH_API_KEY": "no-key"}
                environment |= {**more, "LANGSMITH_DISABLE_RUN_COMPRESSION": "true"}
            if case.harness:
                command, added = harness_command(case, attempt.base_url, attempt.key, home)
                environment |= added
            else:
                from environment import environment as make_environment

                python = make_environment(f"traces-{case.program or case.name}", case.packages)
                command = [str(python), str(PROGRAMS / f"{case.program or case.name}.py"), how]
            await run(command, environment, home)
            if case.harness:
                (log,) = home.glob(case.log)
                export, ending = without_prompts(log.read_text().splitlines()), "jsonl"
            elif runs.runs:
                export, ending = runs.lines(), "jsonl"
            else:
                export, ending = receiver.path.read_bytes(), "otlp"
    RECORDED.mkdir(exist_ok=True)
    for old in RECORDED.glob(f"{case.name}-{how}.*"):
        old.unlink()
    (RECORDED / f"{case.name}-{how}.{ending}.gz").write_bytes(gzip.compress(export, mtime=0))


async def run(command: Sequence[str], environment: Mapping[str, str], home: Path) -> None:
    (folder := home / "work").mkdir()
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await asyncio.wait_for(process.communicate(), LIMIT_S)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with status {process.returncode}:\n{output.decode()[-3000:]}")


def harness_command(case: Case, base_url: str, key: str, home: Path) -> tuple[list[str], dict[str, str]]:
    from try_clients import install, load_clients

    from lightningrl_client.runtime.harnesses.rows import Places

    client = next(client for client in load_clients() if client.name == case.name)
    if (reason := install(client)) is not None:
        raise SystemExit(f"{case.name} cannot be installed: {reason}")
    row = client.row
    assert row is not None
    work = str(home / "work")
    places = Places(input=TASK, base_url=base_url, key=key, model=row.model, home=str(home), folder=work)
    added = {name: places.fill(value) for name, value in row.environment.items()}
    added["PATH"] = f"{client.bin_folder}{os.pathsep}{os.environ['PATH']}"
    return [places.argument(word) for word in row.command], added


def without_prompts(lines: Iterable[str]) -> bytes:
    """A log without its vendor's prompts."""

    def short(value: Any) -> Any:
        if isinstance(value, str):
            return value if len(value) < 400 else f"{value[:40]} …"
        if isinstance(value, dict):
            return {key: short(inner) for key, inner in value.items()}
        return [short(inner) for inner in value] if isinstance(value, list) else value

    return "".join(json.dumps(short(json.loads(line))) + "\n" for line in lines).encode()


# ---------------------------------------------------------------------- the table


def rows_of(case: Case) -> list[list[str]]:
    """Rows of the table, made of what is recorded; ways of which the same comes are one row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for how, path in case.recorded:
        with tempfile.TemporaryDirectory(prefix="traces-") as folder:
            report = import_traces(path, Path(folder) / "run", None, load_plugins())
        grades = ", ".join(f"{count} {grade}" for grade, count in sorted(report.grades.items()))
        why = "; ".join(dict.fromkeys(reason for _, reason in sorted(report.reasons)))
        rows.setdefault((describe(read_calls(path)), grades, why), []).append(how)
    return [[case.label, ", ".join(hows), *cells] for cells, hows in rows.items()]


def describe(calls: Sequence[Call]) -> str:
    """Say what is recorded of calls."""
    facts = {
        "messages": [call.messages is not None and call.answer is not None for call in calls],
        "schemas": [bool(call.tools) for call in calls],
        "temperature": ["temperature" in call.sampling for call in calls],
        "finish": [call.finish_reason is not None for call in calls],
    }
    lacking = [name for name, claims in facts.items() if not any(claims)]
    lacking += [f"some {name}" for name, claims in facts.items() if any(claims) and not all(claims)]
    words = "all" if not lacking else "nothing" if len(lacking) == len(facts) else f"all but {', '.join(lacking)}"
    return f"{words}, token ids" if any(call.completion_ids for call in calls) else words


def read_calls(path: Path) -> list[Call]:
    """The calls of a file, before they are masked and graded."""
    (source,) = open_source_files(path, None, load_plugins())
    traces: dict[str, list[TraceRecord]] = {}
    for item in source.importer.read(path):
        traces.setdefault(item.trace_id, []).append(item)
    return [call for trace, items in traces.items() for call in join_records(trace, items).calls]


def table(rows: Iterable[Sequence[str]]) -> str:
    names = "instrumentation", "calls by", "recorded", "grades", "what is missing"
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Run real instrumentations and import what they exported.")
    parser.add_argument("only", nargs="*", metavar="NAME", help="some of them")
    parser.add_argument("--table", action="store_true", help="make the table of what is recorded already")
    arguments = parser.parse_args()
    names = [case.name for case in CASES]
    if unknown := set(arguments.only) - set(names):
        raise SystemExit(f"no instrumentation {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    sys.path += [str(ROOT / "benchmarks/peers"), str(ROOT / "tests/clients/scripted"), str(Path(__file__).parent)]
    chosen = [case for case in CASES if not arguments.only or case.name in arguments.only]
    for case in [] if arguments.table else chosen:
        for how in case.hows:
            print(f"{case.name}, {how} …", file=sys.stderr, flush=True)
            asyncio.run(record(case, how))
    text = table(row for case in chosen for row in rows_of(case))
    print(text)
    if not arguments.only:
        PAGE.write_text(PLACE.sub(lambda place: place[1] + text + place[2], PAGE.read_text()))


if __name__ == "__main__":
    main()
