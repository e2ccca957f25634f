"""A small policy is served before transformers is imported, and learned from afterwards: the same weights, tokens and
folders."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sizes import PATIENCE_S
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightningrl_torch import policy as policy_module
from lightningrl_torch.backend import TorchBackend
from lightningrl_torch.light import read_light
from lightningrl_torch.policy import LoadedPolicy
from lightningrl_torch.settings import Settings
from lightningrl_torch.testing import make_sample, save_policy

CPU = torch.device("cpu")
SERVES = """
import asyncio, sys
from pathlib import Path
from lightningrl.backends import GenerateRequest
from lightningrl.types import SamplingSettings
from lightningrl_torch.backend import TorchBackend

async def answer(engine):
    request = GenerateRequest(id="1", prompt_ids=(1, 2, 3), sampling=SamplingSettings(max_tokens=4, seed=3))
    return [token for chunk in [chunk async for chunk in engine.generate(request)] for token in chunk.token_ids]

backend = TorchBackend(policy=sys.argv[1])
assert len(asyncio.run(answer(backend.engine))) == 4
backend.save(Path(sys.argv[2]))
assert not {"transformers", "torch._dynamo"} & set(sys.modules)
"""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_policy(tmp_path_factory.mktemp("policy") / "policy")


def test_an_engine_answers_and_is_saved_without_transformers(policy: str, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", SERVES, policy, str(tmp_path / "checkpoint")], check=True, timeout=PATIENCE_S)


def test_what_is_read_is_what_transformers_reads(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    light = LoadedPolicy(Settings(policy=policy, device="cpu"))
    monkeypatch.setattr(policy_module, "read_light", lambda *_: None)
    whole = LoadedPolicy(Settings(policy=policy, device="cpu"))
    assert light.light is not None
    assert (light.context_length, light.stop_token_ids) == (whole.context_length, whole.stop_token_ids)
    assert light.text_of((72, 105, 256)) == whole.text_of((72, 105, 256))
    theirs = dict(whole.model.named_parameters())
    assert theirs.keys() == light.light.parameters.keys()
    assert all(torch.equal(one, theirs[name]) for name, one in light.light.parameters.items())


def test_what_the_learner_changes_is_what_the_engine_reads(policy: str) -> None:
    backend = TorchBackend(policy=policy, device="cpu", learning_rate=0.1)
    light = backend._policy.light
    assert light is not None
    with torch.no_grad():
        assert all(one.requires_grad for one in backend.learner.parameters.values())
    before = {name: one.detach().clone() for name, one in light.parameters.items()}
    backend.learn([make_sample((1, 2, 3), (4, 5))])
    learned = backend.learner.parameters
    assert learned.keys() == light.parameters.keys()
    for name, one in light.parameters.items():
        assert torch.equal(one, learned[name])
        assert not torch.equal(one, before[name])
    backend.close()


def test_a_checkpoint_is_exported_without_a_learner(policy: str, tmp_path: Path) -> None:
    trained = TorchBackend(policy=policy, device="cpu", learning_rate=0.1)
    trained.learn([make_sample((1, 2, 3), (4, 5))])
    trained.save(tmp_path / "checkpoint")
    backend = TorchBackend(policy=policy, device="cpu", learning_rate=0.1)
    backend.load(tmp_path / "checkpoint")
    backend.export(tmp_path / "exported")
    assert backend._built is None
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert all(torch.equal(one, trained.learner.parameters[name]) for name, one in exported.named_parameters())
    assert AutoTokenizer.from_pretrained(tmp_path / "exported").chat_template

    # a learner that comes up later goes on where the checkpoint's was
    for one in (trained, backend):
        one.learn([make_sample((7, 8, 9), (4, 5))])
        one.close()
    assert backend.learner.step == 2
    assert all(torch.equal(one, trained.learner.parameters[name]) for name, one in backend.learner.parameters.items())


def test_a_checkpoint_from_before_there_was_a_learner_is_where_learning_begins(policy: str, tmp_path: Path) -> None:
    """Also for a backend that has learned meanwhile: weights, momentum and order of minibatches are a new one's."""
    first, again = (TorchBackend(policy=policy, device="cpu", learning_rate=0.1, minibatches=2) for _ in range(2))
    first.save(tmp_path / "checkpoint")
    assert first._built is None
    rows = [make_sample((7, 8, 9), (4, 5)), make_sample((1, 2), (3, 6)), make_sample((1, 3), (2, 6))]
    for _ in range(2):
        again.learn(rows)
    again.load(tmp_path / "checkpoint")
    assert again.engine.info.version == 0
    for one in (first, again):
        one.learn(rows)
        one.close()
    assert again.learner.step == 1
    assert all(torch.equal(one, first.learner.parameters[name]) for name, one in again.learner.parameters.items())


@pytest.mark.parametrize(
    "changed",
    [
        {"model_type": "mistral"},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0}},
        {"layer_types": ["sliding_attention", "full_attention"]},
        {"num_key_value_heads": None},
        {"num_hidden_layers": "2"},
        {"num_hidden_layers": 1},
        {"tie_word_embeddings": False},
    ],
)
def test_anything_special_is_left_to_transformers(changed: dict[str, object], tmp_path: Path) -> None:
    folder = Path(save_policy(tmp_path / "policy"))
    assert read_light(folder, CPU) is not None
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changed))
    assert read_light(folder, CPU) is None


def test_weights_cut_short_are_left_to_transformers(tmp_path: Path) -> None:
    folder = Path(save_policy(tmp_path / "policy"))
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-100])
    assert read_light(folder, CPU) is None
