"""LightningRL adapter for the OpenAI Agents SDK. The SDK is imported when the adapter is, so that listing plugins stays
light."""

from lightningrl.lazy import lazy_names

__getattr__, __all__ = lazy_names(__name__, __file__)
