"""One reward at the end: the answer is right."""

from lightningrl import Task, Trajectory

__all__ = ["right"]


def right(task: Task, output: str, trajectory: Trajectory) -> float:
    """1.0 for the task's number, 0.0 for anything else."""
    return float(output == task.answer)
