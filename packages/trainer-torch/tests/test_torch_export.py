"""An exported folder is the policy that was served: logits, greedy text, where it stops, its dtype."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightningrl.backends import GenerateRequest
from lightningrl.errors import BackendError
from lightningrl.types import SamplingSettings
from lightningrl_torch import policy as policy_module
from lightningrl_torch.backend import TorchBackend
from lightningrl_torch.testing import make_model, make_sample, make_tokenizer, plain_logits
from lightningrl_training.export import name_stops, stop_tokens

MakeBackend = Callable[..., TorchBackend]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PROMPT = (3, 1, 4, 1, 5, 9)
LORA = {"lora": {"rank": 4}}
HEAD = {"lora": {"rank": 4, "target_modules": ["q_proj", "lm_head"]}}
EMBEDDING = {"lora": {"rank": 4, "target_modules": ["v_proj", "embed_tokens"]}}


def save_base(folder: Path, *, tied: bool = True, dtype: torch.dtype = torch.float32) -> str:
    """A base model: its end of text is `<|end|>`, as in Qwen2.5; its chat template closes with a token of its own."""
    torch.nn.Module.to(make_model(tie_word_embeddings=tied), dtype).save_pretrained(folder)
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    return str(folder)


def train(backend: TorchBackend, closing: int) -> None:
    for _ in range(30):
        backend.learn([make_sample(PROMPT, (40, closing)), make_sample(PROMPT, (40, 40), -0.5)])


def export(backend: TorchBackend, policy: str, folder: Path, **options: Any) -> Any:
    """As `Run.export` does, then read by plain transformers."""
    backend.export(folder, **options)
    name_stops(folder, stop_tokens(policy, "auto", name="policy"))
    return AutoModelForCausalLM.from_pretrained(folder)


def served_text(backend: TorchBackend, stops: tuple[int, ...], most: int = 20) -> list[int]:
    async def answer() -> list[int]:
        sampling = SamplingSettings(temperature=0.0, max_tokens=most, stop_token_ids=stops)
        request = GenerateRequest(id="1", prompt_ids=PROMPT, sampling=sampling)
        return [
            token for chunk in [chunk async for chunk in backend.engine.generate(request)] for token in chunk.token_ids
        ]

    return asyncio.run(answer())


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    ("mode", "is_light"),
    [({}, True), ({}, False), (LORA, False), (HEAD, False), (EMBEDDING, False)],
    ids=["light", "full", "lora", "head", "embedding"],
)
def test_an_exported_folder_says_and_stops_as_the_policy_that_was_served(
    make_backend: MakeBackend,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tied: bool,
    mode: dict[str, Any],
    is_light: bool,
) -> None:
    policy = save_base(tmp_path / "policy", tied=tied)
    if not is_light:
        monkeypatch.setattr(policy_module, "read_light", lambda *_: None)
    backend = make_backend(policy=policy, learning_rate=3e-2, loss="reinforce", **mode)
    closing = int(AutoTokenizer.from_pretrained(policy).convert_tokens_to_ids("<|im_end|>"))  # type: ignore[arg-type]
    train(backend, closing)
    assert (backend._policy.light is not None) is is_light
    model = export(backend, policy, tmp_path / "exported")
    ids = [*PROMPT, 40, 41, 7, 8]
    with torch.no_grad():
        served_logits = plain_logits(backend.learner.model, ids)
        torch.testing.assert_close(plain_logits(model, ids), served_logits, atol=1e-4, rtol=1e-4)
    served = served_text(backend, stop_tokens(policy, "auto", name="policy"))
    assert served[-1] == closing and len(served) < 20, "the policy has learned to stop where its template closes"
    said = model.generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=20)[0, len(PROMPT) :].tolist()
    assert said == served


@pytest.mark.parametrize("says", [True, False], ids=["said", "unsaid"])
@pytest.mark.parametrize(
    ("mode", "is_light"),
    [({}, True), ({}, False), (LORA, False), ({**LORA, "dtype": "bfloat16"}, False)],
    ids=["light", "full", "lora", "half"],
)
def test_a_policy_is_exported_in_its_own_dtype_or_in_the_one_asked_for(
    make_backend: MakeBackend,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    says: bool,
    mode: dict[str, Any],
    is_light: bool,
) -> None:
    policy = Path(save_base(tmp_path / "policy", dtype=torch.bfloat16))
    if not says:
        config = json.loads((policy / "config.json").read_text())
        (policy / "config.json").write_text(
            json.dumps({name: value for name, value in config.items() if name != "dtype"})
        )
    if not is_light:
        monkeypatch.setattr(policy_module, "read_light", lambda *_: None)
    backend = make_backend(policy=str(policy), **mode)
    backend.learn([make_sample(PROMPT, (40, 41))])
    model = export(backend, str(policy), tmp_path / "own")
    assert {weight.dtype for weight in model.state_dict().values()} == {torch.bfloat16}
    whole = export(backend, str(policy), tmp_path / "whole", dtype="float32")
    assert {weight.dtype for weight in whole.state_dict().values()} == {torch.float32}
    with torch.no_grad():
        if mode.get("dtype") != "bfloat16":
            served = plain_logits(backend.learner.model, PROMPT)
            torch.testing.assert_close(plain_logits(whole, PROMPT), served, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(plain_logits(whole, PROMPT), plain_logits(model.float(), PROMPT), atol=0.2, rtol=0.1)
    half = export(backend, str(policy), tmp_path / "half", dtype="float16")
    assert {weight.dtype for weight in half.state_dict().values()} == {torch.float16}
    size = {name: (tmp_path / name / "model.safetensors").stat().st_size for name in ("own", "whole", "half")}
    assert size["own"] < 0.6 * size["whole"] and size["half"] < 0.6 * size["whole"]


def test_a_dtype_that_cannot_hold_the_weights_is_refused_and_leaves_nothing(
    make_backend: MakeBackend, tmp_path: Path
) -> None:
    backend = make_backend()
    with pytest.raises(BackendError, match="weights cannot be written as 'int8'; choose float32, bfloat16, float16"):
        backend.export(tmp_path / "exported", dtype="int8")
    with torch.no_grad():
        next(iter(backend.learner.parameters.values()))[0] = 1e6
    with pytest.raises(BackendError, match=r"goes beyond what float16 can hold \(1e\+06\); export it as bfloat16"):
        backend.export(tmp_path / "exported", dtype="float16")
    assert not (tmp_path / "exported").exists()


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft asks for it
def test_an_adapter_on_its_base_model_is_what_the_merged_folder_is(make_backend: MakeBackend, tmp_path: Path) -> None:
    from peft import PeftModel

    base = save_base(tmp_path / "base")
    backend = make_backend(policy=base, **LORA)
    train(backend, closing=7)
    merged = export(backend, base, tmp_path / "merged")
    backend.export(tmp_path / "adapter", adapter=True)
    loaded: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")
    with torch.inference_mode():
        ids = torch.tensor([PROMPT])
        assert torch.allclose(loaded(ids).logits, merged(ids).logits, atol=1e-4)


def test_no_adapter_is_written_where_all_weights_learned(make_backend: MakeBackend, tmp_path: Path) -> None:
    backend = make_backend(policy=save_base(tmp_path / "base"))
    with pytest.raises(BackendError, match="there is no adapter; export it without --adapter"):
        backend.export(tmp_path / "adapter", adapter=True)
    assert not (tmp_path / "adapter").exists()
