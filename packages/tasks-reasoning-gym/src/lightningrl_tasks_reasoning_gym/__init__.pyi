"""The public names and where each is defined: type checkers and `__init__.py` read this list."""

from lightningrl_tasks_reasoning_gym.source import ReasoningGym as ReasoningGym
from lightningrl_tasks_reasoning_gym.source import read_answer as read_answer

__all__: list[str]
