"""Task source of reasoning-gym: questions of its generators, drawn by seed, with the generators' own checks."""

from __future__ import annotations

from lightningrl_tasks_reasoning_gym.answers import read_answer
from lightningrl_tasks_reasoning_gym.source import ReasoningGym

__all__ = ["ReasoningGym", "read_answer"]
