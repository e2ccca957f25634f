"""The public names and where each is defined: type checkers and `__init__.py` read this list."""

from lightningrl_tasks_openenv.source import OpenEnvTasks as OpenEnvTasks
from lightningrl_tasks_openenv.wire import (
    EnvironmentFailure as EnvironmentFailure,
)
from lightningrl_tasks_openenv.wire import (
    Observation as Observation,
)
from lightningrl_tasks_openenv.wire import (
    Session as Session,
)

__all__: list[str]
