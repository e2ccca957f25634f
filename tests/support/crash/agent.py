"""An ordinary agent of two calls that keeps a journal: what it writes there it has received, whatever dies afterwards."""

from __future__ import annotations

import os
from typing import Any

from openai import OpenAI

from lightningrl.control.api import Result
from lightningrl.control.blocking import ControlClient
from lightningrl.store.protocol import Lease

client = OpenAI()


def answer(question: str) -> str:
    """Ask twice; the second call continues the first one's history."""
    messages: list[Any] = [{"role": "user", "content": question}]
    for follow_up in ("go on", ""):
        response = client.chat.completions.create(model="policy", messages=messages)
        write_journal("call", response.id.removeprefix("chatcmpl-"))
        said = response.choices[0].message.content or ""
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": follow_up}]
    return said


def write_journal(*words: str) -> None:
    """Append a line, on disk when this returns."""
    journal = os.open(os.environ["CRASH_JOURNAL"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(journal, " ".join(words).encode() + b"\n")
    os.fsync(journal)
    os.close(journal)


report = ControlClient.report


def report_and_write(self: ControlClient, lease: Lease, result: Result) -> None:
    """The worker's own report; in the journal once the server has acknowledged it."""
    report(self, lease, result)
    write_journal("result", lease.rollout_id, str(lease.attempt), str(result.outcome))


ControlClient.report = report_and_write  # type: ignore[assignment, method-assign]
