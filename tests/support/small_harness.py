"""A coding harness in one file: a loop of chat completions with one tool, `run`, a shell's command in the current
folder. On SIGTERM it writes its last words into $LAST_WORDS.

    python small_harness.py "write the file"           the policy is `reply`: it does what stands between « and »
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

TOOL = {
    "type": "function",
    "function": {
        "name": "run",
        "description": "Run a shell's command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}

ROW = {"command": [sys.executable, __file__, "{input}"]}
"""The harness, as a row of a recipe."""


def reply(prompt: str) -> str:
    """A policy's answer: a call of `run` with what stands between « and » in the task, then a last sentence."""
    if "<tool_response>" in prompt or "«" not in prompt:
        return "It is done."
    command = re.findall(r"«(.*?)»", prompt, re.DOTALL)[-1]
    return f'<tool_call>\n{{"name": "run", "arguments": {json.dumps({"command": command})}}}\n</tool_call>'


def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
    body = {"model": "policy", "messages": messages, "tools": [TOOL]}
    headers = {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "content-type": "application/json"}
    address = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    request = urllib.request.Request(address, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as answer:
        return dict(json.load(answer)["choices"][0]["message"])


def leave(*_: object) -> None:
    if "LAST_WORDS" in os.environ:
        Path(os.environ["LAST_WORDS"]).write_text("flushed")
    sys.exit(1)


def main() -> None:
    signal.signal(signal.SIGTERM, leave)
    messages: list[dict[str, Any]] = [{"role": "user", "content": sys.argv[1]}]
    while True:
        message = ask(messages)
        messages.append(message)
        if not message.get("tool_calls"):
            print(message["content"])
            return
        for call in message["tool_calls"]:
            command = json.loads(call["function"]["arguments"])["command"]
            done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True)
            content = (done.stdout + done.stderr)[-2000:] or "done"
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})


if __name__ == "__main__":
    main()
