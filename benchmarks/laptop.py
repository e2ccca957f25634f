"""Policies that a laptop can train: speed and memory of policies of about 0.1, 0.5 and 1.5 billion parameters
(random weights, Qwen2.5's shapes).

    python benchmarks/laptop.py                          0.1, 0.5 and 1.5 billion, float32
    python benchmarks/laptop.py --sizes 0.5 --threads 1 --dtype bfloat16

Each size runs in a process of its own: decoding for 1 and 8 rows as a share of what memory bandwidth allows (weights
are read once for each token of all rows; the bandwidth is that of summing 256 MB, measured before and after), prefill,
learning with LoRA, and a small recipe's step: 8 rollouts of 2 calls, 100 prompt and 24 completion tokens each, with the
settings that a recipe has that says nothing of them. Seconds are CPU seconds by thread: other work on the machine does
not count.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen2Config, Qwen2ForCausalLM

from lightningrl.backends import GenerateRequest
from lightningrl.types import SamplingSettings
from lightningrl_torch.engine import TorchEngine
from lightningrl_torch.learner import Learner
from lightningrl_torch.settings import EngineSettings, Settings
from lightningrl_torch.testing import make_sample

VOCABULARY = 151_936
_NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
SHAPES: dict[str, dict[str, Any]] = {
    "0.1": dict(zip(_NAMES, (512, 2048, 8, 8, 2), strict=True)),
    "0.5": dict(zip(_NAMES, (896, 4864, 24, 14, 2), strict=True)),
    "1.5": dict(zip(_NAMES, (1536, 8960, 28, 12, 2), strict=True)),
}
TOKENS, PROMPT = 24, 100
ROLLOUTS, CALLS = 8, 2


def make_policy(size: str, dtype: torch.dtype) -> Any:
    """With LoRA on every linear map."""
    config = Qwen2Config(vocab_size=VOCABULARY, tie_word_embeddings=True, max_position_embeddings=4096, **SHAPES[size])
    with torch.device("meta"):
        model: Any = Qwen2ForCausalLM(config)
    buffers = dict(
        Qwen2ForCausalLM(
            Qwen2Config(**{**SHAPES[size], "vocab_size": 8, "num_hidden_layers": 1})
        ).model.rotary_emb.named_buffers()
    )
    model = model.to(dtype).to_empty(device="cpu")
    for name, buffer in buffers.items():
        setattr(model.model.rotary_emb, name, buffer)
    model.tie_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.03, 0.03) if parameter.ndim > 1 else parameter.fill_(1.0)
    get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
    return model.eval()


def seconds(work: Callable[[], Any], threads: int, runs: int = 1) -> float:
    """CPU seconds by thread, the least of some runs."""

    def once() -> float:
        started = time.process_time()
        work()
        return (time.process_time() - started) / threads

    return min(once() for _ in range(runs))


def bandwidth(threads: int) -> float:
    """Bytes a second that are read from memory."""
    numbers = torch.ones(2**26)
    return numbers.nbytes / seconds(numbers.sum, threads, 5)


def generate(engine: TorchEngine, rows: int, *, prompt: int, tokens: int) -> Callable[[], Any]:
    rng = random.Random(0)

    async def one(number: int) -> None:
        prompt_ids = tuple(rng.randrange(VOCABULARY) for _ in range(prompt))
        request = GenerateRequest(
            id=str(number), prompt_ids=prompt_ids, sampling=SamplingSettings(max_tokens=tokens, seed=number)
        )
        async for _ in engine.generate(request):
            pass

    async def all_of_them() -> None:
        await asyncio.gather(*(one(number) for number in range(rows)))

    return lambda: asyncio.run(all_of_them())


def say(what: str, value: str) -> None:
    print(f"{what:<22} {value}", flush=True)


def measure(size: str, dtype: str, threads: int) -> None:
    torch.set_num_threads(threads)
    number_format = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    model = make_policy(size, number_format)
    read = sum(parameter.nbytes for parameter in model.parameters())
    before = bandwidth(threads)
    settings = EngineSettings(threads=threads, autocast=dtype == "bfloat16")
    engine = TorchEngine(model, policy="policy", context_length=4096, settings=settings)
    say("billion parameters", f"{size}, {dtype}, {threads} thread(s)")
    speeds = {}
    for rows in (1, 8):
        generate(engine, rows, prompt=2, tokens=4)()  # warm
        took = seconds(generate(engine, rows, prompt=2, tokens=TOKENS), threads)
        speeds[rows] = rows * TOKENS / took
        share = read * TOKENS / took / ((before + bandwidth(threads)) / 2)
        say(f"tokens/s, {rows} row{'s' * (rows > 1)}", f"{speeds[rows]:.1f} ({share:.0%} of memory's)")
    prefill = 2 * 400 / seconds(generate(engine, 2, prompt=400, tokens=1), threads)
    say("prefill tokens/s", f"{prefill:.0f}")
    engine.close()
    learning_settings: dict[str, Any] = {"dtype": dtype, "lora": True}
    learner = Learner(model, Settings(policy="policy", **learning_settings))
    rng = random.Random(1)
    samples = [
        make_sample(
            [rng.randrange(VOCABULARY) for _ in range(PROMPT)],
            [rng.randrange(VOCABULARY) for _ in range(TOKENS)],
            rollout=str(number),
        )
        for number in range(4)
    ]
    learning = 4 * (PROMPT + TOKENS) / seconds(lambda: learner.learn(samples), threads)
    say("learner tokens/s", f"{learning:.0f}")
    calls = ROLLOUTS * CALLS
    step = calls * TOKENS / speeds[8] + calls * PROMPT / prefill + calls * (PROMPT + TOKENS) / learning
    say("minutes a step", f"{step / 60:.2f}")
    say("memory", f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        measure(options.sizes[0], options.dtype, options.threads)
        return
    for size in options.sizes:
        shared = ["--sizes", size, "--threads", str(options.threads), "--dtype", options.dtype]
        subprocess.run([sys.executable, __file__, "--here", *shared], check=True)
        print()


if __name__ == "__main__":
    main()
