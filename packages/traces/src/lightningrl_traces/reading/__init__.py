"""Spans and log records, read as calls, rollouts and grades."""
