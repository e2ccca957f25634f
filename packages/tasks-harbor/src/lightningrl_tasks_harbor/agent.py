"""Default agent of a task folder: chat completions and one tool, `bash`, which runs in the task's box."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import httpx

from lightningrl_tasks_harbor.boxes import CommandResult
from lightningrl_tasks_harbor.opening import OpenBox

__all__ = ["AgentSettings", "converse"]

BASH: Final = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a bash command and see what it prints. Each command starts in the same folder.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
            "additionalProperties": False,
        },
    },
}
SYSTEM: Final = "Do the task with the tool bash. When it is done, answer with a short sentence and no tool call."


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentSettings:
    """Bounds of the loop."""

    max_turns: int = 12
    max_output: int = 4_000
    """Bytes of a command's output that the policy sees."""
    command_timeout_s: float = 30.0
    time_limit_s: float = 300.0
    """Time of all commands of a rollout, where the task names none; the policy's own time is not counted."""


def converse(instruction: str, opened: OpenBox, settings: AgentSettings, time_limit_s: float) -> dict[str, Any]:
    """Let the policy work in the box until it answers without a tool call, or turns or time are used up.

    Returns `answer` (the last text), `turns`, and `ended`: `"answer"`, `"turns"` or `"time"`. Raises httpx.HTTPError
    where a model call fails."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": instruction},
    ]
    answer, left_s = "", time_limit_s
    headers = {"Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', '')}"}
    url = os.environ.get("OPENAI_BASE_URL", "https://api.openai.com/v1").rstrip("/") + "/chat/completions"
    with httpx.Client(timeout=httpx.Timeout(None, connect=30.0), headers=headers) as client:
        for turn in range(1, settings.max_turns + 1):
            request = {"model": "gpt-4o-mini", "messages": messages, "tools": [BASH]}
            message = client.post(url, json=request).raise_for_status().json()["choices"][0]["message"]
            answer = message.get("content") or ""
            calls = message.get("tool_calls") or []
            if not calls:
                return {"answer": answer, "turns": turn, "ended": "answer"}
            messages.append({"role": "assistant", "content": message.get("content"), "tool_calls": calls})
            for call in calls:
                started = time.monotonic()
                text = run_tool(call["function"], opened, settings, left_s)
                left_s -= time.monotonic() - started
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
            if left_s <= 0:
                return {"answer": answer, "turns": turn, "ended": "time"}
    return {"answer": answer, "turns": settings.max_turns, "ended": "turns"}


def run_tool(function: Mapping[str, Any], opened: OpenBox, settings: AgentSettings, left_s: float) -> str:
    """Run what the policy asked for; what cannot be run comes back as a text that says why."""
    if function.get("name") != "bash":
        return f"error: no tool named {function.get('name')!r}; there is bash"
    try:
        command = json.loads(function.get("arguments") or "")["command"]
    except (ValueError, RecursionError, TypeError, KeyError):
        command = None
    if not isinstance(command, str) or "\0" in command:
        return 'error: write the arguments as {"command": "ls"}'
    if left_s <= 0:
        return "error: the time for commands is used up"
    limit_s = min(settings.command_timeout_s, left_s)
    ended = opened.box.run(
        command,
        folder=opened.folder,
        environment=opened.environment,
        timeout_s=limit_s,
        limit=settings.max_output,
    )
    return _describe(ended, limit_s)


def _describe(ended: CommandResult, limit_s: float) -> str:
    lines = [ended.output.rstrip("\n")] if ended.output.strip() else []
    if ended.is_late:
        lines.append(f"[killed after {limit_s:g} s]")
    elif ended.status != 0:
        lines.append(f"[status {ended.status}]")
    return "\n".join(lines) or "[no output]"
