"""The APIs that agents speak, each ⇄ our own request and answer. The names below are what a format of one's own is written with."""

from lightningrl.gateway.dialects.checks import (
    check_count,
    check_range,
    check_tool_call_ids,
    decode_body,
    force_call,
    format_instruction,
    function_tool,
    join_text,
    read_arguments,
    read_asked,
    read_stop,
    read_tools,
    unknown_choice,
    with_instruction,
)

__all__ = [
    "check_count",
    "check_range",
    "check_tool_call_ids",
    "decode_body",
    "force_call",
    "format_instruction",
    "function_tool",
    "join_text",
    "read_arguments",
    "read_asked",
    "read_stop",
    "read_tools",
    "unknown_choice",
    "with_instruction",
]
