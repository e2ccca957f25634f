"""LightningRL adapter for AutoGen (AgentChat and Core). AutoGen is imported when the adapter is, so that listing
plugins stays light."""

from lightningrl.lazy import lazy_names

__getattr__, __all__ = lazy_names(__name__, __file__)
