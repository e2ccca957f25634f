"""OpenEnv servers as tasks: task API, tools, a reward for each step. It speaks their wire, without openenv."""

from lightningrl.lazy import lazy_names

__getattr__, __all__ = lazy_names(__name__, __file__)
"""The public names and where each is defined."""
