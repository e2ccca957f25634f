"""The public names and where each is defined."""

from lightningrl_tasks_harbor.boxes import Box as Box
from lightningrl_tasks_harbor.boxes import BoxError as BoxError
from lightningrl_tasks_harbor.boxes import BoxGone as BoxGone
from lightningrl_tasks_harbor.boxes import CommandResult as CommandResult
from lightningrl_tasks_harbor.opening import BoxSettings as BoxSettings
from lightningrl_tasks_harbor.opening import open_box as open_box
from lightningrl_tasks_harbor.source import HarborTasks as HarborTasks
from lightningrl_tasks_harbor.task_folder import TaskFolder as TaskFolder
from lightningrl_tasks_harbor.task_folder import read_task_folder as read_task_folder
from lightningrl_tasks_harbor.verifier import Verdict as Verdict
from lightningrl_tasks_harbor.verifier import verify as verify

__all__: list[str]
