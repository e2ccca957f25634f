"""Rows of a group's calls: what is imitated, what is told apart, each once.

a good answer     ─► sft.jsonl, kto.jsonl with label true    ┐ of one prompt, with another reward:
another answer    ─► kto.jsonl with label false              ┘ dpo.jsonl, the best and the worst
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from lightningrl.tool_schemas import canonical
from lightningrl_traces.curation.files import Report, RowFiles
from lightningrl_traces.curation.near_equality import NearTexts
from lightningrl_traces.curation.rules import ChatCall, GroupRewards, LeftOut
from lightningrl_traces.records import Message

__all__ = ["Candidate", "RowWriter"]

_MOST_PROMPTS: Final = 4096
"""Prompts of a group that wait for a second answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A call that may be a row."""

    call: ChatCall
    run: str
    rollout_id: str
    reward: float | None
    """Reward of its rollout."""
    problem: LeftOut | None
    """Reason why it is nothing to imitate; None = it is."""
    family: int
    """Number of its family of tasks."""
    side: str

    @property
    def source(self) -> dict[str, Any]:
        return {"run": self.run, "rollout_id": self.rollout_id, "call_id": self.call.id, "reward": self.reward}

    @property
    def tools(self) -> dict[str, Any]:
        return {"tools": list(self.call.tools)} if self.call.tools else {}


@dataclass(slots=True)
class _Answers:
    """Best and worst answers to a prompt so far."""

    chosen: Candidate | None = None
    rejected: Candidate | None = None


class RowWriter:
    """Writes the rows of one group after the other."""

    def __init__(self, files: RowFiles, report: Report) -> None:
        self._files = files
        self._report = report
        self._left_out = report.rows_left_out
        self._rules = report.rules
        self._seen = {label: NearTexts(report.rules.near, parts=2) for label in (True, False)}
        self._taken: dict[tuple[str, int], int] = {}
        self._last: dict[tuple[str, int], str] = {}
        self._answers: dict[bytes, _Answers] = {}

    def add(self, candidate: Candidate, group: GroupRewards) -> None:
        """Write a call's rows, or count why not."""
        label: bool | None = candidate.problem is None
        if candidate.problem is not None:
            self._left_out["sft"][candidate.problem] += 1
        if not self._rules.compares and label:
            label = _is_better(candidate.reward, group)
        if label is False and candidate.reward is None and candidate.problem is not LeftOut.SCORE:
            label = None  # nobody said that it is bad
        if label is None:
            self._left_out["kto"][LeftOut.NO_REWARD if candidate.reward is None else LeftOut.NO_ROOM] += 1
        kinds = ["sft"] if candidate.problem is None else []
        kinds += ["kto"] if label is not None else []
        if kinds and (reason := self._repeats(candidate, is_good=label is not False)):
            for kind in kinds:
                self._left_out[kind][reason] += 1
        else:
            self._write(candidate, kinds, label)
        if candidate.reward is not None:
            self._compare(candidate)

    def finish_group(self) -> None:
        """Write the pairs of a group whose calls were all added."""
        for prompt in list(self._answers):
            self._pair(self._answers.pop(prompt))

    def _repeats(self, candidate: Candidate, *, is_good: bool) -> LeftOut | None:
        seen = self._seen[is_good]
        call = candidate.call
        instructions = "\0".join(str(message.get("content")) for message in call.prompt if message["role"] == "system")
        text = seen.read(_text(call.prompt), _text((call.answer,)), within=instructions)
        if seen.find(text):
            return LeftOut.NEAR
        seen.add(text)
        return None

    def _write(self, candidate: Candidate, kinds: Sequence[str], label: bool | None) -> None:
        call = candidate.call
        for kind in kinds:
            if not self._has_room(f"{kind} {label}", candidate):
                self._left_out[kind][LeftOut.CAP] += 1
            elif kind == "sft":
                row = {"messages": [*call.prompt, call.answer], **candidate.tools, "source": candidate.source}
                self._files.write(candidate.side, "sft", row)
                self._report.likeness[call.likeness] += 1
            else:
                row = {"prompt": list(call.prompt), "completion": [call.answer], "label": label}
                self._files.write(candidate.side, "kto", {**row, **candidate.tools, "source": candidate.source})

    def _has_room(self, kind: str, candidate: Candidate) -> bool:
        """True where its rollout is one of the first of its family."""
        key, rollout = (kind, candidate.family), f"{candidate.run}/{candidate.rollout_id}"
        if self._rules.per_task is None or self._last.get(key) == rollout:
            return True
        if self._taken.get(key, 0) >= self._rules.per_task:
            return False
        self._taken[key] = self._taken.get(key, 0) + 1
        self._last[key] = rollout
        return True

    def _compare(self, candidate: Candidate) -> None:
        prompt = _digest((*candidate.call.prompt, {}, *candidate.call.tools))
        answers = self._answers.setdefault(prompt, _Answers())
        reward = candidate.reward or 0.0
        if candidate.problem is None and (answers.chosen is None or reward > (answers.chosen.reward or 0.0)):
            answers.chosen = candidate
        if answers.rejected is None or reward < (answers.rejected.reward or 0.0):
            answers.rejected = candidate
        if len(self._answers) > _MOST_PROMPTS:
            self._pair(self._answers.pop(next(iter(self._answers))))

    def _pair(self, answers: _Answers) -> None:
        chosen, rejected = answers.chosen, answers.rejected
        if chosen is None or rejected is None or not _differ(chosen, rejected):
            self._left_out["dpo"][LeftOut.NO_PAIR] += 1
            return
        row = {
            "prompt": list(chosen.call.prompt),
            "chosen": [chosen.call.answer],
            "rejected": [rejected.call.answer],
            **chosen.tools,
            "source": {**chosen.source, "rejected": rejected.source},
        }
        self._files.write(chosen.side, "dpo", row)


def _is_better(reward: float | None, group: GroupRewards) -> bool | None:
    """Return whether a reward is above its group's mean; None where nothing is told apart."""
    if reward is None or group.mean is None or group.is_equal:
        return None
    return reward > group.mean


def _differ(chosen: Candidate, rejected: Candidate) -> bool:
    is_better = (chosen.reward or 0.0) > (rejected.reward or 0.0)
    return is_better and _text((chosen.call.answer,)).split() != _text((rejected.call.answer,)).split()


def _text(messages: Sequence[Message]) -> str:
    """Return what users, tools and assistants say."""
    return "\n".join(
        "\n".join(
            (
                str(message.get("content") or ""),
                *(
                    f"{call['function']['name']} {canonical(call['function']['arguments'])}"
                    for call in message.get("tool_calls") or ()
                ),
            )
        )
        for message in messages
        if message["role"] != "system"
    )


def _digest(messages: Sequence[Message]) -> bytes:
    """Digest of messages; ids of tool calls differ from rollout to rollout and say nothing."""
    text = json.dumps([_without_ids(message) for message in messages], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _without_ids(message: Message) -> Message:
    plain = {key: value for key, value in message.items() if key != "tool_call_id"}
    if calls := plain.get("tool_calls"):
        plain["tool_calls"] = [call["function"] for call in calls]
    return plain
