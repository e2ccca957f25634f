"""Carries the sender's context along with each message of an agent runtime, AutoGen's or Semantic Kernel's copy of it.

    send_message / publish_message        queue                    BaseAgent.on_message
      message_id = MessageId(context) ──► envelope.message_id ──►  a task in a copy of that context

A runtime handles messages in the context of whoever started it: with a runtime that rollouts share, that is nobody's,
or the first rollout's, and the calls of all others would be taken for its own. So a message that no context came with
(from another process) is handled in an empty one: its calls belong to no rollout, and are refused.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import Context, copy_context
from typing import Any

from lightningrl.instrumentation import Args, Kwargs, Patches

__all__ = ["carry_senders_context"]


class MessageId(str):
    """A message's id, which every runtime hands on to the handler, and the context that the message was sent in."""

    __slots__ = ("context",)

    context: Context


def carry_senders_context(
    patches: Patches, runtime: Any, agent: Any, within: Callable[[Any], AbstractContextManager[Any]]
) -> None:
    """Wrap the classes of a runtime and of its agents. `within` opens for an agent what its handler also runs in."""
    for method in ("send_message", "publish_message"):
        patches.wrap(runtime, method, _send)

    async def on_message(wrapped: Callable[..., Any], instance: Any, args: Args, kwargs: Kwargs) -> Any:
        message_id = (args[1] if len(args) > 1 else kwargs["ctx"]).message_id
        context = message_id.context.copy() if isinstance(message_id, MessageId) else Context()

        async def handle() -> Any:
            with within(instance):
                return await wrapped(*args, **kwargs)

        return await asyncio.get_running_loop().create_task(handle(), context=context)

    patches.wrap(agent, "on_message", on_message)


def _send(wrapped: Callable[..., Any], instance: Any, args: Args, kwargs: Kwargs) -> Any:
    message_id = MessageId(kwargs.get("message_id") or uuid.uuid4())
    message_id.context = copy_context()
    return wrapped(*args, **{**kwargs, "message_id": message_id})
