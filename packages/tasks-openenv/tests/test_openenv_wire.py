"""Each server says what was recorded of openenv 0.10 in `wire.json`, in all that we read.

`python packages/tasks-openenv/tests/test_openenv_wire.py URL-OF-SUMS URL-OF-GUESSES` records it anew, from
`sums_server.py` in the environment of `make test-openenv`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import connect

RECORD = Path(__file__).with_name("wire.json")
LIST = {"type": "mcp", "data": {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}}
ASKED: dict[str, list[tuple[str, str, Any]]] = {
    "sums": [
        ("GET", "/list_environments", None),
        ("GET", "/sums/splits", None),
        ("POST", "/sums/num_tasks", {"split": "train"}),
        ("POST", "/sums/task_range", {"split": "test", "start": 248, "stop": 250}),
    ],
    "action": [("GET", "/list_environments", None), ("GET", "/guesses/splits", None), ("GET", "/schema", None)],
}


def use(name: Any, **arguments: Any) -> dict[str, Any]:
    return {"type": "step", "data": {"type": "call_tool", "tool_name": name, "arguments": arguments}}


SAID = {
    "sums": [
        {"type": "reset", "data": {"split": "train", "index": 0}},
        LIST,
        use("add", a=1, b=2),
        use("add", a="x"),
        use("nothing"),
        {"type": "step", "data": {"foo": 1}},
        use("answer", text="1"),
        {"type": "reset", "data": {"split": "train", "index": 0}},
        use("answer", text="864"),
    ],
    "action": [
        {"type": "reset", "data": {"seed": 3}},
        LIST,
        {"type": "step", "data": {"number": 0}},
        {"type": "step", "data": {"numb": 1}},
    ],
}


def ask(url: str, kind: str) -> list[Any]:
    """Answers to all of that, as far as we read them."""
    answers: list[Any] = []
    for method, path, body in ASKED[kind]:
        answer = httpx.request(method, url + path, json=body)
        data = answer.json()
        if path == "/schema":
            action = data["action"]
            data = [sorted(action["properties"]), action["required"], action["properties"]["number"]["type"]]
        answers.append([answer.status_code, data])
    with connect("ws" + url.removeprefix("http") + "/ws") as socket:
        for message in SAID[kind]:
            socket.send(json.dumps(message))
            answers.append(reduce(json.loads(socket.recv())))
    return answers


def reduce(answer: dict[str, Any]) -> Any:
    """What we read of an answer; texts of errors, which pydantic words, by their kind."""
    data = answer["data"]
    if answer["type"] == "error":
        return ["error", data["code"], [error["loc"] for error in data.get("errors", ())][:1]]
    if answer["type"] == "mcp":
        if "error" in data:
            return ["mcp", data["error"]["code"]]
        tools = data["result"]["tools"]
        return ["mcp", [[tool["name"], tool["description"], tool["inputSchema"]["properties"]] for tool in tools]]
    fields = dict(data["observation"])
    if fields.get("error"):
        fields["error"] = fields["error"]["error_type"]
    if fields.get("result"):
        result = fields["result"]
        fields["result"] = [[block["type"], block["text"]] for block in result["content"]] + [result["is_error"]]
    return [answer["type"], fields, data["reward"], data["done"]]


def test_both_servers_speak_as_recorded(start_server: Callable[..., str]) -> None:
    recorded = json.loads(RECORD.read_text())
    for kind in ASKED:
        assert ask(start_server(kind), kind) == recorded[kind]


if __name__ == "__main__":
    record = {kind: ask(url, kind) for kind, url in zip(ASKED, sys.argv[1:], strict=True)}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
