"""Registers the commands of traces and the importers of their formats."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any, Final

from lightningrl.plugins import Plugin, hookimpl

__all__ = ["lightningrl_commands", "lightningrl_trace_importers"]

_IMPORTERS: Final = {
    "otlp": ("otlp.OtlpImporter", "OTLP files of spans and logs: JSON, JSON lines, protobuf"),
    "phoenix": ("phoenix.PhoenixImporter", "spans exported from Phoenix"),
    "langfuse": ("langfuse.LangfuseImporter", "observations exported from Langfuse"),
    "langsmith": ("langsmith.LangSmithImporter", "runs exported from LangSmith"),
    "atif": ("atif.AtifImporter", "trajectories in ATIF"),
    "openenv": ("openenv.OpenEnvImporter", "OpenEnv's TrainingTraces"),
    "claude-code": ("claude_code.ClaudeCodeImporter", "sessions that Claude Code logs"),
    "codex": ("codex.CodexImporter", "sessions that Codex logs"),
    "messages": ("chat.ChatImporter", "rows of chat messages"),
}
"""Modules and classes by format, the most telling first."""


@hookimpl
def lightningrl_commands() -> Iterable[Plugin]:
    from lightningrl_traces.commands import COMMANDS

    yield from COMMANDS


@hookimpl
def lightningrl_trace_importers() -> Iterable[Plugin]:
    for name, (place, summary) in _IMPORTERS.items():
        yield Plugin(name=name, summary=summary, factory=lambda place=place: _build(place))


def _build(place: str) -> Any:
    module, _, name = place.partition(".")
    return getattr(import_module(f"lightningrl_traces.importers.{module}"), name)()
