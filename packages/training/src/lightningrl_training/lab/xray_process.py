"""`python -m lightningrl_training.lab.xray_process FOLDER`: X-rays for a viewer, in a process of their own.

A server that answers an agent's calls computes no credit and runs none of the user's code. One question on each line of
stdin (`lightningrl_viewer.credit.Question`), one `Answer` on each line of stdout, which the user's code does not reach;
it ends with its stdin, or after a while without a question.
"""

from __future__ import annotations

import asyncio
import select
import sys
from pathlib import Path
from typing import IO, Final

import msgspec

from lightningrl.errors import LightningError
from lightningrl.processes import take_stdout
from lightningrl_runs.xray import Answer, Question
from lightningrl_training.lab.xray import RunXRay, open_xray

__all__ = ["main"]

IDLE_S: Final = 300.0


def main(folder: Path, questions: IO[bytes], answers: IO[bytes]) -> None:
    """Answer questions until they end."""
    asyncio.run(_serve(folder, questions, answers))


async def _serve(folder: Path, questions: IO[bytes], answers: IO[bytes]) -> None:
    async with open_xray(folder) as xray:
        while line := await asyncio.to_thread(_read, questions):
            try:
                answer = await _answer(xray, msgspec.json.decode(line, type=Question))
            except LightningError as error:
                answer = Answer(error=str(error))
            except Exception as error:  # noqa: BLE001  the boundary to a viewer, which shows it
                answer = Answer(error=f"the X-ray failed: {type(error).__name__}: {error}", is_defect=True)
            answers.write(msgspec.json.encode(answer) + b"\n")
            answers.flush()


async def _answer(xray: RunXRay, question: Question) -> Answer:
    first, last = await xray.trained()
    if question.rollout is not None:
        return Answer(xray=await xray.of_rollout(question.rollout), first=first, last=last)
    if question.group is not None:
        return Answer(xray=await xray.of_group(question.group), first=first, last=last)
    return Answer(xray=await xray.of_run(None if question.whole else [question.step or last]), first=first, last=last)


def _read(questions: IO[bytes]) -> bytes:
    """A line; empty at the end, and where nobody asks any more."""
    return questions.readline() if select.select([questions], [], [], IDLE_S)[0] else b""


if __name__ == "__main__":
    with take_stdout() as stdout:
        try:
            main(Path(sys.argv[1]), sys.stdin.buffer, stdout)
        except LightningError as found:  # no run lies there any more
            stdout.write(msgspec.json.encode(Answer(error=str(found))) + b"\n")
