"""Build the starter policy: a small transformer with its own tokenizer, cold-started on imperfect demonstrations.

    python starter.py --out starter

The result is an ordinary transformers folder. The policy has seen other databases than reinforcement learning and
validation use, and demonstrators who are wrong more often than right (mistakes.py, demonstrations.py): it knows the
right queries, but gives them less probability than the wrong ones. Reinforcement learning lifts what is already there.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from data import SPLITS, build_splits
from demonstrations import Demonstration, build_demonstrations
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as PreTokenizers
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

__all__ = ["build_model", "build_tokenizer", "cold_start"]

SEED = 7
RIGHT_DATABASES, FAULTY_DATABASES, QUESTIONS = 900, 500, 16
"""First demonstrations that are right, then imperfect ones, which decide what the policy prefers."""
BATCH_TOKENS = 4096
PEAK_LEARNING_RATE = 3e-3
MAX_CONTEXT = 1024
COMMON = 20
"""A word that occurs this often is a token."""
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
WORDS = r" ?'[a-z ]+'| ?[A-Za-z_]+| ?[0-9]+|\n| ?[^\sA-Za-z_0-9]|\s"
CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' }}
{{- 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments ' }}
{{- 'within <tool_call></tool_call> XML tags:\\n<tool_call>\\n' }}
{{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'system' %}
{%- if not (tools and loop.first) %}{{- '<|im_start|>system\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}
{%- elif message.role == 'user' %}
{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{%- set call = call.function or call %}
{%- if not loop.first or message.content %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
{{- call.arguments if call.arguments is string else call.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def build_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """One token for each common word of `texts` (with its leading space); any other word falls apart into bytes, lossless."""
    split = PreTokenizers(
        [
            Split(Regex(WORDS), behavior="isolated"),
            ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    counts = Counter(piece for text in texts for piece, _ in split.pre_tokenize_str(text))
    words = sorted(word for word, count in counts.items() if count >= COMMON)
    pieces = sorted(ByteLevel.alphabet())
    pieces += [word for word in words if len(word) > 1]
    tokenizer = Tokenizer(BPE(vocab={piece: number for number, piece in enumerate(pieces)}, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = ByteLevelDecoder()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_CONTEXT,
        chat_template=CHAT_TEMPLATE,
    )
    fast.add_tokens(list(MARKUP_TOKENS))
    return fast


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    size = -(-len(tokenizer) // 64) * 64
    eos, pad = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=MAX_CONTEXT,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=pad,
        initializer_range=0.04,
        use_cache=True,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=[eos, pad], pad_token_id=pad, do_sample=True)
    return model


def encode(demonstration: Demonstration, tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], int]:
    """Token ids of the conversation up to <|im_end|>, and how many of them are the prompt."""
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": demonstration.prompt}], add_generation_prompt=True, return_dict=False
    )
    answer = tokenizer.encode(demonstration.answer + "<|im_end|>", add_special_tokens=False)
    return prompt + answer, len(prompt)


def make_batches(encoded: list[tuple[list[int], int]], rng: random.Random) -> Iterator[list[tuple[list[int], int]]]:
    """Batches of about BATCH_TOKENS tokens and similar lengths, in random order."""
    order = sorted(encoded, key=lambda item: len(item[0]) + rng.random() * 8)
    batches, batch = [], []
    for item in order:
        if batch and (len(batch) + 1) * len(item[0]) > BATCH_TOKENS:
            batches.append(batch)
            batch = []
        batch.append(item)
    batches.append(batch)
    rng.shuffle(batches)
    yield from batches


def answer_loss(model: LlamaForCausalLM, batch: list[tuple[list[int], int]], pad: int) -> torch.Tensor:
    """Cross-entropy of the answers' tokens; each answer weighs the same, a verdict as much as a query."""
    length = max(len(ids) for ids, _ in batch)  # tokens, weights, mask: [row][position]
    tokens = torch.tensor([ids + [pad] * (length - len(ids)) for ids, _ in batch])
    weights = torch.zeros(len(batch), length)
    for row, (ids, prompt) in enumerate(batch):
        weights[row, prompt - 1 : len(ids) - 1] = 1.0 / (len(ids) - prompt)
    mask = weights > 0
    hidden = model.model(input_ids=tokens).last_hidden_state  # padding is on the right, where nothing looks
    losses = cross_entropy(model.lm_head(hidden[mask]), tokens.roll(-1, dims=1)[mask], reduction="none")
    return (losses * weights[mask]).sum() / len(batch)


def cold_start(out: Path, *, right_databases: int = RIGHT_DATABASES, faulty_databases: int = FAULTY_DATABASES, seed: int = SEED) -> None:
    """Train the starter policy and write its folder."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    rng = random.Random(seed)
    taken = {database.signature() for split in SPLITS for database, _ in build_splits()[split]}
    right = list(build_demonstrations(right_databases, QUESTIONS, seed, taken, is_faulty=False))
    faulty = list(build_demonstrations(faulty_databases, QUESTIONS, seed, taken, is_faulty=True))
    texts = [text for item in right + faulty for text in (item.prompt, item.answer)]
    tokenizer = build_tokenizer([*texts, *["system", "user", "assistant", "\n"] * COMMON])
    model = build_model(tokenizer)
    batches = [
        batch for demonstrations in (right, faulty) for batch in make_batches([encode(item, tokenizer) for item in demonstrations], rng)
    ]
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    warmup = 50
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / warmup) * max(0.02, 1.0 - step / len(batches))
    )
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens")
    print(f"{len(right):,} right and {len(faulty):,} imperfect demonstrations")
    bar = tqdm(batches, desc="cold start", unit="batch")
    smooth = None
    for batch in bar:
        loss = answer_loss(model, batch, tokenizer.pad_token_id)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        smooth = loss.item() if smooth is None else 0.98 * smooth + 0.02 * loss.item()
        bar.set_postfix(loss=f"{smooth:.3f}")
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "starter")
    arguments = parser.parse_args()
    started = time.monotonic()
    cold_start(arguments.out)
    print(f"wrote {os.fspath(arguments.out)!r} in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
