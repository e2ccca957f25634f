"""The backend: engine and learner share weights; checkpoints resume bit for bit; exports are ordinary folders."""

from __future__ import annotations

import asyncio
import inspect
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sizes import PATIENCE_S
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightningrl.backends import Backend, GenerateRequest
from lightningrl.errors import BackendError, ConfigError
from lightningrl.plugins import load_plugins
from lightningrl.recipe_keys import check_options
from lightningrl.types import Sample, SamplingSettings
from lightningrl_torch.backend import TorchBackend
from lightningrl_torch.plugin import create_backend
from lightningrl_torch.testing import make_sample, plain_logits

MakeBackend = Callable[..., TorchBackend]

MODES: list[dict[str, Any]] = [
    {"minibatches": 2, "schedule": "cosine", "total_steps": 6, "warmup_steps": 1, "weight_decay": 0.01},
    {"lora": {"rank": 4}},
]
NAMES = ["full", "lora"]


def make_samples(step: int) -> list[Sample]:
    rng = random.Random(step)
    rows = []
    for number in range(6):
        prompt = [number % 2] * 8
        rows.append(
            make_sample(
                prompt, [rng.randrange(256) for _ in range(5)], rng.gauss(0, 1), rollout=str(number), weight=0.03
            )
        )
    return rows


async def sample_tokens(backend: TorchBackend, count: int = 4) -> list[tuple[int, ...]]:
    async def one(number: int) -> tuple[int, ...]:
        request = GenerateRequest(
            id=str(number), prompt_ids=(1, 2, 3 + number), sampling=SamplingSettings(max_tokens=10)
        )
        return tuple([token async for chunk in backend.engine.generate(request) for token in chunk.token_ids])

    return list(await asyncio.gather(*(one(number) for number in range(count))))


def weights_of(backend: TorchBackend) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in backend.learner.model.state_dict().items()}


@pytest.mark.parametrize("mode", MODES, ids=NAMES)
def test_resuming_goes_on_bit_for_bit(make_backend: MakeBackend, tmp_path: Path, mode: dict[str, Any]) -> None:
    straight, first, second = make_backend(**mode), make_backend(**mode), make_backend(**mode)
    tokens = [asyncio.run(sample_tokens(straight))]
    for step in range(4):
        straight.learn(make_samples(step))
        tokens.append(asyncio.run(sample_tokens(straight)))
    assert asyncio.run(sample_tokens(first)) == tokens[0]
    for step in range(2):
        first.learn(make_samples(step))
        assert asyncio.run(sample_tokens(first)) == tokens[step + 1]
    first.save(tmp_path / "checkpoint")
    globals_then = (random.random(), np.random.rand(), torch.rand(()).item())
    second.load(tmp_path / "checkpoint")
    assert (random.random(), np.random.rand(), torch.rand(()).item()) == globals_then
    assert second.engine.info.version == 2
    for step in range(2, 4):
        assert second.learn(make_samples(step)).policy_version == step + 1
        assert asyncio.run(sample_tokens(second)) == tokens[step + 1]
    expected, found = weights_of(straight), weights_of(second)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize("saved_after", [0, 2])
@pytest.mark.parametrize("mode", [*MODES, {"max_staleness": 1}], ids=[*NAMES, "asynchronous"])
def test_going_back_restores_the_weights_as_a_new_version_and_learns_on_more_slowly(
    make_backend: MakeBackend, tmp_path: Path, mode: dict[str, Any], saved_after: int
) -> None:
    backend, again = make_backend(**mode), make_backend(**mode)
    greedy = SamplingSettings(max_tokens=6, temperature=0.0)

    async def answer(asked: TorchBackend) -> tuple[tuple[int, ...], int]:
        chunks = [
            chunk
            async for chunk in asked.engine.generate(GenerateRequest(id="q", prompt_ids=(1, 2, 3), sampling=greedy))
        ]
        return tuple(token for chunk in chunks for token in chunk.token_ids), chunks[-1].policy_version

    for step in range(saved_after):
        backend.learn(make_samples(step))
    backend.save(tmp_path / "best")
    best, answered = weights_of(backend), asyncio.run(answer(backend))[0]
    for step in range(saved_after, 4):
        lr = backend.learn(make_samples(step)).metrics["lr"]
    assert any(not torch.equal(best[name], value) for name, value in weights_of(backend).items())
    rate = backend.go_back(tmp_path / "best", slower=0.5)
    assert rate == backend.learning_rate == pytest.approx(0.5e-2)
    assert all(torch.equal(best[name], value) for name, value in weights_of(backend).items())
    assert asyncio.run(answer(backend)) == (answered, 5), "the engine serves them, as a version of their own"
    backend.save(tmp_path / "later")
    after = backend.learn(make_samples(9))
    assert after.policy_version == 6
    if "schedule" not in mode:
        assert after.metrics["lr"] == pytest.approx(lr / 2)
    again.load(tmp_path / "later")
    assert again.learning_rate == rate
    assert again.learn(make_samples(9)).metrics["lr"] == after.metrics["lr"], "a resumed run is as slow"
    assert all(torch.equal(value, weights_of(backend)[name]) for name, value in weights_of(again).items())


def test_the_engine_serves_new_weights_at_once_and_forgets_old_prompts(make_backend: MakeBackend) -> None:
    backend = make_backend(learning_rate=5e-2)
    request = GenerateRequest(id="q", prompt_ids=tuple(range(20)), sampling=SamplingSettings(max_tokens=10, seed=1))

    async def logprobs() -> tuple[list[int], list[float], set[int]]:
        chunks = [chunk async for chunk in backend.engine.generate(request)]
        ids = [token for chunk in chunks for token in chunk.token_ids]
        return ids, [value for chunk in chunks for value in chunk.logprobs], {chunk.policy_version for chunk in chunks}

    before = asyncio.run(logprobs())
    backend.learn(make_samples(0))
    ids, found, versions = asyncio.run(logprobs())
    with torch.no_grad():
        logits = plain_logits(backend.learner.model, [*range(20), *ids])[19:-1]
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-4)
    assert before[1] != found
    assert (before[2], versions) == ({0}, {1})


async def test_learning_waits_for_running_requests(make_backend: MakeBackend) -> None:
    backend = make_backend()
    stream = backend.engine.generate(
        GenerateRequest(id="q", prompt_ids=(1,), sampling=SamplingSettings(max_tokens=100))
    )
    first = await anext(stream)
    learning = asyncio.ensure_future(asyncio.to_thread(backend.learn, make_samples(0)))
    versions = {first.policy_version, *[chunk.policy_version async for chunk in stream]}
    assert versions == {0}
    assert (await learning).policy_version == 1


def test_a_step_says_what_it_had_of_a_gpu(make_backend: MakeBackend) -> None:
    backend = make_backend()
    found = {
        name: value for name, value in backend.learn(make_samples(0)).metrics.items() if name.startswith("gpu_memory")
    }
    if backend.learner.model.device.type == "cuda":
        assert 0 < found["gpu_memory_before"] < found["gpu_memory_peak"] < found["gpu_memory"]
    else:
        assert found == {}


@pytest.mark.parametrize("mode", [{}, {"lora": {"rank": 4, "target_modules": ["q_proj", "down_proj"]}}], ids=NAMES)
def test_export_is_an_ordinary_folder(make_backend: MakeBackend, tmp_path: Path, mode: dict[str, Any]) -> None:
    backend = make_backend(**mode)
    before = weights_of(backend)
    for step in range(3):
        backend.learn(make_samples(step))
    trained = weights_of(backend)
    assert any(not torch.equal(before[name], trained[name]) for name in before)
    backend.export(tmp_path / "exported")
    assert all(torch.equal(value, trained[name]) for name, value in weights_of(backend).items())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")
    ids = tokenizer.encode("select 1 from t")
    with torch.no_grad():
        torch.testing.assert_close(
            plain_logits(model, ids), plain_logits(backend.learner.model, ids), atol=1e-5, rtol=1e-5
        )
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "user: hi<|end|>"
    again = make_backend(policy=str(tmp_path / "exported"))
    assert again.engine.info.context_length == 128


def test_lora_trains_adapters_alone(make_backend: MakeBackend, tmp_path: Path) -> None:
    backend = make_backend(lora={"rank": 4})
    assert backend.learner.parameters
    assert all("lora_" in name for name in backend.learner.parameters)
    backend.save(tmp_path / "checkpoint")
    with pytest.raises(BackendError, match="does not fit policy"):
        make_backend().load(tmp_path / "checkpoint")


async def test_bfloat16_samples_learns_and_exports(make_backend: MakeBackend, tmp_path: Path) -> None:
    for mode in ({}, {"lora": {"rank": 2}}):
        backend = make_backend(dtype="bfloat16", **mode)
        assert [len(tokens) for tokens in await sample_tokens(backend)] == [10] * 4
        assert np.isfinite(list((await asyncio.to_thread(backend.learn, make_samples(0))).metrics.values())).all()
        assert [len(tokens) for tokens in await sample_tokens(backend)] == [10] * 4
        backend.export(tmp_path / "exported")


def test_saving_again_replaces_the_folder_and_leaves_no_scratch(make_backend: MakeBackend, tmp_path: Path) -> None:
    backend = make_backend()
    for step in range(2):
        backend.save(tmp_path / "checkpoint")
        backend.learn(make_samples(step))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    backend.load(tmp_path / "checkpoint")
    assert backend.engine.info.version == 1


def test_a_checkpoint_that_cannot_be_written_leaves_the_last_one(
    make_backend: MakeBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make_backend()
    backend.save(tmp_path / "checkpoint")
    backend.learn(make_samples(0))

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("lightningrl_torch.checkpoint.torch.save", full)
        with pytest.raises(BackendError, match="No space left on device; nothing of it was kept"):
            backend.save(tmp_path / "checkpoint")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    backend.load(tmp_path / "checkpoint")
    assert backend.engine.info.version == 0


def test_a_checkpoint_that_is_incomplete_is_named(make_backend: MakeBackend, tmp_path: Path) -> None:
    backend = make_backend()
    with pytest.raises(BackendError, match=r"trained\.safetensors is missing"):
        backend.load(tmp_path)
    backend.save(tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "state.pt").write_bytes(b"torn")
    with pytest.raises(BackendError, match="cannot be read"):
        backend.load(tmp_path / "checkpoint")


@pytest.mark.parametrize(
    ("remove", "said"),
    [
        ("config.json", "has no config.json"),
        ("tokenizer*", "has no tokenizer"),
        ("model.safetensors", "the model of policy"),
    ],
)
def test_a_policy_folder_that_lacks_something_is_named(
    make_backend: MakeBackend, policy: str, tmp_path: Path, remove: str, said: str
) -> None:
    folder = tmp_path / "policy"
    shutil.copytree(policy, folder)
    for path in folder.glob(remove):
        path.unlink()
    with pytest.raises(ConfigError, match=said) as caught:
        make_backend(policy=str(folder))
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_named(make_backend: MakeBackend) -> None:
    with pytest.raises(ConfigError, match="torch sees no GPU"):
        make_backend(device="cuda")


def test_the_plugin_is_found_and_says_what_it_takes() -> None:
    plugin = load_plugins().trainers["torch"]
    assert plugin.capabilities is not None
    assert plugin.capabilities.lora
    check_options(plugin.factory, {"learning_rate": 1e-4, "kl_coef": 0.1}, what="backend 'torch'")
    with pytest.raises(ConfigError, match="did you mean 'learning_rate'"):
        check_options(plugin.factory, {"learning_rat": 1e-4}, what="backend 'torch'")
    assert inspect.signature(TorchBackend) == inspect.signature(create_backend)


def test_registering_the_plugin_imports_no_torch() -> None:
    code = "import sys, lightningrl_torch.plugin as p; list(p.lightningrl_trainers()); assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_backend_is_a_backend(make_backend: MakeBackend) -> None:
    backend: Backend = make_backend(name="writer")
    assert backend.engine.info.policy == "writer"


def test_greedy_tokens_count_at_temperature_one(make_backend: MakeBackend) -> None:
    backend = make_backend()
    greedy = make_sample(range(8), [3, 4], temperature=0.0)
    plain = replace(greedy, temperatures=np.ones(10, np.float32))
    one, other = (backend.learner.gradients([sample]) for sample in (greedy, plain))
    assert all(torch.equal(one[name], other[name]) for name in one)


ONE_TEAM = """
import os, random, sys, threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from lightningrl_torch.backend import TorchBackend
from lightningrl_torch.testing import make_sample, plain_logits

def others():
    return len(os.listdir("/proc/self/task")) - threading.active_count()

policy, folder, staleness = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
before, rng = others(), random.Random(0)
words = lambda: [rng.randrange(256) for _ in range(60)]
samples = [make_sample(words(), words(), 1.0, rollout=str(row), weight=0.1, logprobs=[-1.0] * 60) for row in range(2)]
with ThreadPoolExecutor(4) as pool:  # as asyncio.to_thread: another thread each time
    together = threading.Barrier(4)
    threads = [pool.submit(together.wait) for _ in range(4)]
    options = {"policy": policy, "threads": 2, "engine_threads": 1, "max_staleness": staleness, "learning_rate": 0.1}
    backends = [pool.submit(TorchBackend, **options).result() for _ in range(2)]  # two policies of a run
    for round in range(2):
        for backend in backends:
            pool.submit(backend.learn, samples).result()
            pool.submit(backend.save, folder / str(round)).result()
            pool.submit(backend.load, folder / str(round)).result()
    print(others() - before)
for backend in backends:
    backend.close()
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts the process's threads as Linux shows them")
@pytest.mark.parametrize("staleness", [0, 1])
def test_one_thread_of_a_process_alone_has_a_team_of_cpu_threads(policy: str, tmp_path: Path, staleness: int) -> None:
    """More teams than cores have room for ceased to spin, which made a step of a small policy 1.4 times as long."""
    command = [sys.executable, "-c", ONE_TEAM, policy, str(tmp_path / "checkpoint"), str(staleness)]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ran.stdout == "1\n", ran.stdout + ran.stderr
