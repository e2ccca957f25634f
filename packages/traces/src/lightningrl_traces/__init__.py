"""Traces of agents in production as data: import, grade, curate."""

from __future__ import annotations

from lightningrl_traces.records import Call, Ending, LogRecord, Sample, Span, ToolRun, TraceImporter, TraceRecord

__all__ = ["Call", "Ending", "LogRecord", "Sample", "Span", "ToolRun", "TraceImporter", "TraceRecord"]
