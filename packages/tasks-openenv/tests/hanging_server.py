"""The server of `wire_server.py`, in which the first step of each task hangs; the next session of the task plays on.

`python hanging_server.py FOLDER PORT`: while it hangs, its process id stands in FOLDER/TASK.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import wire_server


class Hanging(wire_server.Sums):
    async def step(self, data: dict[str, Any]) -> dict[str, Any]:
        mark = Path(sys.argv[1], str(self.task["id"]))
        if not mark.exists():
            mark.write_text(str(os.getpid()))
            await asyncio.sleep(100_000)
        return await super().step(data)


if __name__ == "__main__":
    wire_server.Sums = Hanging  # type: ignore[misc]
    wire_server.main(sys.argv[2])
