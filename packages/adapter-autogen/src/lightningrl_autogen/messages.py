"""Carries the sender's context along with each message of a runtime.

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
from contextvars import Context, copy_context
from typing import Any

from autogen_core import MessageHandlerContext

from lightningrl.instrumentation import Args, Kwargs
from lightningrl_autogen.roles import Roles, role_of_agent_id

__all__ = ["MessageId", "handle_in_senders_context", "send_with_context"]


class MessageId(str):
    """A message's id, which every runtime hands on to the handler, and the context that the message was sent in."""

    __slots__ = ("context",)

    context: Context

    @classmethod
    def here(cls, text: str | None) -> MessageId:
        """An id for a message that this context sends."""
        message_id = cls(text or uuid.uuid4())
        message_id.context = copy_context()
        return message_id


def send_with_context(wrapped: Callable[..., Any], instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Wraps a runtime's `send_message` and `publish_message`."""
    return wrapped(*args, **{**kwargs, "message_id": MessageId.here(kwargs.get("message_id"))})


def handle_in_senders_context(roles: Roles) -> Callable[..., Any]:
    """Wraps `BaseAgent.on_message`."""

    async def on_message(wrapped: Callable[..., Any], instance: Any, args: Args, kwargs: Kwargs) -> Any:
        message_id = (args[1] if len(args) > 1 else kwargs["ctx"]).message_id
        context = message_id.context.copy() if isinstance(message_id, MessageId) else Context()

        async def handle() -> Any:
            with (
                MessageHandlerContext.populate_context(instance.id),
                roles.entered(role_of_agent_id(instance.id, instance)),
            ):
                return await wrapped(*args, **kwargs)

        return await asyncio.get_running_loop().create_task(handle(), context=context)

    return on_message
