"""The tables of a store.

tasks ◄─ rollouts ◄─ attempts ◄─ calls ─► toolsets      words: interned names and sampling settings
            │            ├◄──── tool_calls, other_calls, spans
            ▼            ├◄──── rewards             reported by the agent ┐ idx = the call's position,
            │            ├◄──── computed            computed by the run   ┘ -1 = the attempt itself
            │            ├◄──── digests, evidence   of what computed it, by the recipe's key; credit's `score`
         trained ─► steps└◄──── scores, advantages
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    Boolean,
    CheckConstraint,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
)
from sqlalchemy.schema import SchemaItem

from lightningrl import types
from lightningrl_server.records import DIALOGUE
from lightningrl_server.store.columns import Choice, CleanText, Finite, Floats, Json, LongJson, LongText, SpanId, Wire
from lightningrl_server.store.databases import CLUSTERED, partial_index

__all__ = [
    "FORGOTTEN",
    "SCHEMA_VERSION",
    "advantages",
    "attempts",
    "calls",
    "computed",
    "digests",
    "evidence",
    "is_shown",
    "meta",
    "metadata",
    "other_calls",
    "rewards",
    "rollouts",
    "scores",
    "spans",
    "steps",
    "tasks",
    "tool_calls",
    "toolsets",
    "trained",
    "words",
]

SCHEMA_VERSION = 2
"""Version of these tables; a store of another version is refused. It rises with any change of them."""

metadata = MetaData()


def _numbered(name: str, *columns: SchemaItem) -> Table:
    """Make a table whose rows have numbers."""
    return Table(name, metadata, Column("pk", Integer, primary_key=True), *columns)


FORGOTTEN = "forgotten"
"""Key of `meta`: the last step of deleted rollouts, and how many so far. A change has caches read anew."""

meta = Table("meta", metadata, Column("key", Text, primary_key=True), Column("value", Text, nullable=False))

words = _numbered("words", Column("text", Text, nullable=False, unique=True))

tasks = _numbered(
    "tasks",
    Column("digest", LargeBinary, nullable=False, unique=True),
    Column("task_id", CleanText, nullable=False),
    Column("body", LongText, nullable=False),
)

toolsets = _numbered(
    "toolsets",
    Column("digest", LargeBinary, nullable=False, unique=True),
    Column("body", LongText, nullable=False),  # `Transition.offered`
)

rollouts = _numbered(
    "rollouts",
    Column("id", Text, nullable=False, unique=True),
    Column("task_pk", ForeignKey(tasks.c.pk), nullable=False),
    Column("group_id", Text, nullable=False),
    Column("mode", Choice(types.RolloutMode), nullable=False),
    Column("step", Integer, nullable=False),
    Column("sampling", Json(types.SamplingSettings, "a rollout's sampling")),
    Column("max_attempts", Integer, nullable=False),
    Column("timeout_s", Float, nullable=False),
    Column("state", Choice(types.RolloutState), nullable=False),
    Column("outcome", Choice(types.Outcome)),
    Column("started", Integer, nullable=False, server_default="0"),
    Column("forgiven", Integer, nullable=False, server_default="0"),
    Column("deciding", Integer),
    Column("created_at", Float, nullable=False),
    Column("branch", Json(types.BranchPoint, "a branch point")),
    # of the deciding attempt, as `lightningrl_server.store.participants` lists words; NULL until an attempt has ended
    *(Column(name, Text) for name in ("roles", "tools", "failed_tools")),
)
partial_index("rollouts_queue", rollouts.c.pk, "state = 'queued'")
Index("rollouts_step", rollouts.c.step)
Index("rollouts_group", rollouts.c.group_id)

attempts = _numbered(
    "attempts",
    Column("rollout_pk", ForeignKey(rollouts.c.pk), nullable=False),
    Column("number", Integer, nullable=False),
    Column("worker_id", Text, nullable=False),
    Column("key_digest", LargeBinary, nullable=False),
    Column("expires_at", Float, nullable=False),
    Column("started_at", Float, nullable=False),
    Column("ended_at", Float),
    Column("outcome", Choice(types.Outcome)),
    Column("output", LongText),
    Column("error", LongText),
    Column("duration_s", Finite, nullable=False, server_default="0"),
    Column("left_threads", Json(tuple[str, ...], "the names of threads", empty=())),
    Column("results_refused", Integer, nullable=False, server_default="0"),
    UniqueConstraint("rollout_pk", "number"),
)
partial_index("attempts_running", attempts.c.expires_at, "outcome IS NULL")
partial_index("attempts_worker", attempts.c.worker_id, "outcome IS NULL")


def _of_attempt(name: str, *columns: Column[Any]) -> Table:
    """Make a table of attempts, one row each, or of a column's values for each where that is of the key, too."""
    has_several = any(column.primary_key for column in columns)
    key: Column[int] = Column(
        "attempt_pk", ForeignKey(attempts.c.pk), primary_key=True, autoincrement="auto" if has_several else False
    )
    return Table(name, metadata, key, *columns, **(CLUSTERED if has_several else {}))


calls = _numbered(
    "calls",
    Column("attempt_pk", ForeignKey(attempts.c.pk), nullable=False),
    Column("idx", Integer, nullable=False),
    Column("id", Text, nullable=False),
    Column("call_key", Text, nullable=False),
    Column("parent", Integer),
    Column("policy", Integer, nullable=False),
    Column("policy_version", Integer, nullable=False),
    Column("suffix", LargeBinary, nullable=False),
    Column("completion", LargeBinary, nullable=False),
    Column("logprobs", Floats, nullable=False),
    Column("finish_reason", Choice(types.FinishReason), nullable=False),
    Column("sampling", Integer, nullable=False),
    Column("seed", Text),  # decimal
    Column("agent", Integer),
    Column("span_id", SpanId),
    Column("is_break", Boolean, nullable=False),
    Column("tool_call_ids", Json(tuple[str, ...], "tool call ids", empty=())),
    Column("trainable", Boolean, nullable=False),
    Column("started_at", Float, nullable=False),
    Column("duration_s", Float, nullable=False),
    Column("history_key", CleanText),
    Column("replayed_from", Text),
    Column("toolset", Integer),
    Column("fits", Json(tuple[str, ...], "patterns", empty=())),
    Column("malformed", Json(tuple[str, ...], "malformed tool calls", empty=())),
    UniqueConstraint("attempt_pk", "idx"),
    UniqueConstraint("attempt_pk", "call_key"),
    CheckConstraint("parent IS NULL OR parent < idx"),
)
partial_index("calls_cut", calls.c.attempt_pk, "finish_reason = 'length'")
partial_index("calls_malformed", calls.c.attempt_pk, "malformed IS NOT NULL")
partial_index("calls_break", calls.c.attempt_pk, "CAST(is_break AS INTEGER) = 1")

tool_calls = _numbered(
    "tool_calls",
    Column("attempt_pk", ForeignKey(attempts.c.pk), nullable=False),
    Column("id", CleanText, nullable=False),
    Column("name", Integer, nullable=False),
    Column("arguments", LongText),
    Column("result", LongText),
    Column("status", Choice(types.ToolStatus), nullable=False),
    Column("duration_s", Finite, nullable=False),
    Column("transition_id", Text),
    Column("agent", Integer),
    Column("error_type", CleanText),
    Column("contradicted", Integer, nullable=False, server_default="0"),
    Column("span", SpanId),
    Column("parent_span", SpanId),
    Column("started_at", Finite, nullable=False),
    UniqueConstraint("attempt_pk", "span"),
)
is_shown = (tool_calls.c.span >= DIALOGUE) & (tool_calls.c.span < DIALOGUE.replace(":", ";"))
"""True for a tool call that the dialogue alone shows; NULL where it has no span."""
partial_index("tool_calls_attempt", tool_calls.c.attempt_pk, "span IS NULL")
Index("tool_calls_status", tool_calls.c.name, tool_calls.c.status)

other_calls = _numbered(
    "other_calls",
    Column("attempt_pk", ForeignKey(attempts.c.pk), nullable=False, index=True),
    Column("kind", Choice(types.OtherCallKind), nullable=False),
    Column("path", CleanText, nullable=False),
    Column("model", CleanText, nullable=False),
    Column("agent", Integer),
    Column("status", Integer),
    Column("code", CleanText),
    Column("message", LongText),
    Column("request", LongJson),
    Column("answer", LongJson),
    Column("started_at", Finite, nullable=False),
    Column("duration_s", Finite, nullable=False),
)

spans = _of_attempt(
    "spans", Column("span", SpanId, primary_key=True), Column("parent", SpanId), Column("agent", Integer)
)
rewards, computed = (
    _of_attempt(
        name,
        Column("idx", Integer, primary_key=True),
        Column("name", Integer, primary_key=True),
        Column("value", Float),
    )
    for name in ("rewards", "computed")
)
digests = _of_attempt("digests", Column("part", Integer, primary_key=True), Column("digest", Integer, nullable=False))
advantages = _of_attempt("advantages", Column("idx", Integer, primary_key=True), Column("data", LargeBinary))
evidence = _of_attempt("evidence", Column("data", Wire(types.Evidence), nullable=False))
scores = _of_attempt("scores", Column("reward", Float), Column("unrewarded", CleanText))

steps = Table(
    "steps",
    metadata,
    Column("step", Integer, primary_key=True, autoincrement=False),
    Column("metrics", Json(dict[str, float | None], "the metrics of a step"), nullable=False),
    Column("at", Float, nullable=False),
)

trained = Table(
    "trained",
    metadata,
    Column("rollout_pk", ForeignKey(rollouts.c.pk), primary_key=True, autoincrement=False),
    Column("step", ForeignKey(steps.c.step), nullable=False),
)
Index("trained_step", trained.c.step)
