"""Traces of agents in production as data: import, grade, curate."""
