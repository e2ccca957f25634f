"""The agent against a scripted OpenAI endpoint over real HTTP."""

import json
import sqlite3
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest


class Script:
    """Gives the enqueued answers in order and keeps the prompts."""

    def __init__(self) -> None:
        self.answers: list[str] = []
        self.prompts: list[str] = []

    def reply(self, request: dict[str, Any]) -> dict[str, Any]:
        self.prompts.append(request["messages"][-1]["content"])
        message = {"role": "assistant", "content": self.answers.pop(0)}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    script = Script()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer = json.dumps(script.reply(body)).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    import agent

    for model in (agent.writer, agent.checker, agent.rewriter):
        client = model.root_client.with_options(base_url=f"http://127.0.0.1:{server.server_port}/v1")
        monkeypatch.setattr(model, "client", client.chat.completions)
    yield script
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def task(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "pilots.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE pilots (name TEXT, age INTEGER)")
    connection.execute("INSERT INTO pilots VALUES ('anna', 30)")
    connection.commit()
    connection.close()
    return {"question": "list the age of all pilots.", "schema": "- pilots : name age", "db_path": str(path)}


def test_a_right_first_query_takes_two_calls(script: Script, task: dict[str, Any]) -> None:
    import agent

    script.answers = ["```sql\nSELECT age FROM pilots;\n```", "Correct."]

    output = agent.answer(task)

    assert output == {"query": "SELECT age FROM pilots", "queries": ["SELECT age FROM pilots"], "turns": 1}
    assert "Result: 1 rows: 30" in script.prompts[1]


def test_an_error_is_shown_and_rewritten(script: Script, task: dict[str, Any]) -> None:
    import agent

    script.answers = ["SELECT ages FROM pilots", "incorrect", "SELECT age FROM pilots", "correct"]

    output = agent.answer(task)

    assert output["queries"] == ["SELECT ages FROM pilots", "SELECT age FROM pilots"]
    assert "Result: error: no such column: ages" in script.prompts[2]


def test_the_agent_stops_after_three_queries(script: Script, task: dict[str, Any]) -> None:
    import agent

    script.answers = ["a", "incorrect", "b", "incorrect", "c", "incorrect"]

    output = agent.answer(task)

    assert output == {"query": "c", "queries": ["a", "b", "c"], "turns": 3}
    assert script.answers == []


def test_the_agent_knows_nothing_of_us() -> None:
    for name in ("agent.py", "prompts.py", "sandbox.py"):
        assert "lightningrl" not in (Path(__file__).parent.parent / name).read_text().lower()
