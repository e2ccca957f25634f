"""Spans: what makes them (the client's `telemetry`), and what is read from them (otlp, tool_spans).

worker: spans of calls and tools ──(OTLP)──► /rollouts/{id}/attempts/{n}/v1/traces ─► tool calls and roles
agent:  log records              ──(OTLP)──► /rollouts/{id}/attempts/{n}/v1/logs   ─► its evaluations, as rewards
"""
