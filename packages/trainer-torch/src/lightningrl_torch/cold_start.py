"""Small policies made from nothing: a tokenizer of one's own words, a transformer, and training on demonstrations.

    demonstrations ─► build_tokenizer ─► build_model ─► cold_start ─► write_policy ─► a transformers folder

Reinforcement learning needs a policy that is sometimes right. Where no model is at hand that a laptop can train,
demonstrators who know the task and are often wrong give one in a minute. Demonstrations are conversations; the template
that renders them here is the one that the gateway renders an agent's calls with, so the policy is trained on the very
tokens it will see.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as PreTokenizers
from torch.nn.functional import cross_entropy
from tqdm import tqdm  # type: ignore[import-untyped]
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lightningrl_torch.device import cpu_threads

__all__ = [
    "NUMBERS",
    "Demonstration",
    "build_command",
    "build_model",
    "build_tokenizer",
    "cold_start",
    "encode",
    "write_policy",
]

HEAD_WIDTH = 32
WARMUP_STEPS = 50
END_OF_TURN, END_OF_TEXT = "<|im_end|>", "<|endoftext|>"
MARKUP_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
SPECIAL = r"<\|im_start\|>|<\|im_end\|>|<\|endoftext\|>|</?think>|</?tool_call>|</?tool_response>"
WORDS = r" ?'[a-z ]+'| ?[A-Za-z_]+| ?[0-9]+|\n| ?[^\sA-Za-z_0-9]|\s"
NUMBERS = WORDS.replace(" ?[0-9]+", "[0-9]+")
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

Row = tuple[list[int], list[tuple[int, int]]]
"""Token ids of a conversation, and from where to where its answers go."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Demonstration:
    """One call of an agent, with the answer that somebody would give."""

    messages: Sequence[Mapping[str, Any]]
    """A chat in OpenAI's format. The last message is the assistant's answer, which is learned: `content`, `tool_calls`
    or both. Arguments that are a string are written as they are, so malformed ones can be shown too."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """The tools the call offers, in OpenAI's format, with every field that the agent's framework sends: the prompt
    holds them as JSON."""

    def __post_init__(self) -> None:
        if not self.messages or self.messages[-1].get("role") != "assistant":
            raise ValueError(
                "a demonstration ends with the assistant's answer; its last message has another role, or there is none"
            )


def build_tokenizer(
    demonstrations: Iterable[Demonstration],
    *,
    phrases: Sequence[str] = (),
    words: str = WORDS,
    common: int = 20,
    context_length: int = 1024,
) -> PreTrainedTokenizerFast:
    """A tokenizer with a chat template that knows tools (Qwen's markup), lossless for any text.

    A word, with the space before it, that occurs `common` times in the demonstrations, prompts included, is one token;
    any other falls apart into bytes. `phrases` are one token each, however long: what every prompt or answer repeats,
    such as the list of tools or the JSON around a tool's arguments. `words` is the regular expression of a word: the
    default takes the space before it along; `NUMBERS` leaves it apart from numbers, so that a number is the same token
    in a text and in JSON. `context_length` counts tokens; models built for this tokenizer see as many.
    """
    pieces = PreTokenizers(
        [Split(Regex(words), behavior="isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    bare = _make_tokenizer(pieces, [], phrases, context_length)  # has the template, which writes the texts to count
    apart = re.compile("|".join([*(re.escape(phrase) for phrase in phrases), SPECIAL]))
    texts = (text for one in demonstrations for text in apart.split("".join(_render(one, bare))))
    counts = Counter(piece for text in texts for piece, _ in pieces.pre_tokenize_str(text))
    counts.update(dict.fromkeys(("system", "user", "assistant"), common))
    common_words = sorted(word for word, count in counts.items() if count >= common and len(word) > 1)
    return _make_tokenizer(pieces, common_words, phrases, context_length)


def build_model(
    tokenizer: PreTrainedTokenizerFast, *, width: int = 128, layers: int = 4, seed: int = 0
) -> LlamaForCausalLM:
    """A Llama with random weights: `layers` blocks of `width`, in heads of 32. The defaults make about a million
    parameters.

    Raises `ValueError` if `width` is no multiple of 32.
    """
    if width % HEAD_WIDTH:
        raise ValueError(f"width {width!r} is no multiple of {HEAD_WIDTH}, the width of a head; take the next one")
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    config = LlamaConfig(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // HEAD_WIDTH,
        num_key_value_heads=width // HEAD_WIDTH,
        max_position_embeddings=tokenizer.model_max_length,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=pad,
        initializer_range=0.04,
        use_cache=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    ends = {"eos_token_id": [eos, pad], "pad_token_id": pad}
    model.generation_config = GenerationConfig(**ends, do_sample=True)  # type: ignore[no-untyped-call]
    return model


def encode(demonstration: Demonstration, tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], int]:
    """Token ids of the conversation up to <|im_end|>, and how many of them are the prompt: what the agent's call
    renders to."""
    prompt, answer = (tokenizer.encode(text, add_special_tokens=False) for text in _render(demonstration, tokenizer))
    return prompt + answer, len(prompt)


def cold_start(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    phases: Sequence[Sequence[Demonstration]],
    *,
    seed: int = 0,
    peak_learning_rate: float = 3e-3,
    batch_tokens: int = 4096,
    threads: int = 1,
) -> float:
    """Train `model` in place on the demonstrations' answers; each is seen once, the phases one after the other. Returns
    the last loss.

    An answer weighs the same whatever its length. Demonstrations in a row that continue one conversation are computed
    as one. Batches hold about `batch_tokens` tokens, prompts included, of similar lengths. The learning rate (AdamW)
    rises for 50 batches and falls to 2 % of its peak, over all phases. One seed and one number of `threads` give the
    same weights, bit for bit. Raises `ValueError` if there is no demonstration, or one that is longer than the context.
    """
    rng = random.Random(seed)  # noqa: S311
    batches = [batch for phase in phases for batch in _make_batches(_make_rows(phase, tokenizer), batch_tokens, rng)]
    longest = max((len(ids) for batch in batches for ids, _ in batch), default=0)
    context = model.config.max_position_embeddings
    if not 0 < longest <= context:
        raise ValueError(
            f"the longest demonstration has {longest} tokens; it must have between 1 and {context}, the model's context"
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARMUP_STEPS) * max(0.02, 1.0 - step / len(batches))
    )
    smooth = None
    every_s = 0.1 if sys.stderr.isatty() else 5.0  # of a pipe, each is a line
    bar = tqdm(batches, desc="cold start", unit="batch", mininterval=every_s)
    with cpu_threads(threads):
        for batch in bar:
            loss = _answer_loss(model, batch)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            smooth = loss.item() if smooth is None else 0.98 * smooth + 0.02 * loss.item()
            bar.set_postfix(loss=f"{smooth:.3f}", refresh=False)
    return float(smooth or 0.0)


def write_policy(folder: str | Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write an ordinary transformers folder, which a recipe names as its `policy.model`."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def build_command(build: Callable[[Path], None], out: Path, *, description: str | None) -> None:
    """The command line of a script that writes a policy: `--out FOLDER`, else `out`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=out, help=f"folder for the policy; {out.name}/ beside the recipe where not given"
    )
    folder: Path = parser.parse_args().out
    started = time.monotonic()
    build(folder)
    print(f"wrote {str(folder)!r} in {time.monotonic() - started:.0f} s")  # noqa: T201  a script's word to its user


def _make_tokenizer(
    words: PreTokenizers, vocabulary: Sequence[str], phrases: Sequence[str], context_length: int
) -> PreTrainedTokenizerFast:
    pieces = [*sorted(ByteLevel.alphabet()), *vocabulary]
    core = Tokenizer(BPE(vocab={piece: number for number, piece in enumerate(pieces)}, merges=[], ignore_merges=True))
    core.pre_tokenizer = words
    core.decoder = ByteLevelDecoder()
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
        model_max_length=context_length,
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.add_tokens([*MARKUP_TOKENS, *(AddedToken(phrase, normalized=False) for phrase in phrases)])
    return tokenizer


def _render(demonstration: Demonstration, tokenizer: PreTrainedTokenizerFast) -> tuple[str, str]:
    """The text of the prompt, up to where the answer begins, and that of the answer, up to <|im_end|>."""
    messages = [dict(message) for message in demonstration.messages]
    tools: Any = [dict(tool) for tool in demonstration.tools] if demonstration.tools else None
    prompt = str(tokenizer.apply_chat_template(messages[:-1], tools=tools, tokenize=False, add_generation_prompt=True))
    whole = str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False))
    return prompt, whole[len(prompt) :].removesuffix("\n")


def _make_rows(demonstrations: Sequence[Demonstration], tokenizer: PreTrainedTokenizerFast) -> list[Row]:
    """A row for each conversation: calls whose prompt begins with the call before them, answer included, share one."""
    rows: list[Row] = []
    for demonstration in demonstrations:
        ids, prompt = encode(demonstration, tokenizer)
        before, answers = rows[-1] if rows else ([], [])
        if before and prompt >= len(before) and ids[: len(before)] == before:
            rows[-1] = (ids, [*answers, (prompt, len(ids))])
        else:
            rows.append((ids, [(prompt, len(ids))]))
    return rows


def _make_batches(rows: Sequence[Row], batch_tokens: int, rng: random.Random) -> Iterator[list[Row]]:
    """Batches of about `batch_tokens` tokens and similar lengths, in random order."""
    order = sorted(rows, key=lambda row: len(row[0]) + rng.random() * 8)
    batches: list[list[Row]] = []
    batch: list[Row] = []
    for row in order:
        if batch and (len(batch) + 1) * len(row[0]) > batch_tokens:
            batches.append(batch)
            batch = []
        batch.append(row)
    if batch:
        batches.append(batch)
    rng.shuffle(batches)
    yield from batches


def _answer_loss(model: LlamaForCausalLM, batch: Sequence[Row]) -> torch.Tensor:
    """Cross-entropy of the answers' tokens; each answer weighs the same, a short verdict as much as a long query."""
    length = max(len(ids) for ids, _ in batch)  # tokens, weights, mask: [row][position]
    tokens = torch.zeros(len(batch), length, dtype=torch.long)
    weights = torch.zeros(len(batch), length)
    for row, (ids, answers) in enumerate(batch):
        tokens[row, : len(ids)] = torch.tensor(ids)
        for start, end in answers:
            weights[row, start - 1 : end - 1] = 1.0 / (end - start)
    mask = weights > 0
    hidden = model.model(input_ids=tokens).last_hidden_state  # padding is on the right, where nothing looks
    losses = cross_entropy(model.lm_head(hidden[mask]), tokens.roll(-1, dims=1)[mask], reduction="none")
    return (losses * weights[mask]).sum() / sum(len(answers) for _, answers in batch)
