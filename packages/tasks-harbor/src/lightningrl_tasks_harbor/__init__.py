"""Task folders in Harbor's format as a source of tasks, and the boxes that their rollouts run in."""

from lightningrl_tasks_harbor.boxes import Box, BoxError, BoxGone, CommandResult
from lightningrl_tasks_harbor.opening import BoxSettings, open_box
from lightningrl_tasks_harbor.source import HarborTasks
from lightningrl_tasks_harbor.task_folder import TaskFolder, read_task_folder
from lightningrl_tasks_harbor.verifier import Verdict, verify

__all__ = [
    "Box",
    "BoxError",
    "BoxGone",
    "BoxSettings",
    "CommandResult",
    "HarborTasks",
    "TaskFolder",
    "Verdict",
    "open_box",
    "read_task_folder",
    "verify",
]
