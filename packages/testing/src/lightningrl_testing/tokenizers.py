"""A tiny chat tokenizer, built offline in well under a second: byte-level, ChatML, Qwen-style tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["CHATML_TEMPLATE", "tiny_tokenizer"]

_FRAMES = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

CHATML_TEMPLATE = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- "# Tools\n\nYou may call functions. Signatures:\n<tools>" }}
    {%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\n</tools>\n\nFor each call, return JSON with name and arguments within " }}
    {{- "<tool_call></tool_call> tags.<|im_end|>\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' and loop.first %}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {%- if message.content or not loop.first %}{{- '\n' }}{%- endif %}
            {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {%- if call.function.arguments is string %}{{- call.function.arguments }}
            {%- else %}{{- call.function.arguments | tojson }}{%- endif %}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
""".lstrip("\n")


def tiny_tokenizer(words: Sequence[str] = (), *, chat_template: str | None = CHATML_TEMPLATE) -> Any:
    """Build a `PreTrainedTokenizerFast` that encodes any text (bytes) and the given words as one token each. Words
    match anywhere: give them with their leading space: `" SELECT"`. `save_pretrained` works without torch."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate((*_FRAMES, *sorted(pre_tokenizers.ByteLevel.alphabet())))}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    build: Any = PreTrainedTokenizerFast
    tokenizer = build(
        tokenizer_object=core,
        eos_token=_FRAMES[2],
        pad_token=_FRAMES[0],
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in (*_MARKUP, *words)])
    tokenizer.chat_template = chat_template
    return tokenizer
