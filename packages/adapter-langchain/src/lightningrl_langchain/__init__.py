"""LightningRL adapter for LangChain and LangGraph."""

from lightningrl_langchain.adapter import LangChainAdapter

__all__ = ["LangChainAdapter"]
