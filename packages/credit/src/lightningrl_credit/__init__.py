"""Credit assignment: how an episode's return becomes an advantage of each sampled token.

    group ─► returns(trajectory): one per call ─► baseline over the group, or over each role's calls ─► Advantages

docs/explanation/credit/index.md has the table of methods, with formulas and sources. Public names: `__init__.pyi`.
"""

from lightningrl.lazy import lazy_names

__getattr__, __all__ = lazy_names(__name__, __file__)
