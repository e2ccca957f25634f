"""Right: the last number of the answer is the total."""

import re


def right(task, output, trajectory) -> float:
    numbers = re.findall(r"-?\d+", output or "")
    return float(bool(numbers) and numbers[-1] == task.answer)
