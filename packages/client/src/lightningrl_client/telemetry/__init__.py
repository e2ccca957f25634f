"""A worker's telemetry: its spans, and whose they are."""
