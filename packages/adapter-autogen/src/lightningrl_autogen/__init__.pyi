"""The public name and where it is defined."""

from lightningrl_autogen.adapter import AutoGenAdapter as AutoGenAdapter

__all__: list[str]
