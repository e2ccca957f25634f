"""Run others' own test suites against the gateway, with a scripted policy that answers as their tests ask for.

    make test-peers-clients                      clients, harnesses and suites
    make test-peers-clients ONLY=langchain       one suite
    tests/clients/suites/NAME_standard.py        a suite's class for our server; its first line pins what is installed
    OPEN_RESPONSES=FOLDER                        a clone of openresponses/openresponses; without it one is made

pins ─► .clients/suite_NAME (environment) ─► pytest, or bun, there ─ HTTP ─► gateway ─► scripted policy
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from lightningrl_testing.scripted_server import ScriptedServer

ROOT: Final = Path(__file__).parents[1]
SUITES: Final = {
    "openresponses": Path(),
    **{file.name.removesuffix("_standard.py"): file for file in (ROOT / "tests/clients/suites").glob("*_standard.py")},
}
CACHE: Final = ROOT / ".clients"
PINS: Final = re.compile(r"^# dependencies = (\[.*\])$", re.MULTILINE)
OPEN_RESPONSES: Final = "https://github.com/openresponses/openresponses"
NOT_OURS: Final = re.compile("WebSocket|Compact|Image")
"""Names of tests that do not apply to a policy of text: another connection, summaries by the server, pictures."""
ENDS: Final = ("failure", "error", "skipped")


def answer(body: Mapping[str, Any]) -> dict[str, Any]:
    """The policy: calls the tool that is asked for, once; JSON where it is asked for; else a sentence."""
    messages: Sequence[Mapping[str, Any]] = body["messages"]
    text, last = json.dumps(messages, ensure_ascii=False), messages[-1]
    if tools := [_function(tool) for tool in body.get("tools") or ()]:
        is_free = _choice(body) not in ("required", "any") and not _named(body)
        if not (is_free and (last["role"] == "tool" or "tool_result" in json.dumps(last.get("content")))):
            chosen = next((tool for tool in tools if tool["name"] in (_named(body) or text)), tools[0])
            return _call(chosen, text)
    if schema := _schema(body):
        return {"content": json.dumps(_fill(schema, text), ensure_ascii=False)}
    if "JSON" in text:
        return {"content": '{"setup": "Why?", "punchline": "Because."}'}
    return {"content": "Hello. It is sunny there, and here as well."}


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool of any dialect: `name`, `parameters`."""
    inner = tool.get("function", tool)
    return {"name": inner["name"], "parameters": inner.get("parameters") or inner.get("input_schema") or {}}


def _choice(body: Mapping[str, Any]) -> str:
    choice = body.get("tool_choice") or "auto"
    return choice if isinstance(choice, str) else str(choice.get("type"))


def _named(body: Mapping[str, Any]) -> str:
    choice = body.get("tool_choice")
    return "" if choice is None or isinstance(choice, str) else str(choice.get("function", choice).get("name") or "")


def _schema(body: Mapping[str, Any]) -> Mapping[str, Any]:
    form = body.get("response_format") or (body.get("text") or {}).get("format")
    form = form or (body.get("output_config") or {}).get("format") or {}
    return (form.get("json_schema") or form).get("schema") or {}


def _call(tool: Mapping[str, Any], text: str) -> dict[str, Any]:
    arguments = json.dumps(_fill(tool["parameters"], text), ensure_ascii=False)
    return {"content": "", "tool_calls": [{"function": {"name": tool["name"], "arguments": arguments}}]}


def _fill(schema: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Arguments by a schema of plain properties: the 3 of `magic_function(3)`, a name in quotes."""
    quoted = re.search(r"named '([^']+)'", text)
    words = quoted[1] if quoted else "Pirate"
    return {
        name: 3 if part.get("type") == "integer" else words for name, part in (schema.get("properties") or {}).items()
    }


def install(name: str, file: Path) -> Path:
    """Make the suite's environment anew where its pins have changed; returns its Python."""
    pins = PINS.search(file.read_text())
    if pins is None:
        raise SystemExit(f"{file.name} pins nothing; begin it with a line `# dependencies = […]`")
    folder = CACHE / f"suite_{name}"
    mark, python = folder / "installed.txt", folder / "bin/python"
    if not mark.exists() or mark.read_text() != pins[1]:
        uv = str(Path(sys.executable).with_name("uv"))
        subprocess.run([uv, "venv", "--quiet", "--clear", str(folder)], check=True)
        subprocess.run([uv, "pip", "install", "--quiet", "--python", str(python), *json.loads(pins[1])], check=True)
        mark.write_text(pins[1])
    return python


def run_open_responses() -> int:
    """Run the specification's own compliance tests; returns the number of failures that are not left out."""
    folder = CACHE / "suite_openresponses"
    if not (folder / "node_modules/.bin/bun").exists():
        with TemporaryDirectory() as fresh:
            clone = os.environ.get("OPEN_RESPONSES") or fresh
            if clone is fresh:
                subprocess.run(["git", "clone", "--quiet", "--depth=1", OPEN_RESPONSES, fresh], check=True)
            for part in ("bin", "src"):
                shutil.copytree(Path(clone) / part, folder / part, dirs_exist_ok=True)
        (folder / "package.json").write_text("{}")
        install = ["npm", "install", "--loglevel=error", "--no-audit", "--no-fund", "zod@3.25.76", "bun@1"]
        subprocess.run(install, check=True, cwd=folder)
    with ScriptedServer(answer) as server:
        _, path, key = server.open_attempt("suite")
        given = ["--base-url", f"{server.url}{path.removesuffix('/v1')}/v1", "--api-key", key, "--model", "policy"]
        command = ["node_modules/.bin/bun", "run", "bin/compliance-test.ts", *given, "--json"]
        ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    results = json.loads(ran.stdout[ran.stdout.index("{") :])["results"]
    ours = [row for row in results if not NOT_OURS.search(row["name"])]
    failed = [row for row in ours if row["status"] != "passed"]
    for row in failed:
        print(f"  failure {row['name']}: {row.get('errors')}")
    passed = len(ours) - len(failed)
    print(
        f"openresponses: {passed} of {len(results)} pass, {len(results) - len(ours)} do not apply, {len(failed)} fail"
    )
    return len(failed)


def run_suite(name: str) -> int:
    """Run a suite and print what failed, and how many did not; returns the number of failures."""
    if name == "openresponses":
        return run_open_responses()
    file = SUITES[name]
    python = install(name, file)
    with TemporaryDirectory() as folder, ScriptedServer(answer) as server:
        _, path, key = server.open_attempt("suite")
        base = f"{server.url}{path.removesuffix('/v1')}"
        clean = {variable: value for variable, value in os.environ.items() if not variable.startswith("PYTEST")}
        report = Path(folder) / "report.xml"
        loops = (f"asyncio_default_{what}_loop_scope=session" for what in ("test", "fixture"))  # a client has one loop
        own = ["-q", "-p", "no:cacheprovider", *(f"-o{option}" for option in ("asyncio_mode=auto", *loops))]
        shutil.copy(file, folder)  # away from this project's own conftest.py
        words = [str(python), "-m", "pytest", f"--rootdir={folder}", f"--junitxml={report}", *own, file.name]
        ran = subprocess.run(
            words,
            env={**clean, "SUITE_URL": base, "SUITE_KEY": key, "PYTHONPATH": ""},
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        if not report.exists():
            raise SystemExit(f"{name}: no test ran\n{ran.stdout[-2000:]}{ran.stderr[-2000:]}")
        cases = list(ElementTree.parse(report).iter("testcase"))  # noqa: S314  pytest's own file
    ends = Counter(next((end for end in ENDS if case.find(end) is not None), "passed") for case in cases)
    for case in cases:
        for end in ("failure", "error"):
            if (part := case.find(end)) is not None:
                print(f"  {end} {case.get('classname')}.{case.get('name')}: {(part.get('message') or '')[:300]}")
    failed = ends["failure"] + ends["error"]
    print(f"{name}: {ends['passed']} of {sum(ends.values())} pass, {ends['skipped']} do not apply, {failed} fail")
    return failed
