"""Task source of reasoning-gym: questions of its generators, drawn by seed, with the generators' own checks."""

from lightningrl.lazy import lazy_names

__getattr__, __all__ = lazy_names(__name__, __file__)
"""The public names and where each is defined."""
