"""Files of the server that one chat call crosses, in order: a conversation's second turn, the engine in the process.

    python benchmarks/call_path.py

agent ── HTTP ──► endpoint ─► dialect ─► calls ─► prompt ─► engine ─► completion ─► store ─► answer

A profile hook sees every function that begins in the server's threads. *Files* counts the distinct ones, *returns* the
moves back to a file that was entered before: a call that reads from top to bottom has few of both. Files of core, whose
nouns everybody uses, are counted apart.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any, Final

import httpx

from lightningrl_testing.live_gateway import LiveAttempt, live_gateway

SERVER: Final = "lightningrl_server"
CORE: Final = "lightningrl"


@dataclass(frozen=True, slots=True)
class CallPath:
    """Our functions that one call entered."""

    functions: tuple[tuple[str, str], ...]
    """File and name of each, in the order of entering."""

    def files(self, package: str) -> tuple[str, ...]:
        """A package's distinct files, in the order of their first visit."""
        return tuple(dict.fromkeys(self._visits(package)))

    @property
    def returns(self) -> int:
        """Moves to a file of the server that was visited before."""
        return len(self._visits(SERVER)) - len(self.files(SERVER))

    def _visits(self, package: str) -> list[str]:
        return [file for file, _ in groupby(file for file, _ in self.functions if file.startswith(f"{package}/"))]


class _Recorder:
    """A profile hook that notes our functions while it is on."""

    def __init__(self) -> None:
        self.is_on = False
        self.functions: list[tuple[str, str]] = []
        self._started: set[int] = set()
        """Frames entered before: a coroutine is entered again after each of its waits, which is no new call."""
        self._frames: list[FrameType] = []

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if not self.is_on or event != "call" or id(frame) in self._started:
            return
        package, _, file = frame.f_code.co_filename.partition("/src/")[2].partition("/")
        if package in (SERVER, CORE, "lightningrl_testing"):
            self._started.add(id(frame))
            self._frames.append(frame)  # so that its id stays its own
            self.functions.append((f"{package}/{file}", frame.f_code.co_qualname))


def measure_call_path(folder: Path) -> CallPath:
    """The path of a conversation's second call. `folder` takes the store."""
    recorder = _Recorder()
    threading.setprofile(recorder)
    sys.setprofile(recorder)
    try:
        asyncio.run(_two_turns(folder, recorder))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return CallPath(tuple(recorder.functions))


async def _two_turns(folder: Path, recorder: _Recorder) -> None:
    async with live_gateway(folder) as gateway:
        gateway.engine.enqueue("4", "8")
        attempt = await gateway.attempt()
        messages: list[dict[str, Any]] = [{"role": "user", "content": "2 + 2?"}]
        with httpx.Client(timeout=30) as client:
            answer = await asyncio.to_thread(_ask, client, attempt, messages)
            messages += [answer, {"role": "user", "content": "Twice that?"}]
            await asyncio.sleep(0.2)  # the first call's threads come to rest
            recorder.is_on = True
            await asyncio.to_thread(_ask, client, attempt, messages)
            recorder.is_on = False
        (first, second) = await attempt.transitions()
        assert second.parent_id == first.id and not second.is_break, "the second call does not go on from the first"


def _ask(client: httpx.Client, attempt: LiveAttempt, messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    answer = client.post(
        f"{attempt.base_url}/chat/completions",
        json={"model": "any", "messages": messages},
        headers={"authorization": f"Bearer {attempt.key}"},
    )
    message: dict[str, Any] = answer.raise_for_status().json()["choices"][0]["message"]
    return message


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = measure_call_path(Path(folder))
    for file, visit in groupby(path.functions, key=lambda function: function[0]):
        print(f"{file.removeprefix(f'{SERVER}/'):36} {', '.join(name for _, name in visit)}")
    print(f"\n{len(path.functions)} functions; of core: {', '.join(path.files(CORE))}")
    print(f"files {len(path.files(SERVER))}, returns {path.returns}")


if __name__ == "__main__":
    main()
