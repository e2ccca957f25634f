"""Agents that send what no policy can answer, in each dialect, through the official SDKs; workers run them in a process
of their own."""

from __future__ import annotations

from typing import Any

import anthropic
import openai


def act(task: dict[str, Any]) -> str:
    """What is refused is raised, as agents do that do not look; or it is no matter (`task["swallows"]`)."""
    try:
        return send(task["dialect"], task["bodies"])
    except (openai.APIError, anthropic.APIError):
        if not task["swallows"]:
            raise
        return "I did what I could"


def send(dialect: str, bodies: list[dict[str, Any]]) -> str:
    """The calls in turn; the last answer."""
    text = ""
    for body in bodies:
        if dialect == "messages":
            with anthropic.Anthropic(max_retries=0) as claude:
                message = claude.messages.create(**{"model": "m", "max_tokens": 20, **body})
                text = "".join(block.text for block in message.content if block.type == "text")
        else:
            with openai.OpenAI(max_retries=0) as client:
                if dialect == "responses":
                    text = client.responses.create(**{"model": "m", **body}).output_text
                else:
                    text = client.chat.completions.create(**{"model": "m", **body}).choices[0].message.content or ""
    return text or "nothing"
