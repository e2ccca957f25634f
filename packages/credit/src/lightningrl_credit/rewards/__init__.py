"""Rewards: terminal ones of an episode, by name and weight, and automatic intermediate ones (AIR) of its calls. The
names in `__init__.pyi` are public."""

from lightningrl.lazy import lazy_names

__getattr__, __all__ = lazy_names(__name__, __file__)
