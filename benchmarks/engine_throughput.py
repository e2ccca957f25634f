"""Tokens per second of the torch backend: decoding for many concurrent requests, and learning.

    python benchmarks/engine_throughput.py [--requests 64] [--threads 1]

A random 1.1-million-parameter policy with groups of 8 rollouts, about 200 prompt and 30 to 50 completion tokens; and the calls of an agent
such as examples/text_to_sql: four calls one after the other, short answers, prompts that begin as the group's others do.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from lightningrl.types import GenerateRequest, Sample, SamplingSettings
from lightningrl_torch.backend import TorchBackend
from lightningrl_torch.testing import make_sample, save_policy

GROUP = 8
VOCABULARY = 2048
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "initializer_range": 0.05,
    "eos_token_id": None,
}


def make_prompts(rng: random.Random, count: int) -> list[tuple[int, ...]]:
    return [tuple(rng.randrange(257, VOCABULARY) for _ in range(rng.randint(180, 220))) for _ in range(count)]


async def generate(
    backend: TorchBackend, prompts: Sequence[tuple[int, ...]], rng: random.Random
) -> tuple[list[tuple[int, list[int], list[float]]], float]:
    """All completions, and CPU seconds of the process: other work on the machine does not count."""

    async def one(number: int, prompt: tuple[int, ...], tokens: int) -> tuple[int, list[int], list[float]]:
        request = GenerateRequest(id=str(number), prompt_ids=prompt, sampling=SamplingSettings(max_tokens=tokens))
        ids: list[int] = []
        logprobs: list[float] = []
        async for chunk in backend.engine.generate(request):
            ids += chunk.token_ids
            logprobs += chunk.logprobs
        return number, ids, logprobs

    started = time.process_time()
    found = await asyncio.gather(*(one(number, prompt, rng.randint(30, 50)) for number, prompt in enumerate(prompts)))
    return list(found), time.process_time() - started


def report_generation(backend: TorchBackend, requests: int, *, grouped: bool) -> list[Sample]:
    rng = random.Random(requests)
    prompts = make_prompts(rng, requests // GROUP if grouped else requests)
    prompts = [prompts[number // GROUP if grouped else number] for number in range(requests)]
    with backend.engine.held():
        backend.engine.set_version(backend.engine.info.version)  # forgets remembered prompts
    found, seconds = asyncio.run(generate(backend, prompts, rng))
    tokens = sum(len(ids) for _, ids, _ in found)
    kind = f"groups of {GROUP}" if grouped else "distinct prompts"
    print(f"generate  {requests:4d} requests, {kind:16s}  {seconds:6.2f} CPU s  {tokens / seconds:8.0f} tokens per CPU s with prefill")
    return [
        make_sample(prompts[number], ids, rng.gauss(0, 1), rollout=str(number), weight=1 / tokens, logprobs=logprobs)
        for number, ids, logprobs in found
    ]


def report_agents(backend: TorchBackend, rollouts: int, *, in_flight: int) -> None:
    """The engine's part of a step: an agent writes, checks, rewrites and checks again, `in_flight` rollouts at a time."""
    rng = random.Random(rollouts)
    questions = [[rng.randrange(257, VOCABULARY) for _ in range(90)] for _ in range(rollouts // GROUP)]
    places = asyncio.Semaphore(in_flight)

    async def roll(number: int) -> int:
        question, done = questions[number // GROUP], 0
        async with places:
            for call in range(4):
                own = [rng.randrange(257, VOCABULARY) for _ in range(20 * call)]
                shared = question[:30] if call % 2 else question  # a check has the question alone, a rewrite the schema, too
                limit = rng.randint(3, 6) if call % 2 else rng.randint(12, 24)
                sampling = SamplingSettings(max_tokens=limit)
                request = GenerateRequest(id=f"{number}/{call}", prompt_ids=(call % 2, *shared, *own), sampling=sampling)
                async for chunk in backend.engine.generate(request):
                    done += len(chunk.token_ids)
        return done

    async def all_of_them() -> int:
        return sum(await asyncio.gather(*(roll(number) for number in range(rollouts))))

    started = time.process_time()
    tokens = asyncio.run(all_of_them())
    seconds = time.process_time() - started
    print(f"agents    {rollouts:4d} rollouts of 4 calls        {seconds:6.2f} CPU s  {tokens / seconds:8.0f} tokens per CPU s with prefill")


def report_learning(backend: TorchBackend, samples: Sequence[Sample], name: str) -> None:
    seconds = []
    for _ in range(3):
        started = time.process_time()
        backend.learn(samples)
        seconds.append(time.process_time() - started)
    rows = sum(len(sample.token_ids) for sample in samples)
    print(f"learn     {len(samples):4d} samples,  {name:16s}  {min(seconds):6.2f} CPU s  {rows / min(seconds):8.0f} row tokens per CPU s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only-agents", action="store_true", help="the agent's calls alone")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        policy = save_policy(Path(folder), **SHAPE)
        backend = TorchBackend(policy=policy, threads=options.threads, engine_threads=options.threads, learning_rate=0.0)
        parameters = sum(parameter.numel() for parameter in backend.learner.parameters.values())
        print(f"{parameters / 1e6:.1f}M parameters, {options.threads} thread(s)")
        report_agents(backend, 128, in_flight=48)
        if options.only_agents:
            backend.close()
            return
        for grouped in (True, False):
            report_generation(backend, options.requests, grouped=grouped)
        samples = report_generation(backend, 128, grouped=True)
        report_learning(backend, samples, "shared prompts")
        backend.close()
        plain = TorchBackend(policy=policy, threads=options.threads, learning_rate=0.0, share_prefixes=False)
        report_learning(plain, samples, "plain rows")
        plain.close()


if __name__ == "__main__":
    main()
