"""vLLM as the engine of the torch backend, on the CPU. Runs where vLLM is installed: `make test-vllm`."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sizes import PATIENCE_S

from lightningrl.backends import Backend, Continuation, GenerateRequest
from lightningrl.errors import BackendError
from lightningrl.types import FinishReason, SamplingSettings
from lightningrl_testing.backend_conformance import BackendConformance, Completion, generate, make_row
from lightningrl_torch.backend import TorchBackend
from lightningrl_torch.testing import save_policy

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed; make test-vllm installs and runs it"
)
EXACT = 1e-4
"""Most that a logprob may differ between vLLM and the learner, in float32."""
HEADS = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
"""Of 32, which vLLM has kernels for."""
SMALL: dict[str, Any] = {"device": "cpu", "threads": 1, "engine": "vllm", "vllm": {"kv_cache_gb": 0.0625}}
PROMPTS = [tuple(range(5 + number, 45 + number)) for number in range(8)]
"""Longer than a block of remembered tokens."""


@pytest.fixture(scope="module")
def served_policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_policy(tmp_path_factory.mktemp("served"), **HEADS)


@pytest.fixture
def make(served_policy: str) -> Iterator[Callable[..., TorchBackend]]:
    made: list[TorchBackend] = []

    def make(**settings: Any) -> TorchBackend:
        made.append(make_unclosed(**{"policy": served_policy, **settings}))
        return made[-1]

    yield make
    for backend in made:
        backend.close()


@pytest.fixture(scope="module")
def resting() -> Iterator[list[Backend]]:
    made: list[Backend] = []
    yield made
    for backend in made:
        backend.close()


class TestVllm(BackendConformance):
    """Tests that never learn share an engine: it takes seconds to start, and a process holds one."""

    @pytest.fixture(autouse=True)
    def _policy(self, served_policy: str, resting: list[Backend]) -> None:
        self.policy = served_policy
        self.resting = resting

    def make_backend(self, **learner: object) -> Backend:
        return TorchBackend(**{"policy": self.policy, **SMALL, **learner})

    @asynccontextmanager
    async def backend(self, **learner: object) -> AsyncIterator[Backend]:
        if learner:
            while self.resting:
                self.resting.pop().close()
            async with super().backend(**learner) as made:
                yield made
            return
        if not self.resting:
            self.resting.append(await asyncio.to_thread(self.make_backend))
        yield self.resting[0]


async def sample(backend: Backend, temperature: float) -> list[Completion]:
    asked = [
        generate(backend, prompt, max_tokens=16, temperature=temperature, seed=number)
        for number, prompt in enumerate(PROMPTS)
    ]
    return await asyncio.gather(*asked)


def gap(backend: TorchBackend, completions: Sequence[Completion], temperature: float) -> float:
    """Most that a logprob differs from the learner's."""
    asked = [
        Continuation(
            context=np.array(prompt, np.int32),
            tokens=np.array(completion.token_ids, np.int32),
            temperature=temperature or 1.0,
        )
        for prompt, completion in zip(PROMPTS, completions, strict=True)
    ]
    recomputed = backend.logprobs(asked)
    pairs = zip(recomputed, completions, strict=True)
    return max(float(np.abs(values - np.array(completion.logprobs)).max()) for values, completion in pairs)


@pytest.mark.parametrize("kind", ["tied", "untied", "adapters"])
async def test_logprobs_are_the_learners_at_every_temperature_right_after_each_step(
    kind: str, tmp_path: Path, make: Callable[..., TorchBackend]
) -> None:
    """The same prompts each time: what vLLM remembers of them is of the weights of now."""
    settings: dict[str, Any] = {"lora": {"rank": 8, "alpha": 32.0}} if kind == "adapters" else {}
    if kind == "untied":
        settings["policy"] = save_policy(tmp_path / "untied", tie_word_embeddings=False, **HEADS)
    backend = make(**settings)
    before = await sample(backend, 0.0)
    for version in range(3):
        for temperature in (1.0, 0.7, 0.0):
            completions = await sample(backend, temperature)
            assert {made.versions for made in completions} == {frozenset({version})}
            assert gap(backend, completions, temperature) < EXACT
        rows = [
            make_row(prompt, made, 1.0 if number % 2 else -1.0, 1 / len(PROMPTS))
            for number, (prompt, made) in enumerate(zip(PROMPTS, completions, strict=True))
        ]
        report = await asyncio.to_thread(backend.learn, rows)
        assert report.policy_version == version + 1
    after = await sample(backend, 0.0)
    assert [made.logprobs for made in after] != [made.logprobs for made in before], "else nothing was learned"


async def test_policies_on_one_base_are_one_batch_each_row_with_its_own_adapters(
    make: Callable[..., TorchBackend],
) -> None:
    """Three policies, two of which learn, on one vLLM: each call's logprobs are those of its own learner."""
    shared: dict[str, Any] = {"lora": {"rank": 8, "alpha": 32.0}}
    critic, clerk = (make(name=name, **shared) for name in ("critic", "clerk"))
    with contextlib.closing(make_unclosed(name="writer", policy=critic.settings.policy, **shared)) as writer:
        policies = [writer, critic, clerk]
        served = [backend._vllm._engine for backend in policies if backend._vllm is not None]
        assert served[0] is served[1] is served[2]
        steps = count_steps(served[0])
        alone = await sample(writer, 1.0)
        took = len(steps)
        answers = await asyncio.gather(*(sample(backend, 1.0) for backend in policies))
        assert len(steps) - took < 2 * took, "calls of three policies take little more steps than those of one"
        assert [made.token_ids for made in answers[0]] == [made.token_ids for made in alone]
        for number in range(6):
            learner = policies[number % 2]
            rows = [
                make_row(prompt, made, 1.0 if place % 2 == number % 2 else -1.0, 1 / len(PROMPTS))
                for place, (prompt, made) in enumerate(zip(PROMPTS, await sample(learner, 1.0), strict=True))
            ]
            others = [asyncio.create_task(sample(other, 1.0)) for other in policies if other is not learner]
            await asyncio.to_thread(learner.learn, rows)  # meanwhile the others answer
            await asyncio.gather(*others)
        for temperature in (1.0, 0.0):
            answers = await asyncio.gather(*(sample(backend, temperature) for backend in policies))
            for backend, completions, version in zip(policies, answers, (3, 3, 0), strict=True):
                assert {made.versions for made in completions} == {frozenset({version})}
                assert gap(backend, completions, temperature) < EXACT
        greedy = [[made.logprobs for made in completions] for completions in answers]
        assert greedy[0] != greedy[1] != greedy[2] != greedy[0], "else nothing was learned"
    after = await sample(clerk, 0.0)
    assert [made.token_ids for made in after] == [made.token_ids for made in answers[2]], "one that goes leaves others"


def make_unclosed(**settings: Any) -> TorchBackend:
    return TorchBackend(**{"learning_rate": 1e-2, **SMALL, **settings})


def count_steps(engine: Any) -> list[int]:
    """Gets an element for each step of vLLM from now on."""
    steps: list[int] = []
    step = engine._engine.step

    def counted() -> Any:
        steps.append(1)
        return step()

    engine._engine.step = counted
    return steps


async def test_calls_go_on_while_the_learner_steps_where_they_may_be_stale(make: Callable[..., TorchBackend]) -> None:
    backend = make(max_staleness=1)
    completions = await sample(backend, 1.0)
    rows = [make_row(prompt, made, 1.0, 0.1) for prompt, made in zip(PROMPTS, completions, strict=True)]
    learning = asyncio.create_task(asyncio.to_thread(backend.learn, rows))
    answers: list[Completion] = []
    while not learning.done():
        answers += await sample(backend, 1.0)
    assert all(len(made.versions) == 1 for made in answers)
    assert (await learning).policy_version == 1
    completions = await sample(backend, 1.0)
    assert {made.versions for made in completions} == {frozenset({1})} and gap(backend, completions, 1.0) < EXACT


async def test_a_call_ends_with_the_token_of_its_stop_string_and_a_cancelled_one_leaves(
    make: Callable[..., TorchBackend],
) -> None:
    backend = make()
    whole = await generate(backend, PROMPTS[0], max_tokens=32, temperature=0.0)
    letters = [backend._policy.text_of([token]) for token in whole.token_ids]
    end = next(number for number, letter in enumerate(letters) if letter.isascii() and letter not in letters[:number])
    stopped = await generate(backend, PROMPTS[0], max_tokens=32, temperature=0.0, stop=(letters[end],))
    assert stopped.token_ids == whole.token_ids[: end + 1] and stopped.finish_reason is FinishReason.STOP
    request = GenerateRequest(id="r", prompt_ids=PROMPTS[1], sampling=SamplingSettings(max_tokens=80))
    stream: Any = backend.engine.generate(request)
    await anext(stream)
    await stream.aclose()
    with backend.engine.held():
        assert backend._vllm is not None and backend._vllm._engine.is_idle


async def test_what_vllm_cannot_sample_is_refused_and_the_next_call_is_answered(
    make: Callable[..., TorchBackend],
) -> None:
    backend = make()
    with pytest.raises(BackendError, match=r"top_p = 0\.5 and top_k = 0, and vLLM tells logprobs of the truncated"):
        await generate(backend, PROMPTS[0], top_p=0.5)
    assert (await generate(backend, PROMPTS[0], max_tokens=2)).token_ids


def test_what_vllm_refuses_is_told_in_a_sentence_and_threads_and_generators_stay(
    tmp_path: Path, make: Callable[..., TorchBackend]
) -> None:
    set_threads = torch.set_num_threads
    state = torch.random.get_rng_state()
    with pytest.raises(
        BackendError, match=r"vLLM cannot serve policy .*: No available memory.*; use learner\.engine = "
    ):
        make(vllm={"kv_cache_gb": 1e-5})
    with pytest.raises(BackendError, match=r"vLLM cannot serve policy .*head_dim=16.*; use learner\.engine = "):
        make(policy=save_policy(tmp_path / "narrow", hidden_size=64))
    assert make().engine.info.version == 0
    assert torch.set_num_threads is set_threads, "vLLM replaces it on a CPU, and the learner needs it"
    assert torch.equal(torch.random.get_rng_state(), state)


PROJECT = """
from openai import OpenAI

CLIENT = OpenAI(api_key="any")


def answer(question):
    messages = [{"role": "user", "content": question}]
    for model in ("any", "critic"):
        said = CLIENT.chat.completions.create(model=model, messages=messages).choices[0].message.content or ""
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "go on"}]
    return said


def tasks():
    return [{"id": f"t{number}", "input": f"count to the number {number}"} for number in range(4)]


def letters(task, output, trajectory):
    return float(sum(map(ord, output)) % 7) / 7
"""
RECIPE = """
agent = "agent.py:answer"
tasks.train = "agent.py:tasks"
policy.model = "{policy}"
rewards.letters.use = "agent.py:letters"
sampling.max_tokens = 8
runtime = {{ workers = 1, concurrency = 8 }}
loop = {{ steps = 3, tasks_per_step = 4, group_size = 4, checkpoint_every = 1, keep_checkpoints = 4 }}

[learner]
learning_rate = 1e-3
engine = "vllm"
vllm = {{ kv_cache_gb = 0.0625 }}
"""
TWO_POLICIES = """
lora = {{ rank = 8 }}

[policies.critic]
model = "{policy}"
agents = ["critic"]
"""


@pytest.mark.parametrize(
    ("more", "policies"), [("", ["policy"]), (TWO_POLICIES, ["policy", "critic"])], ids=["one", "two on one base"]
)
def test_a_run_is_killed_goes_on_and_is_certified(
    more: str, policies: list[str], served_policy: str, tmp_path: Path
) -> None:
    """Three steps of an agent with two calls: each call is of the version that the step before made, and its tokens are
    as likely to the learner as vLLM said."""
    (tmp_path / "agent.py").write_text(PROJECT, encoding="utf-8")
    (tmp_path / "recipe.toml").write_text((RECIPE + more).format(policy=served_policy), encoding="utf-8")
    run = tmp_path / "run"
    command = [sys.executable, "-m", "lightningrl"]
    train = [*command, "train", "--run", str(run)]
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen([*train, str(tmp_path)], stdout=log, stderr=subprocess.STDOUT) as killed,
    ):
        wait_for(lambda: (run / "checkpoints/step-000001").is_dir() or killed.poll() is not None)
        killed.kill()
    said = (tmp_path / "log").read_text()
    assert (run / "checkpoints/step-000001").is_dir(), said
    resumed = subprocess.run([*train, "--resume"], capture_output=True, check=False)
    assert resumed.returncode == 0, resumed.stdout.decode() + resumed.stderr.decode()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "seconds" in line]
    versions = [[value for key, value in line.items() if key.startswith("policy_version")] for line in steps]
    assert versions == [[step] * len(policies) for step in (1, 2, 3)]
    certified = subprocess.run([*command, "certify", str(run), "--json"], capture_output=True, check=False)
    found = json.loads(certified.stdout)
    assert certified.returncode == 0 and found["is_passed"], certified.stdout.decode() + certified.stderr.decode()
    assert list(found["gaps"]) == policies
    for parts in found["gaps"].values():
        assert {"version 0", "version 1", "version 2"} <= {part["part"] for part in parts}
    calls = {part["part"] for parts in found["gaps"].values() for part in parts}
    assert {"call 0", "call 1"} <= calls


def test_an_exported_folder_is_checked_by_vllm(served_policy: str, tmp_path: Path) -> None:
    held_out = """def held_out():\n    return [{"id": "held out", "input": "count back"}]\n"""
    (tmp_path / "agent.py").write_text(PROJECT + held_out, encoding="utf-8")
    recipe = RECIPE.format(policy=served_policy).partition('engine = "vllm"')[0]
    (tmp_path / "recipe.toml").write_text(f'tasks.validation = "agent.py:held_out"{recipe}', encoding="utf-8")
    command = [sys.executable, "-m", "lightningrl"]
    run = ("--run", str(tmp_path / "run"))
    subprocess.run([*command, "train", *run, "--steps", "1", str(tmp_path)], check=True)
    words = ["export", str(tmp_path / "weights"), *run, "--check", "2"]
    exported = subprocess.run(
        [*command, *words], capture_output=True, check=False, env={**os.environ, "COLUMNS": "200"}
    )
    assert exported.returncode == 0, exported.stderr.decode()
    assert "asked again of transformers and vLLM, are answered as the run did" in " ".join(
        exported.stdout.decode().split()
    )


def wait_for(found: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.05)
