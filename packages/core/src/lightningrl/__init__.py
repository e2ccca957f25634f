"""LightningRL: train the language model inside any agent with reinforcement learning; the agent's code does not change.

The names in `__init__.pyi` are all that a recipe, a reward, a credit assigner, a plugin or a hand-written agent needs.
They are imported when first used. What else may be imported, and from where, is in docs/how-to/plugins.md.
"""

from __future__ import annotations

import importlib

from lightningrl.lazy import read_homes

_HOMES = read_homes(__file__)
_INSTALLED_BY = {
    "lightningrl_client": "lightningrl[worker]",
    "lightningrl_credit": "lightningrl-credit",
    "lightningrl_server": "lightningrl[server]",
    "lightningrl_training": "lightningrl[torch]",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'lightningrl' has no attribute {name!r}")
    home = _HOMES[name]
    try:
        module = importlib.import_module(home)
    except ModuleNotFoundError as error:
        if error.name not in _INSTALLED_BY or error.name != home.partition(".")[0]:
            raise
        remedy = f"pip install '{_INSTALLED_BY[error.name]}'"
        raise ModuleNotFoundError(f"lightningrl.{name} is not installed; {remedy}", name=error.name) from None
    return getattr(module, name) if name in vars(module) else importlib.import_module(f"{home}.{name}")


def __dir__() -> list[str]:
    return __all__
