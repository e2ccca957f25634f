"""What a machine with a GPU has to show, each check in a process of its own: a failure is a line of the report, and the
next one runs.

    python scripts/gpu_check.py                              on the GPU; half an hour
    python scripts/gpu_check.py --device cpu --quick         the same ways, tiny sizes: minutes on two cores
    python scripts/gpu_check.py --only engine learner

    suite         the torch backend's tests on the device
    engine        tokens per second, beside transformers' own `generate` and what memory bandwidth allows (measured)
    learner       tokens per second, and the share of the device's arithmetic (measured by a matrix product)
    text_to_sql   the example: seconds of a step, accuracy before and after
    calculator_smollm2   likewise, with a pretrained model
    quantized     adapters on weights of 16, 8 and 4 bits: a step, decoding, memory, engine against learner
    vllm          vLLM as the engine, where it is installed: tokens per second beside ours, the gap to the learner
    whole_step    steps of random policies of 0.5 and 1.5 billion parameters through server, agent, engine and learner

No network is needed: weights are made on the spot. OUT/report.md has the figures, OUT/NAME.log what each check said.
`scripts/gpu-check` makes a folder that brings all of this to a machine without a network.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

ROOT: Final = Path(__file__).resolve().parents[1]
LIMIT_S: Final = 3600
"""Of one check."""
Figures = dict[str, float | str]

SHAPES: Final[dict[str, dict[str, int]]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "tiny, wide heads": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    "0.5B": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "1.5B": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
}
"""Qwen2.5's, with its vocabulary; the tiny ones have 512 tokens, and vLLM wants heads of 32 numbers."""
AGENT: Final = """
import openai

client = openai.OpenAI(api_key="sk-none")

def answer(task):
    messages = [{"role": "user", "content": task["word"] * 64}]
    for _ in range(2):
        said = client.chat.completions.create(model="gpt-4o-mini", messages=messages).choices[0].message.content
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "more"}]
    return said

def tasks():
    return [{"id": f"t{n}", "input": {"word": f"word {n} "}} for n in range(64)]

def length(task, output, trajectory):
    return float(sum(map(ord, output)) % 97) / 97
"""
RECIPE: Final = """
agent = "agent.py:answer"

[tasks]
train = "agent.py:tasks"

[policy]
model = "policy"

[rewards.length]
use = "agent.py:length"

[sampling]
max_tokens = {max_tokens}

[runtime]
workers = 2
concurrency = 16

[loop]
steps = 2
tasks_per_step = {tasks}
group_size = 8

[learner]
device = "{device}"
dtype = "bfloat16"
learning_rate = 1e-6
gradient_checkpointing = true
max_tokens_per_microbatch = 8192
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What is checked, and how much of it."""

    device: str
    quick: bool
    out: Path

    def wait(self) -> None:
        """Until the device has done what it was asked."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def bandwidth(self) -> float:
        """Bytes per second read and written by a copy."""
        source = torch.empty(2**24 if self.quick else 2**29, dtype=torch.bfloat16, device=self.device)
        target = torch.empty_like(source)
        return 2 * source.numel() * source.element_size() / self.seconds(lambda: target.copy_(source))

    def arithmetic(self) -> float:
        """Operations per second of a product of bfloat16 matrices."""
        size = 512 if self.quick else 8192
        one, other = (torch.randn(size, size, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        return 2 * size**3 / self.seconds(lambda: one @ other)

    def seconds(self, work: Callable[[], object], times: int = 10) -> float:
        """The least of so many."""
        found = []
        for _ in range(times):
            self.wait()
            began = time.perf_counter()
            work()
            self.wait()
            found.append(time.perf_counter() - began)
        return min(found)


def suite(machine: Machine) -> Figures:
    """The tests of the torch backend, on the device."""
    tests = "packages/trainer-torch/tests"
    options = ("-q", "-p", "no:cacheprovider", "-p", "no:benchmark", "--timeout", "900", "--dist", "loadfile")
    command = [sys.executable, "-m", "pytest", *options, "-n", str(min(8, os.cpu_count() or 1)), tests]
    # The bundle leaves out the pages, llama.cpp and verl, which these need; teams of CPU threads are the CPU's matter.
    command += [f"--ignore={tests}/{name}.py" for name in ("test_torch_docs", "test_gguf_reading", "test_gguf_writing")]
    chosen = "not verl and not team_of_cpu_threads"
    command += ["-k", f"({chosen}) and (conformance or engine and logprobs)" if machine.quick else chosen]
    ran = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "LIGHTNINGRL_TEST_DEVICE": machine.device},
        capture_output=True,
        text=True,
        check=False,
    )
    print(ran.stdout, ran.stderr)
    last = next((line for line in reversed(ran.stdout.splitlines()) if line.strip()), "")
    if ran.returncode:
        raise SystemExit(f"tests failed: {last}")
    return {"tests": last}


def engine(machine: Machine) -> Figures:
    """Decoding, ours, transformers' and the most that weights read once for each token allow."""
    from transformers import AutoModelForCausalLM

    from lightningrl_torch.backend import TorchBackend

    shape, prompt, new = ("tiny", 16, 16) if machine.quick else ("0.5B", 128, 128)
    figures: Figures = {"policy": shape}
    with tempfile.TemporaryDirectory() as folder:
        policy = make_policy(Path(folder), shape)
        bandwidth = machine.bandwidth()
        figures["measured bandwidth GB/s"] = bandwidth / 1e9
        backend = TorchBackend(policy=policy, device=machine.device, dtype="bfloat16", learning_rate=0.0)
        decoder: Any = backend.engine._decoder
        theirs: Any = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.bfloat16)
        theirs.to(machine.device).eval()
        size = 2 * sum(parameter.numel() for parameter in theirs.parameters())
        for rows in (1, 8) if machine.quick else (1, 8, 64, 128):
            rng = random.Random(rows)
            prompts = [tuple(rng.randrange(257, 500) for _ in range(prompt)) for _ in range(rows)]
            asyncio.run(sample(backend, prompts, new))  # memory, kernels
            began = time.perf_counter()
            ours = asyncio.run(sample(backend, prompts, new)) / (time.perf_counter() - began)
            if machine.device == "cuda":
                graphed = decoder.forward
                decoder.forward = graphed.forward
                asyncio.run(sample(backend, prompts, new))
                began = time.perf_counter()
                started = asyncio.run(sample(backend, prompts, new)) / (time.perf_counter() - began)
                decoder.forward = graphed
                figures[f"of the same without graphs, {rows} rows"] = ours / started
            ids = torch.tensor(prompts, device=machine.device)
            options = {
                "do_sample": True,
                "top_k": 0,
                "max_new_tokens": new,
                "min_new_tokens": new,
                "attention_mask": torch.ones_like(ids),
            }
            seconds = machine.seconds(lambda: theirs.generate(ids, **options), times=2)  # noqa: B023
            figures[f"tokens/s, {rows} rows"] = ours
            figures[f"of transformers' generate, {rows} rows"] = ours / (rows * new / seconds)
            figures[f"of the roofline, {rows} rows"] = ours / (rows * bandwidth / size)
        backend.close()
    return figures


async def sample(backend: Any, prompts: list[tuple[int, ...]], new: int) -> int:
    """Tokens that came: random weights may end an answer."""
    from lightningrl.backends import GenerateRequest
    from lightningrl.types import SamplingSettings

    async def one(number: int) -> int:
        request = GenerateRequest(id=str(number), prompt_ids=prompts[number], sampling=SamplingSettings(max_tokens=new))
        return sum([len(chunk.token_ids) async for chunk in backend.engine.generate(request)])

    with backend.engine.held():
        backend.engine.set_version(backend.engine.info.version)  # forgets remembered prompts
    counts = await asyncio.gather(*map(one, range(len(prompts))))
    return sum(counts)


def learner(machine: Machine) -> Figures:
    """One step on rows of the same length; the second is counted. MFU is 6 operations for each parameter and token
    (Kaplan et al. 2020)."""
    from lightningrl_torch.backend import TorchBackend
    from lightningrl_torch.testing import make_sample

    shape, rows, half = ("tiny", 8, 16) if machine.quick else ("0.5B", 64, 256)
    with tempfile.TemporaryDirectory() as folder:
        policy = make_policy(Path(folder), shape)
        settings: dict[str, Any] = {"dtype": "bfloat16", "learning_rate": 1e-6, "max_tokens_per_microbatch": 16384}
        backend = TorchBackend(policy=policy, device=machine.device, **settings)
        parameters = sum(parameter.numel() for parameter in backend.learner.parameters.values())
        rng = random.Random(0)
        ids = [[rng.randrange(257, 500) for _ in range(2 * half)] for _ in range(rows)]
        samples = [
            make_sample(row[:half], row[half:], rng.gauss(0, 1), rollout=str(number)) for number, row in enumerate(ids)
        ]
        seconds = machine.seconds(lambda: backend.learn(samples), times=3)
        backend.close()
    tokens, arithmetic = rows * 2 * half, machine.arithmetic()
    return {
        "policy": shape,
        "tokens/s": tokens / seconds,
        "measured TFLOP/s of a product": arithmetic / 1e12,
        "MFU": 6 * parameters * tokens / seconds / arithmetic,
    }


def quantized(machine: Machine) -> Figures:
    """Adapters on frozen weights of 16, 8 and 4 bits, AdamW's moments in 8: the second step is counted."""
    from lightningrl.backends import Continuation
    from lightningrl_torch.backend import TorchBackend
    from lightningrl_torch.quantized import weight_bytes
    from lightningrl_torch.testing import make_sample

    shape, rows, half = ("tiny", 8, 16) if machine.quick else ("0.5B", 32, 256)
    rng = random.Random(0)
    figures: Figures = {"policy": shape}
    with tempfile.TemporaryDirectory() as folder:
        policy = make_policy(Path(folder), shape)
        for kind in (None, "int8", "nf4"):
            settings: dict[str, Any] = {"dtype": "bfloat16", "lora": True, "optimizer": "adamw8bit", "quantize": kind}
            backend = TorchBackend(policy=policy, device=machine.device, **settings)
            ids = [[rng.randrange(257, 500) for _ in range(2 * half)] for _ in range(rows)]
            samples = [make_sample(row[:half], row[half:], rng.gauss(0, 1), rollout=str(row[0])) for row in ids]
            backend.learn(samples)
            report, name = backend.learn(samples), kind or "bfloat16"
            figures[f"{name}: MB of weights"] = weight_bytes(backend.learner.model) / 1e6
            figures[f"{name}: s a step"] = report.seconds
            figures[f"{name}: GB of the GPU at most"] = report.metrics.get("gpu_memory_peak", 0.0) / 1e9
            for count in (1, 64):
                figures[f"{name}: tokens/s, {count} rows"] = engine_speed([backend], half, count, half)
            tokens, logprobs = asyncio.run(complete(backend, ids[0][:half], half))
            read = backend.logprobs(
                [Continuation(context=np.array(ids[0][:half], np.int32), tokens=np.array(tokens, np.int32))]
            )
            figures[f"{name}: mean gap to the learner"] = float(np.abs(read[0] - np.array(logprobs)).mean())
            backend.close()
    return figures


async def complete(backend: Any, prompt: list[int], most: int) -> tuple[list[int], list[float]]:
    """A completion's tokens and logprobs."""
    from lightningrl.backends import GenerateRequest
    from lightningrl.types import SamplingSettings

    request = GenerateRequest(id="gap", prompt_ids=tuple(prompt), sampling=SamplingSettings(max_tokens=most, seed=0))
    chunks = [chunk async for chunk in backend.engine.generate(request)]
    return [one for chunk in chunks for one in chunk.token_ids], [one for chunk in chunks for one in chunk.logprobs]


def vllm(machine: Machine) -> Figures:
    """Both engines of the torch backend on the same prompts; vLLM's after a step, for which it gave its memory back."""
    if importlib.util.find_spec("vllm") is None:
        return {"vLLM": "is not installed"}
    from lightningrl_torch.backend import TorchBackend

    shape, prompt, new = ("tiny, wide heads", 16, 16) if machine.quick else ("0.5B", 128, 128)
    figures: Figures = {"policy": shape}
    with tempfile.TemporaryDirectory() as folder:
        policy = make_policy(Path(folder), shape)
        for dtype in ("float32", "bfloat16"):
            speeds = {"torch": [0.0], "vllm": [0.0]}
            for name, speed in speeds.items():
                options: dict[str, Any] = {"vllm": {"kv_cache_gb": 0.25}} if name == "vllm" and machine.quick else {}
                backend = TorchBackend(
                    policy=policy, device=machine.device, dtype=dtype, learning_rate=1e-5, engine=name, **options
                )
                speed[:] = [engine_speed([backend], prompt, rows, new) for rows in (1, 64)]
                if name == "vllm":
                    figures |= {f"{dtype}: {key}": value for key, value in step_beside(backend, prompt, new).items()}
                backend.close()
            for place, rows in enumerate((1, 64)):
                figures[f"{dtype}: tokens/s, {rows} rows"] = speeds["vllm"][place]
                figures[f"{dtype}: of our engine's, {rows} rows"] = speeds["vllm"][place] / speeds["torch"][place]
        cache = {"kv_cache_gb": 0.25 if machine.quick else 4.0}
        figures |= adapters_beside(policy, prompt, new, device=machine.device, learning_rate=1e-5, vllm=cache)
    return figures


def adapters_beside(policy: str, prompt: int, new: int, **settings: Any) -> Figures:
    """Four policies with adapters on one base, eight rows of each at once: in one vLLM, and by our engines."""
    from lightningrl_torch.backend import TorchBackend

    figures: Figures = {}
    for name in ("torch", "vllm"):
        options = {**settings, "vllm": settings["vllm"] if name == "vllm" else None}
        backends = [
            TorchBackend(policy=policy, name=f"policy {number}", lora=True, engine=name, seed=number, **options)
            for number in range(4)
        ]
        figures[f"four policies with adapters: tokens/s, {name}"] = engine_speed(backends, prompt, 8, new)
        if name == "vllm":
            after = step_beside(backends[0], prompt, new)
            figures |= {f"four policies with adapters: {key}": value for key, value in after.items()}
        for backend in backends:
            backend.close()
    return figures


def engine_speed(backends: Sequence[Any], prompt: int, rows: int, new: int) -> float:
    """Tokens a second of so many rows of each, the second time."""
    rng = random.Random(rows)
    prompts = [tuple(rng.randrange(257, 500) for _ in range(prompt)) for _ in range(rows)]

    async def sample_all() -> int:
        return sum(await asyncio.gather(*(sample(backend, prompts, new) for backend in backends)))

    asyncio.run(sample_all())
    began = time.perf_counter()
    return asyncio.run(sample_all()) / (time.perf_counter() - began)


def step_beside(backend: Any, prompt: int, new: int) -> Figures:
    """A step, and what vLLM then says of a token beside what the learner says."""
    import numpy as np

    from lightningrl.backends import Continuation, GenerateRequest
    from lightningrl.types import SamplingSettings
    from lightningrl_torch.testing import make_sample

    rng = random.Random(0)
    ids = tuple(rng.randrange(257, 500) for _ in range(prompt))

    async def ask() -> list[Any]:
        request = GenerateRequest(id="gap", prompt_ids=ids, sampling=SamplingSettings(max_tokens=new, seed=1))
        return [chunk async for chunk in backend.engine.generate(request)]

    before = asyncio.run(ask())
    tokens = [token for chunk in before for token in chunk.token_ids]
    began = time.perf_counter()
    report = backend.learn([make_sample(ids, tokens, 1.0)])
    figures: Figures = {"seconds of a step, the engine's rest and new weights": time.perf_counter() - began}
    chunks = asyncio.run(ask())
    if {chunk.policy_version for chunk in chunks} != {report.policy_version}:
        raise SystemExit("vLLM answered with another version than the step made")
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    said = np.array([value for chunk in chunks for value in chunk.logprobs])
    (found,) = backend.logprobs([Continuation(context=np.array(ids, np.int32), tokens=np.array(tokens, np.int32))])
    return {**figures, "largest gap of a logprob after it": float(abs(found - said).max())}


def text_to_sql(machine: Machine) -> Figures:
    """The example, on the device: a policy of under a million parameters."""
    return example(machine, "text_to_sql", steps=50)


def calculator_smollm2(machine: Machine) -> Figures:
    """The example, on the device: SmolLM2-135M-Instruct."""
    return example(machine, "calculator_smollm2", steps=10)


def example(machine: Machine, name: str, steps: int) -> Figures:
    sizes = ["--set", "loop.tasks_per_step=4", "--set", "validation.tasks=16"] if machine.quick else []
    options = ["--set", f"learner.device={machine.device}", "--steps", "2" if machine.quick else str(steps)]
    lines = train([str(ROOT / "examples" / name), *options, *sizes], machine.out / name)
    seconds = [line["seconds"] for line in lines if "seconds" in line]
    speeds = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
    scores = [line["validation/reward"] for line in lines if "validation/reward" in line]
    return {
        "seconds a step": sorted(seconds)[len(seconds) // 2],
        "tokens/s sampled": sorted(speeds)[len(speeds) // 2],
        "accuracy before": scores[0],
        "accuracy after": scores[-1],
    }


def whole_step(machine: Machine) -> Figures:
    """Two steps of each policy; the second is counted."""
    figures: Figures = {}
    for shape in ("tiny",) if machine.quick else ("0.5B", "1.5B"):
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            make_policy(folder / "policy", shape)
            (folder / "agent.py").write_text(AGENT)
            tasks, max_tokens = (2, 8) if machine.quick else (8, 128)
            (folder / "recipe.toml").write_text(
                RECIPE.format(device=machine.device, tasks=tasks, max_tokens=max_tokens)
            )
            line = train([str(folder / "recipe.toml")], folder / "run")[-1]
        for name in ("seconds", "seconds_collect", "seconds_learn", "tokens_per_second"):
            figures[f"{shape}: {name}"] = line[name]
        figures[f"{shape}: rollouts"] = line["rollouts"]
    return figures


def train(arguments: list[str], run: Path) -> list[dict[str, Any]]:
    """A run's metrics, a table for each line."""
    command = [sys.executable, "-m", "lightningrl", "train", *arguments, "--run", str(run), "--overwrite"]
    subprocess.run(command, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def make_policy(folder: Path, shape: str) -> str:
    """Random weights in a real shape, with a tokenizer of bytes and words that nobody says, as many as the vocabulary
    has."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    from lightningrl_torch.testing import CHAT_TEMPLATE, END

    vocabulary = 512 if shape.startswith("tiny") else 151_936
    pieces = [*sorted(ByteLevel.alphabet()), END, *(f"word{number}" for number in range(vocabulary - 257))]
    tokenizer = Tokenizer(BPE(vocab={piece: number for number, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    build: Any = PreTrainedTokenizerFast
    build(
        tokenizer_object=tokenizer, eos_token=END, pad_token=END, model_max_length=4096, chat_template=CHAT_TEMPLATE
    ).save_pretrained(folder)
    shape_of: dict[str, Any] = {**SHAPES[shape]}
    config = Qwen2Config(
        **shape_of,
        vocab_size=vocabulary,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model: Any = Qwen2ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    return str(folder)


CHECKS: Final[dict[str, Callable[[Machine], Figures]]] = {
    check.__name__: check
    for check in (suite, engine, learner, quantized, vllm, text_to_sql, calculator_smollm2, whole_step)
}


def run_one(name: str, options: argparse.Namespace) -> tuple[Figures | None, str]:
    """In a process of its own: its figures, or None and what went wrong."""
    command = [sys.executable, __file__, "--check", name, "--device", options.device, "--out", str(options.out)]
    command += ["--quick"] if options.quick else []
    figures = options.out / f"{name}.json"
    figures.unlink(missing_ok=True)
    with (options.out / f"{name}.log").open("w") as log:
        try:
            status = subprocess.run(
                command, stdout=log, stderr=subprocess.STDOUT, timeout=LIMIT_S, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            return None, f"not over after {LIMIT_S} s"
    if status or not figures.exists():
        said = (options.out / f"{name}.log").read_text(errors="replace").strip().splitlines()
        return None, f"status {status}: {said[-1] if said else 'it said nothing'}"
    found: Figures = json.loads(figures.read_text())
    return found, ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes: whether everything runs; the figures mean nothing"
    )
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS))
    parser.add_argument("--out", type=Path, default=ROOT / "runs/gpu_check")
    parser.add_argument("--check", choices=CHECKS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.check:
        figures = CHECKS[options.check](Machine(device=options.device, quick=options.quick, out=options.out))
        (options.out / f"{options.check}.json").write_text(json.dumps(figures))
        return
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("torch sees no GPU here; --device cpu --quick shows that everything runs")
    what = torch.cuda.get_device_name() if options.device == "cuda" else f"CPU, {os.cpu_count()} cores"
    report = [
        f"# Check of {what}",
        "",
        f"torch {torch.__version__}{', quick: the figures mean nothing' if options.quick else ''}",
        "",
    ]
    failed = 0
    for name in options.only:
        print(f"{name} …", flush=True)
        found, why = run_one(name, options)
        failed += found is None
        lines = [f"FAILED: {why}"] if found is None else [f"- {key}: {show(value)}" for key, value in found.items()]
        print("\n".join(lines), flush=True)
        report += [f"## {name}", "", *lines, ""]
        (options.out / "report.md").write_text("\n".join(report))
    print(f"{len(options.only) - failed} of {len(options.only)} checks passed; see {str(options.out / 'report.md')!r}")
    sys.exit(failed > 0)


def show(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


if __name__ == "__main__":
    main()
