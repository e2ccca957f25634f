"""Task folders in Harbor's format as a source of tasks, and the boxes that their rollouts run in. Public names:
`__init__.pyi`."""

from lightningrl.lazy import lazy_names

__getattr__, __all__ = lazy_names(__name__, __file__)
