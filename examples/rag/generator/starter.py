"""Build the starter policy: a small transformer with its own tokenizer, cold-started on imperfect demonstrations.

    python generator/starter.py --out starter

The result is an ordinary transformers folder. The policy has seen other names than reinforcement learning and
validation use, and demonstrators who are wrong more often than right (mistakes.py, demonstrations.py): it knows good
searches and right answers, but gives them less probability than worse ones. Reinforcement learning lifts what is
already there.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from demonstrations import TOOLS, Conversation, build_demonstrations, build_transcripts
from transformers import PreTrainedTokenizerFast

from lightningrl_torch.cold_start import (
    Demonstration,
    build_command,
    build_model,
    build_tokenizer,
    cold_start,
    write_policy,
)

__all__ = ["build_starter", "starter_tokenizer"]

SEED = 7
READ_WORLDS, RIGHT_WORLDS, FAULTY_WORLDS, QUESTIONS = 5, 1, 2, 1200
"""First whole conversations, from which it learns to read and to copy names, then calls that are right, then imperfect
ones, which decide what the policy prefers."""
CALL_TOKENS = ('\n{"name": "search", "arguments": {"query": "', '"}}\n')
"""What stands around each query, as one token each: a search is 9 tokens instead of 31."""
CHAT_TEMPLATE = """\
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- if loop.first and tools %}{{- '\\n# Tools' }}
{%- for tool in tools %}{{- '\\n' + tool.function.name + '(' + tool.function.parameters.properties | join(', ') + ')' }}{%- endfor %}
{%- endif %}
{%- for call in message.tool_calls or [] %}
{%- set call = call.function or call %}
{%- if not loop.first or message.content %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
{{- call.arguments if call.arguments is string else call.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""As Qwen's, but it lists tools by their signatures, at the end of the first message: prompts are 200 tokens
shorter."""


def starter_tokenizer(demonstrations: Sequence[Demonstration]) -> PreTrainedTokenizerFast:
    tokenizer = build_tokenizer(demonstrations)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.add_tokens(list(CALL_TOKENS))
    return tokenizer


def build_starter(
    out: Path,
    *,
    read_worlds: int = READ_WORLDS,
    right_worlds: int = RIGHT_WORLDS,
    faulty_worlds: int = FAULTY_WORLDS,
    questions: int = QUESTIONS,
    seed: int = SEED,
) -> None:
    """Train the starter policy and write its folder."""
    right = list(build_demonstrations(right_worlds, questions, seed, is_faulty=False))
    faulty = list(build_demonstrations(faulty_worlds, questions, seed, is_faulty=True))
    tokenizer = starter_tokenizer([*right[:5000], *faulty[:5000]])

    def render(messages: Conversation) -> str:
        return str(tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False))

    read = list(build_transcripts(read_worlds, questions, seed + 1, render))
    model = build_model(tokenizer, seed=seed)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens")
    print(f"{len(read):,} transcripts, {len(right):,} right and {len(faulty):,} imperfect demonstrations")
    cold_start(model, tokenizer, [read, right, faulty], seed=seed)
    write_policy(out, model, tokenizer)


if __name__ == "__main__":
    build_command(build_starter, Path(__file__).parents[1] / "starter", description=__doc__)
