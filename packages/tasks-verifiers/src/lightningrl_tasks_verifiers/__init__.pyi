"""The public names and where each is defined: type checkers and `__init__.py` read this list."""

from lightningrl_tasks_verifiers.source import BridgeFailure as BridgeFailure
from lightningrl_tasks_verifiers.source import VerifiersTasks as VerifiersTasks

__all__: list[str]
