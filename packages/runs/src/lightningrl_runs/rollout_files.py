"""Rollouts in two formats of the field, a JSON document a line, and back: tokens, log-probabilities, masks, rewards.

atif      Agent Trajectory Interchange Format 1.7 (Harbor, RFC 0001): a `Trajectory` of steps; a step of the agent is
          one call, its tokens in `metrics`, and a call that repeats another rollout's is `is_copied_context`
openenv   OpenEnv's `TrainingTrace` 1: a turn is one call; `loss_mask` covers prompt and completion

What neither format has a place for (policy, role, rewards, advantages, the task) stands in `extra` or `metadata` under
`lightningrl`, so that `read_rollouts` gives back what the store has.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, Literal, cast, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from lightningrl.errors import ConfigError, RunFolderError
from lightningrl.records import RolloutFilter
from lightningrl.sanitize import as_text
from lightningrl.types import Array, RolloutMode, ToolCall, Trajectory, Transition
from lightningrl.wire import convert, encode
from lightningrl_credit.trained_calls import TrainedCalls, calls_left_out, trained_calls_of
from lightningrl_runs.origin import RunOrigin, newest_run
from lightningrl_runs.reader import StoredRun, open_run

__all__ = [
    "FORMATS",
    "RolloutFormat",
    "StoredRollout",
    "completion_mask",
    "export_command",
    "list_stored",
    "read_rollouts",
    "write_document",
]

RolloutFormat = Literal["atif", "openenv"]
FORMATS: Final[tuple[str, ...]] = get_args(RolloutFormat)
ATIF_VERSION: Final = "ATIF-v1.7"
OPENENV_VERSION: Final = 1
OWN: Final = "lightningrl"
"""Key of what the format has no place for."""
_TOKENS: Final = ("prompt_ids", "completion_ids", "logprobs")
Messages = Sequence[tuple[str, str]]
"""Messages that a call adds to those before it, as (who, text); see `read_messages`."""
Document = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StoredRollout:
    """The deciding attempt of a rollout, with what its calls are to a learner."""

    trajectory: Trajectory
    masks: Mapping[str, NDArray[np.bool_]]
    """Masks by call, one per completion token: True where it is training data. No token of a prompt is."""
    advantages: Mapping[str, Array | None] = field(default_factory=dict[str, "Array | None"])
    """Advantages by call, one per completion token; None = nobody scored it."""


def completion_mask(call: Transition, *, is_left_out: bool) -> NDArray[np.bool_]:
    """True for each token that the policy chose, in a call that is training data and repeats no other."""
    is_trained = call.trainable and call.replayed_from is None and not is_left_out
    return call.chosen & is_trained


def write_document(
    rollout: StoredRollout, form: RolloutFormat, messages: Sequence[Messages], *, agent: str
) -> Document | None:
    """Return a rollout as a document of the format; None where the format has nothing to hold it: no call was made.

    `messages`: of each call; `agent`: the name of the agent system.
    """
    if form == "atif":
        return _atif(rollout, messages, agent)
    return _openenv(rollout, messages) if rollout.trajectory.transitions else None


def read_rollouts(path: Path) -> Iterator[StoredRollout]:
    """Read a file of `lightningrl export-rollouts`, of either format. Raises ConfigError naming the line that is
    neither."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                document = json.loads(line)
                yield _read_atif(document) if document["schema_version"] == ATIF_VERSION else _read_openenv(document)
            except (ValueError, KeyError, TypeError, IndexError, msgspec.MsgspecError) as error:
                raise ConfigError(
                    f"line {number} of {str(path)!r} is no rollout of {' or '.join(FORMATS)} as `lightningrl "
                    f"export-rollouts` writes them: {type(error).__name__}: {error}"
                ) from error


# ---------------------------------------------------------------------- ATIF


def _atif(rollout: StoredRollout, messages: Sequence[Messages], agent: str) -> Document:
    trajectory = rollout.trajectory
    calls = trajectory.transitions
    policies = sorted({call.policy for call in calls})
    tools: dict[str, list[ToolCall]] = {}
    for tool in trajectory.tool_calls:
        tools.setdefault(tool.transition_id or "", []).append(tool)
    steps: list[Document] = [] if calls else [{"source": "user", "message": as_text(trajectory.task.input)}]
    for call, added in zip(calls, messages, strict=True):
        steps += _heard(added)
        steps.append(_atif_step(rollout, call, added, tools.get(call.id, ())))
    own = _plain(replace(trajectory, transitions=()))
    return {
        "schema_version": ATIF_VERSION,
        "session_id": trajectory.rollout_id,
        "trajectory_id": f"{trajectory.rollout_id}/{trajectory.attempt}",
        "agent": {
            "name": agent,
            "version": version("lightningrl"),
            **({"model_name": policies[0]} if len(policies) == 1 else {}),
            **({"tool_definitions": defined} if (defined := _tool_definitions(calls)) else {}),
        },
        "steps": [{"step_id": number, **step} for number, step in enumerate(steps, 1)],
        "final_metrics": {
            "total_prompt_tokens": sum(len(call.prompt_ids) for call in calls),
            "total_completion_tokens": sum(len(call.completion_ids) for call in calls),
            "total_steps": len(steps),
            "extra": {"reward": trajectory.reward},
        },
        "extra": {OWN: own},
    }


def _heard(added: Messages) -> list[Document]:
    """Return the steps of what a call's prompt adds, but for results of tools, which are observations. What it has the
    agent say there was sampled by no call."""
    copied = {"source": "agent", "llm_call_count": 0, "is_copied_context": True}
    sources: Mapping[str, Document] = {"system": {"source": "system"}, "user": {"source": "user"}, "assistant": copied}
    return [{**sources[who], "message": text} for who, text in added if who in sources]


def _atif_step(rollout: StoredRollout, call: Transition, added: Messages, tools: Sequence[ToolCall]) -> Document:
    step: Document = {"source": "agent", "message": _words(added, "policy"), "llm_call_count": 1}
    if call.started_at:
        step["timestamp"] = datetime.fromtimestamp(call.started_at, UTC).isoformat()
    step["model_name"] = call.policy
    if reasoning := _words(added, "policy reasoning"):
        step["reasoning_content"] = reasoning
    if tools:
        step["tool_calls"] = [_atif_tool(tool) for tool in tools]
        step["observation"] = {"results": [{"source_call_id": tool.id, "content": tool.result} for tool in tools]}
    if call.replayed_from is not None:
        step["is_copied_context"] = True
    prompt, completion, logprobs = (getattr(call, name).tolist() for name in _TOKENS)
    step["metrics"] = {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(completion),
        "prompt_token_ids": prompt,
        "completion_token_ids": completion,
        "logprobs": logprobs,
        "extra": {"completion_loss_mask": rollout.masks[call.id].astype(int).tolist(), **_advantages(rollout, call)},
    }
    step["extra"] = {OWN: _plain_call(call)}
    return step


def _atif_tool(tool: ToolCall) -> Document:
    try:
        arguments = json.loads(tool.arguments) if tool.arguments else {}
    except ValueError:
        arguments = None
    is_table = isinstance(arguments, dict)
    written: Document = {
        "tool_call_id": tool.id,
        "function_name": tool.name,
        "arguments": arguments if is_table else {},
        "extra": {"status": tool.status.value, "duration_s": tool.duration_s, "agent": tool.agent},
    }
    if not is_table:
        written["extra"]["arguments"] = tool.arguments
    return written


def _tool_definitions(calls: Sequence[Transition]) -> list[Document]:
    """Return the tools that its calls were offered, each name once, as OpenAI's function schemas."""
    offered: dict[str, Any] = {}
    for text in dict.fromkeys(call.offered for call in calls if call.offered):
        offered |= {name: schema for name, schema in json.loads(text).items() if name not in offered}
    return [
        {"type": "function", "function": {"name": name, **({"parameters": schema} if schema is not None else {})}}
        for name, schema in offered.items()
    ]


def _read_atif(document: Document) -> StoredRollout:
    calls = [
        (step["extra"][OWN], *(step["metrics"][name] for name in _ATIF_TOKENS), step["metrics"]["extra"])
        for step in document["steps"]
        if "metrics" in step  # else it was sampled by no call
    ]
    return _assemble(
        document["extra"][OWN],
        [(own, prompt, completion, logprobs) for own, prompt, completion, logprobs, _ in calls],
        [extra["completion_loss_mask"] for *_, extra in calls],
        [extra for *_, extra in calls],
    )


_ATIF_TOKENS: Final = ("prompt_token_ids", "completion_token_ids", "logprobs")

# ---------------------------------------------------------------------- OpenEnv

_ROLES: Final = frozenset({"system", "user", "assistant"})


def _openenv(rollout: StoredRollout, messages: Sequence[Messages]) -> Document:
    trajectory = rollout.trajectory
    own = _plain(replace(trajectory, transitions=()))
    turns: list[Document] = []
    for call, added in zip(trajectory.transitions, messages, strict=True):
        prompt, completion, logprobs = (getattr(call, name).tolist() for name in _TOKENS)
        answer = {"role": "assistant", "content": _words(added, "policy")}
        mine: Document = {"call": _plain_call(call), **_advantages(rollout, call)}
        if not turns:
            mine["rollout"] = own  # once: the trace itself has no place for it
        facts = {"model": call.policy, "rollout_id": trajectory.rollout_id, "reward": trajectory.reward}
        turns.append(
            {
                "node_id": call.id,
                "prompt_token_ids": prompt,
                "completion_token_ids": completion,
                "per_token_logps": logprobs,
                "loss_mask": [0] * len(prompt) + rollout.masks[call.id].astype(int).tolist(),
                "request": {
                    "messages": [{"role": step["source"], "content": step["message"]} for step in _heard(added)]
                },
                "response": {"choices": [{"message": answer, "finish_reason": call.finish_reason.value}]},
                "metadata": {**facts, OWN: mine},
            }
        )
    return {"schema_version": OPENENV_VERSION, "turns": turns}


def _read_openenv(document: Document) -> StoredRollout:
    if document["schema_version"] != OPENENV_VERSION:
        raise ValueError(f"schema_version is {document['schema_version']!r}")
    turns = document["turns"]
    owns = [turn["metadata"][OWN] for turn in turns]
    return _assemble(
        owns[0]["rollout"],
        [
            (own["call"], turn["prompt_token_ids"], turn["completion_token_ids"], turn["per_token_logps"])
            for own, turn in zip(owns, turns, strict=True)
        ],
        [turn["loss_mask"][len(turn["prompt_token_ids"]) :] for turn in turns],
        owns,
    )


# ---------------------------------------------------------------------- both


def _words(added: Messages, who: str) -> str:
    return "\n".join(text for speaker, text in added if speaker == who)


def _advantages(rollout: StoredRollout, call: Transition) -> Document:
    """Return a call's advantages, where the credit assigner was asked for it."""
    if call.id not in rollout.advantages:
        return {}
    values = rollout.advantages[call.id]
    return {"advantages": None if values is None else values.tolist()}


def _plain(value: object) -> Document:
    plain: Document = json.loads(encode(value))
    return plain


def _plain_call(call: Transition) -> Document:
    """Return a call without its tokens, which the format has a place for."""
    return {name: value for name, value in _plain(call).items() if name not in _TOKENS}


def _assemble(
    own: Document,
    calls: Sequence[tuple[Document, list[int], list[int], list[float]]],
    masks: Sequence[list[int]],
    scored: Sequence[Document],
) -> StoredRollout:
    """Build a rollout of what a document says: `own` of it, then of each call."""
    packed = [
        {
            **call,
            "prompt_ids": _base64(prompt, "<i4"),
            "completion_ids": _base64(completion, "<i4"),
            "logprobs": _base64(logprobs, "<f4"),
        }
        for call, prompt, completion, logprobs in calls
    ]
    trajectory: Trajectory = convert({**own, "transitions": packed}, Trajectory)
    named = list(zip(trajectory.transitions, masks, scored, strict=True))
    return StoredRollout(
        trajectory=trajectory,
        masks={call.id: np.asarray(mask, np.bool_) for call, mask, _ in named},
        advantages={
            call.id: None if own["advantages"] is None else np.asarray(own["advantages"], np.float32)
            for call, _, own in named
            if "advantages" in own
        },
    )


def _base64(values: Sequence[float], dtype: str) -> str:
    return base64.b64encode(np.asarray(values, dtype).tobytes()).decode()


_AT_ONCE: Final = 64
"""Rollouts that are read together."""
_ALL: Final = 10_000_000


def export_command(folder: Path | None, *, form: str, to: Path | None, runs: Path, mode: str | None) -> None:
    """Write it for its owner alone: it holds what agents were asked and said."""
    if form not in FORMATS:
        raise ConfigError(f"no format {form!r}; choose of: {', '.join(FORMATS)}")
    if mode is not None and mode not in set(RolloutMode):
        raise ConfigError(f"no mode {mode!r}; choose of: {', '.join(RolloutMode)}")
    folder = folder or newest_run(runs)
    path = to or Path(f"rollouts.{form}.jsonl")
    origin = RunOrigin.read(folder)
    written, running, silent = asyncio.run(
        _export(folder, origin, cast("RolloutFormat", form), path, None if mode is None else RolloutMode(mode))
    )
    left_out = [f"{running} that have not ended"] if running else []
    left_out += [f"{silent} that called no policy, for which the format has no place"] if silent else []
    rest = f"; left out: {', '.join(left_out)}" if left_out else ""
    Console().print(f"wrote {path}: {written} rollouts, {form}, one a line{rest}", highlight=False, soft_wrap=True)


async def _export(
    folder: Path, origin: RunOrigin, form: RolloutFormat, path: Path, mode: RolloutMode | None
) -> tuple[int, int, int]:
    """Return how many were written, run still, and have no place in the format."""
    written = silent = 0
    async with open_run(folder) as run:
        ids = await _ended(run, mode)
        try:
            file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8")
        except FileExistsError:
            raise RunFolderError(f"{str(path)!r} is there already; name another file: --to") from None
        except OSError as error:
            raise RunFolderError(
                f"the rollouts cannot be written to {str(path)!r}: {error.strerror}; name another file: --to"
            ) from error
        with file:
            async for rollout in list_stored(run, ids[0], trained_calls_of(origin.recipe)):
                messages = await asyncio.to_thread(run.messages, rollout.trajectory)
                document = write_document(rollout, form, messages, agent=origin.recipe.name)
                if document is None:
                    silent += 1
                    continue
                file.write(json.dumps(document, allow_nan=False) + "\n")
                written += 1
    return written, ids[1], silent


async def _ended(run: StoredRun, mode: RolloutMode | None) -> tuple[list[str], int]:
    """Return the rollouts that have ended, oldest first, and the number of those that have not."""
    records = await run.list_rollouts(RolloutFilter(mode=mode, limit=_ALL))
    ended = [record.id for record in records if record.outcome is not None]
    return ended[::-1], len(records) - len(ended)


async def list_stored(
    run: StoredRun, rollout_ids: list[str], trained: Mapping[str, TrainedCalls]
) -> AsyncIterator[StoredRollout]:
    """Read rollouts that have ended, in the order asked. `trained`: the calls of each policy that are training data."""
    for start in range(0, len(rollout_ids), _AT_ONCE):
        some = rollout_ids[start : start + _AT_ONCE]
        scores = {score.rollout_id: score for score in await run.look.scores(some)}
        for trajectory in await run.look.trajectories(some):
            calls, score = trajectory.transitions, scores.get(trajectory.rollout_id)
            left_out = calls_left_out(calls, trained)
            yield StoredRollout(
                trajectory=trajectory,
                masks={call.id: completion_mask(call, is_left_out=call.id in left_out) for call in calls},
                advantages={} if score is None else score.advantages,
            )
