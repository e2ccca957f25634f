"""The public names of LightningRL and where each is defined: type checkers and `__init__.py` read this list."""

from lightningrl import conventions as conventions
from lightningrl.call_origin import CallOrigin as CallOrigin
from lightningrl_client.attribution.role import role as role
from lightningrl_client.client import report_reward as report_reward, tool as tool
from lightningrl.advantages import center as center, mean as mean
from lightningrl_credit.baselines import ReturnBased as ReturnBased
from lightningrl.backends import (
    Backend as Backend,
    Capabilities as Capabilities,
    Engine as Engine,
    EngineInfo as EngineInfo,
    GenerateRequest as GenerateRequest,
    LearnReport as LearnReport,
    TokenChunk as TokenChunk,
)
from lightningrl.dialects import DIALECTS as DIALECTS, Dialect as Dialect
from lightningrl.errors import (
    BackendError as BackendError,
    ConfigError as ConfigError,
    ContextOverflow as ContextOverflow,
    LightningError as LightningError,
)
from lightningrl_server.gateway.request import Refusal as Refusal
from lightningrl_server.gateway.request import CallRequest as CallRequest
from lightningrl.plugins import Plugin as Plugin, PluginManager as PluginManager, hookimpl as hookimpl
from lightningrl.protocols import (
    CreditAssigner as CreditAssigner,
    IntermediateReward as IntermediateReward,
    MetricLogger as MetricLogger,
    Need as Need,
    Reward as Reward,
    StepReport as StepReport,
    TaskSource as TaskSource,
)
from lightningrl.recipe import LoopConfig as LoopConfig
from lightningrl.recipe import Recipe as Recipe
from lightningrl.recipe_tables import (
    CreditConfig as CreditConfig,
    PolicyConfig as PolicyConfig,
    RewardConfig as RewardConfig,
    RuntimeConfig as RuntimeConfig,
    SamplingConfig as SamplingConfig,
    TasksConfig as TasksConfig,
    ValidationConfig as ValidationConfig,
)
from lightningrl_training.evaluation.examination import evaluate as evaluate
from lightningrl_training.run import Run as Run, problems as problems, train as train, train_async as train_async
from lightningrl_client.runtime.command import command_agent as command_agent
from lightningrl_client.runtime.launcher import WorkerLauncher as WorkerLauncher, WorkerPlan as WorkerPlan
from lightningrl_client.runtime.supervisor import LocalLauncher as LocalLauncher, Supervisor as Supervisor
from lightningrl.records import RolloutFilter as RolloutFilter
from lightningrl.types import (
    Advantages as Advantages,
    Evidence as Evidence,
    FinishReason as FinishReason,
    OtherCall as OtherCall,
    OtherCallKind as OtherCallKind,
    Outcome as Outcome,
    Sample as Sample,
    SamplingSettings as SamplingSettings,
    Task as Task,
    ToolCall as ToolCall,
    ToolStatus as ToolStatus,
    Trajectory as Trajectory,
    TrajectoryGroup as TrajectoryGroup,
    Transition as Transition,
)
