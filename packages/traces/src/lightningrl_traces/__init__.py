"""Traces of agents in production as data: import, grade, curate."""

from lightningrl.lazy import lazy_names

__getattr__, __all__ = lazy_names(__name__, __file__)
"""The public names and where each is defined."""
