"""LightningRL: train the language model inside any agent with reinforcement learning; the agent's code does not change.

The names below are all that a recipe, a reward, a credit assigner, a plugin or a hand-written agent needs.
They are imported when first used. What else may be imported, and from where, is in docs/plugins.md.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightningrl.attribution.origin import CallOrigin
    from lightningrl.attribution.role import role
    from lightningrl.client import report_reward, tool
    from lightningrl.config import (
        CreditConfig,
        LoopConfig,
        PolicyConfig,
        Recipe,
        RewardConfig,
        RuntimeConfig,
        SamplingConfig,
        TasksConfig,
        ValidationConfig,
    )
    from lightningrl.credit.baselines import center, mean
    from lightningrl.credit.needs import Need
    from lightningrl.credit.spread import spread
    from lightningrl.dialects import DIALECTS, Dialect
    from lightningrl.errors import BackendError, ConfigError, ContextOverflow, LightningError
    from lightningrl.gateway.errors import Refusal
    from lightningrl.gateway.request import CallRequest
    from lightningrl.plugins import Plugin, PluginManager, hookimpl
    from lightningrl.protocols import Backend, Capabilities, CreditAssigner, Engine, IntermediateReward, LearnReport, Reward, StepReport
    from lightningrl.run import Run, evaluate, problems, train, train_async
    from lightningrl.runtime.command import command_agent
    from lightningrl.runtime.launcher import WorkerLauncher, WorkerPlan
    from lightningrl.runtime.supervisor import LocalLauncher, Supervisor
    from lightningrl.store.protocol import RolloutFilter
    from lightningrl.telemetry import semconv
    from lightningrl.types import (
        Advantages,
        EngineInfo,
        Evidence,
        FinishReason,
        GenerateRequest,
        OtherCall,
        OtherCallKind,
        Outcome,
        Sample,
        SamplingSettings,
        Task,
        TokenChunk,
        ToolCall,
        ToolStatus,
        Trajectory,
        TrajectoryGroup,
        Transition,
    )

__all__ = [
    "DIALECTS",
    "Advantages",
    "Backend",
    "BackendError",
    "CallOrigin",
    "CallRequest",
    "Capabilities",
    "ConfigError",
    "ContextOverflow",
    "CreditAssigner",
    "CreditConfig",
    "Dialect",
    "Engine",
    "EngineInfo",
    "Evidence",
    "FinishReason",
    "GenerateRequest",
    "IntermediateReward",
    "LearnReport",
    "LightningError",
    "LocalLauncher",
    "LoopConfig",
    "Need",
    "OtherCall",
    "OtherCallKind",
    "Outcome",
    "Plugin",
    "PluginManager",
    "PolicyConfig",
    "Recipe",
    "Refusal",
    "Reward",
    "RewardConfig",
    "RolloutFilter",
    "Run",
    "RuntimeConfig",
    "Sample",
    "SamplingConfig",
    "SamplingSettings",
    "StepReport",
    "Supervisor",
    "Task",
    "TasksConfig",
    "TokenChunk",
    "ToolCall",
    "ToolStatus",
    "Trajectory",
    "TrajectoryGroup",
    "Transition",
    "ValidationConfig",
    "WorkerLauncher",
    "WorkerPlan",
    "center",
    "command_agent",
    "evaluate",
    "hookimpl",
    "mean",
    "problems",
    "report_reward",
    "role",
    "semconv",
    "spread",
    "tool",
    "train",
    "train_async",
]

_HOMES = {
    "attribution.origin": ("CallOrigin",),
    "attribution.role": ("role",),
    "client": ("report_reward", "tool"),
    "config": (
        "CreditConfig",
        "LoopConfig",
        "PolicyConfig",
        "Recipe",
        "RewardConfig",
        "RuntimeConfig",
        "SamplingConfig",
        "TasksConfig",
        "ValidationConfig",
    ),
    "credit.baselines": ("center", "mean"),
    "credit.needs": ("Need",),
    "credit.spread": ("spread",),
    "dialects": ("DIALECTS", "Dialect"),
    "errors": ("BackendError", "ConfigError", "ContextOverflow", "LightningError"),
    "gateway.errors": ("Refusal",),
    "gateway.request": ("CallRequest",),
    "plugins": ("Plugin", "PluginManager", "hookimpl"),
    "protocols": (
        "Backend",
        "Capabilities",
        "CreditAssigner",
        "Engine",
        "IntermediateReward",
        "LearnReport",
        "Reward",
        "StepReport",
    ),
    "run": ("Run", "evaluate", "problems", "train", "train_async"),
    "runtime.command": ("command_agent",),
    "runtime.launcher": ("WorkerLauncher", "WorkerPlan"),
    "runtime.supervisor": ("LocalLauncher", "Supervisor"),
    "store.protocol": ("RolloutFilter",),
    "types": (
        "Advantages",
        "EngineInfo",
        "Evidence",
        "FinishReason",
        "GenerateRequest",
        "OtherCall",
        "OtherCallKind",
        "Outcome",
        "Sample",
        "SamplingSettings",
        "Task",
        "TokenChunk",
        "ToolCall",
        "ToolStatus",
        "Trajectory",
        "TrajectoryGroup",
        "Transition",
    ),
}


def __getattr__(name: str) -> Any:
    if name == "semconv":
        return importlib.import_module("lightningrl.telemetry.semconv")
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"lightningrl.{module}"), name)
    raise AttributeError(f"module 'lightningrl' has no attribute {name!r}")
