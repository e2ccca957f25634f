"""The public names and where each is defined: type checkers and `__init__.py` read this list."""

from lightningrl_tasks_reasoning_gym.answers import read_answer as read_answer
from lightningrl_tasks_reasoning_gym.source import ReasoningGym as ReasoningGym

__all__: list[str]
