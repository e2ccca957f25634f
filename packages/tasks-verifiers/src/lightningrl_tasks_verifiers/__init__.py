"""Tasksets of verifiers as tasks: tasks and scores from a process that has verifiers, in an environment of its own."""

from lightningrl.lazy import lazy_names

__getattr__, __all__ = lazy_names(__name__, __file__)
"""The public names and where each is defined."""
