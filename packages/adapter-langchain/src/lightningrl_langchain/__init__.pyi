"""The public name and where it is defined."""

from lightningrl_langchain.adapter import LangChainAdapter as LangChainAdapter

__all__: list[str]
