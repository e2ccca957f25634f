"""An ordinary agent of three calls that keeps a journal: what it writes there it has received, whatever dies
afterwards."""

from __future__ import annotations

import json
import os
import zlib
from typing import Any

from openai import OpenAI

from lightningrl.control_api import Result
from lightningrl.records import Lease
from lightningrl_client.control.blocking import ControlClient

client = OpenAI()


def answer(question: str) -> str:
    """Ask three times, each time with the history so far. The seeds are the rollout's own, so that each run samples the
    same."""
    messages: list[Any] = [{"role": "user", "content": question}]
    rollout_id, _, attempt, _ = os.environ["OPENAI_BASE_URL"].partition("/rollouts/")[2].split("/")
    for number, follow_up in enumerate(("go on", "and then", "")):
        seed = zlib.crc32(f"{rollout_id} {number}".encode())
        response = client.chat.completions.create(model="policy", messages=messages, seed=seed, logprobs=True)
        choice = response.choices[0]
        said = choice.message.content or ""
        assert choice.logprobs is not None
        logprobs = [token.logprob for token in choice.logprobs.content or ()]
        place = f"{rollout_id}/{attempt}/{response.id.removeprefix('chatcmpl-')}"
        write_journal("call", place, json.dumps([said, logprobs]).encode().hex())
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": follow_up}]
    return said


def write_journal(*words: str) -> None:
    """Append a line, on disk when this returns."""
    journal = os.open(os.environ["CRASH_JOURNAL"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(journal, " ".join(words).encode() + b"\n")
    os.fsync(journal)
    os.close(journal)


report = ControlClient.report


def report_and_write(self: ControlClient, lease: Lease, result: Result, **settings: Any) -> Lease | None:
    """The worker's own report; in the journal once the server has acknowledged it."""
    after = report(self, lease, result, **settings)
    write_journal("result", lease.rollout_id, str(lease.attempt), str(result.outcome))
    return after


ControlClient.report = report_and_write  # type: ignore[assignment, method-assign]
