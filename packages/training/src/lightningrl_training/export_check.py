"""Does what was exported answer as the run did? Its greedy calls are asked again, of others' code.

store ─► greedy calls of the step's validation ─► transformers, vLLM (a folder alone), or llama.cpp (a file)
a conversation ─► the run's renderer │ the exported template ─► the first token that differs
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import httpx

from lightningrl.errors import BackendError, ConfigError
from lightningrl.records import RolloutFilter
from lightningrl.types import RolloutMode, Transition
from lightningrl_runs.reader import open_run
from lightningrl_server.rendering.renderer import PolicyRenderer
from lightningrl_training.evaluation.certificate import is_sampled, read_trajectories
from lightningrl_training.run_sync import run_sync

__all__ = ["check_export", "readers_of"]

Answer = Callable[[Sequence[int], int], list[int]]
"""The greedy answer to a prompt, of at most so many tokens; a reader may leave out the token that ends it."""
VLLM_VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
"""vLLM in one process, telling nobody; a gibibyte of keys and values on a CPU."""
VLLM_PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams

model = LLM(sys.argv[1], max_model_len=int(sys.argv[2]), enforce_eager=True, distributed_executor_backend="uni")
asked = json.load(sys.stdin)
prompts = [{"prompt_token_ids": prompt} for prompt, _ in asked]
greedy = [SamplingParams(temperature=0.0, max_tokens=most) for _, most in asked]
requests = model.generate(prompts, greedy, use_tqdm=False)
print(json.dumps([list(request.outputs[0].token_ids) for request in requests]))
"""
MOST_ROLLOUTS = 1000
PATIENCE_S = 600.0
CONVERSATIONS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "What is 2 + 3?"}],
    [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "Go on."}],
    [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Why?"}],
)


async def greedy_calls(run: Path, policy: str, step: int, count: int) -> list[Transition]:
    """Read the newest `count` calls of the validation after a step that a policy answered greedily. Raises ConfigError
    where there is none."""
    calls: list[Transition] = []
    async with open_run(run) as stored:
        where = RolloutFilter(mode=RolloutMode.VALIDATION, step=step, limit=MOST_ROLLOUTS)
        ended = [rollout.spec.id for rollout in await stored.list_rollouts(where) if rollout.outcome is not None]
        async for trajectory in read_trajectories(stored, ended):
            calls += [
                call
                for call in filter(is_sampled, trajectory.transitions)
                if call.policy == policy and call.sampling.temperature == 0 and not call.sampling.grammar
            ]
            if len(calls) >= count:
                break
    if not calls:
        raise ConfigError(
            f"run {str(run)!r} has no greedy call of policy {policy!r} from after step {step}, so there is nothing to "
            "check; export a step that was validated, or leave out --check"
        )
    return calls[:count]


def check_answers(calls: Sequence[Transition], answer: Answer, renderer: PolicyRenderer) -> Iterator[str]:
    """Yield a sentence for each call that is answered otherwise than the run answered it."""
    stops = frozenset(renderer.stop_token_ids)
    for call in calls:
        wanted = [int(token) for token in call.completion_ids]
        given = answer([int(token) for token in call.prompt_ids], len(wanted))[: len(wanted)]
        if given == wanted or (given == wanted[:-1] and wanted[-1] in stops):
            continue
        place = next(
            (place for place, pair in enumerate(zip(given, wanted, strict=False)) if pair[0] != pair[1]), len(given)
        )
        token = renderer.decode(given[place : place + 1]) if place < len(given) else "the end"
        yield (
            f"call {call.id}: token {place + 1} of its answer is {token!r}, where the run said "
            f"{renderer.decode(wanted[place : place + 1])!r}"
        )


def check_prompts(folder: Path, renderer: PolicyRenderer) -> Iterator[str]:
    """Yield a sentence for each conversation that the folder's own template writes otherwise than the run did."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    for messages in CONVERSATIONS:
        try:
            wanted = renderer.render(messages, None)
        except ValueError:
            continue  # the policy takes no such conversation
        given = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        if tuple(given) != wanted:
            place = next(
                (i for i, pair in enumerate(zip(given, wanted, strict=False)) if pair[0] != pair[1]), len(given)
            )
            yield (
                f"the prompt of {messages[-1]['content']!r}: token {place + 1} is "
                f"{renderer.decode(given[place : place + 1])!r}, where the run had "
                f"{renderer.decode(wanted[place : place + 1])!r}"
            )


def readers_of(target: Path, base: str | None) -> tuple[str, ...]:
    """Names of others' code that reads what was exported: llama.cpp a file, else transformers, and vLLM where it is
    installed; of an adapter on a `base` transformers alone. Raises ConfigError where a file's is not installed."""
    if not target.is_file():
        return ("transformers", "vLLM") if base is None and importlib.util.find_spec("vllm") else ("transformers",)
    if importlib.util.find_spec("xllamacpp") is None:
        raise ConfigError(f"{target.name} was written and not checked: llama.cpp is missing; `pip install xllamacpp`")
    return ("llama.cpp",)


def _transformers(target: Path, base: str | None) -> Answer:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    model: Any = AutoModelForCausalLM.from_pretrained(base or target, dtype="auto")
    if base is not None:
        model.load_adapter(str(target))
        model.generation_config = GenerationConfig.from_pretrained(target)
    tokenizer: Any = AutoTokenizer.from_pretrained(base or target)

    def answer(prompt: Sequence[int], most: int) -> list[int]:
        asked = tokenizer.pad({"input_ids": [list(prompt)]}, return_tensors="pt")
        whole = model.generate(**asked, do_sample=False, max_new_tokens=most)
        return [int(token) for token in whole[0, len(prompt) :]]

    return answer


def _vllm(folder: Path, context: int, calls: Sequence[Transition]) -> Answer:
    """vLLM's answers to all calls, from a process of its own, which it leaves with its memory. Raises BackendError."""
    asked = [([int(token) for token in call.prompt_ids], len(call.completion_ids)) for call in calls]
    patience_s = PATIENCE_S * (1 + len(asked))
    try:
        ran = subprocess.run(
            [sys.executable, "-c", VLLM_PROGRAM, str(folder), str(context)],
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            check=False,
            env={**VLLM_VARIABLES, **os.environ},
            timeout=patience_s,
        )
    except subprocess.TimeoutExpired:
        raise BackendError(
            f"vLLM did not answer for {folder}, which was written, in {patience_s:g} s; check fewer calls"
        ) from None
    if ran.returncode != 0:
        last = (ran.stderr.strip().splitlines() or ["no message"])[-1]
        raise BackendError(f"{folder} was written, and vLLM does not read it: {last}")
    answers = json.loads(ran.stdout.strip().splitlines()[-1])
    by_prompt = {(*prompt, most): answer for (prompt, most), answer in zip(asked, answers, strict=True)}
    return lambda prompt, most: by_prompt[*prompt, most]


@contextmanager
def _llama_cpp(file: Path, context: int) -> Iterator[Answer]:
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(file)
    parameters.n_ctx, parameters.n_parallel, parameters.verbosity = context, 1, -1
    server = xllamacpp.Server(parameters)
    address = server.listening_address

    def answer(prompt: Sequence[int], most: int) -> list[int]:
        asked = {"prompt": list(prompt), "n_predict": most, "temperature": 0, "return_tokens": True}
        reply = httpx.post(f"{address}/completion", json=asked, timeout=PATIENCE_S, trust_env=False)
        return [int(token) for token in reply.raise_for_status().json()["tokens"]]

    try:
        yield answer
    finally:
        del server  # which ends it


def _answering(
    reader: str, target: Path, base: str | None, calls: Sequence[Transition]
) -> AbstractContextManager[Answer]:
    context = 16 + max(len(call.prompt_ids) + len(call.completion_ids) for call in calls)
    if reader == "llama.cpp":
        return _llama_cpp(target, context)
    return nullcontext(_vllm(target, context, calls) if reader == "vLLM" else _transformers(target, base))


def check_export(
    run: Path, target: Path, *, policy: str, step: int, count: int, renderer: PolicyRenderer, base: str | None
) -> None:
    """Ask what was exported at most `count` calls of its run again, and its template for prompts. Raises BackendError
    with the first difference, ConfigError where nothing can be checked."""
    calls = run_sync(greedy_calls(run, policy, step, count))
    problems = [] if target.is_file() or base is not None else list(check_prompts(target, renderer))
    for reader in readers_of(target, base):
        with _answering(reader, target, base, calls) as answer:
            problems += check_answers(calls, answer, renderer)
        if problems:
            more = f"; {len(problems) - 1} more differ" if len(problems) > 1 else ""
            raise BackendError(f"{target} was written, and {reader} says otherwise than the run: {problems[0]}{more}")
