"""Exports ask, sample and stop as the run did, in each form, and `--check` finds where one would not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader
from gguf_models import TEMPLATE, save_family
from llama_cpp import running
from transformers import AutoModelForCausalLM, AutoTokenizer
from warm import WarmCommand

import lightningrl
from lightningrl_server.rendering.renderer import PolicyRenderer
from lightningrl_training.export_check import check_export

pytestmark = pytest.mark.slow
SWITCHES = {"enable_thinking": False, "persona": 'a "short" one'}
END = (
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- 'think not ' }}{%- endif %}"
    "{%- if persona %}{{- persona }}{%- endif %}{%- endif %}"
)
SETTINGS = {
    "loop": {"steps": 1, "tasks_per_step": 2, "group_size": 4},
    "validation": {"every": 1, "tasks": 6, "sampling": {"max_tokens": 12, "temperature": 0.0}},
    "sampling": {"max_tokens": 12, "temperature": 0.9, "top_k": 50},
    "runtime.workers": 1,
    "policy.chat_template_kwargs": SWITCHES,
}


@pytest.fixture(scope="module")
def run(first_agent: Path, tmp_path_factory: pytest.TempPathFactory) -> lightningrl.Run:
    """A run whose model thinks where nobody says otherwise, and whose folder samples in its own way."""
    folder = tmp_path_factory.mktemp("exported") / "first"
    shutil.copytree(first_agent, folder)
    starter = folder / "starter"
    template = starter / "chat_template.jinja"
    text = template.read_text(encoding="utf-8")
    template.write_text(text[: text.index("{%- if add_generation_prompt")] + END, encoding="utf-8")
    generation = json.loads((starter / "generation_config.json").read_text(encoding="utf-8"))
    (starter / "generation_config.json").write_text(
        json.dumps({**generation, "do_sample": True, "temperature": 0.6, "top_k": 20, "repetition_penalty": 1.5})
    )
    (folder / "reward.py").write_text(
        "def right(task, output, trajectory) -> float:\n    return float(len(output) % 2)\n"
    )
    return lightningrl.train(folder, run=folder / "runs" / "a", settings=SETTINGS)


def own_renderer(run: lightningrl.Run) -> PolicyRenderer:
    return PolicyRenderer(run.folder.parents[1] / "starter", template_kwargs=SWITCHES)


MESSAGES = [{"role": "user", "content": "hi"}]


def test_a_folder_asks_and_samples_as_the_run(run: lightningrl.Run, tmp_path: Path) -> None:
    run.export(tmp_path / "weights", check=4)
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "weights")
    wanted = own_renderer(run).render(MESSAGES, None)
    assert tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False) == list(wanted)
    assert "think not " in tokenizer.decode(wanted), "the switch changes the prompt"
    asked = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False, enable_thinking=True)
    assert "think not " not in asked, "a caller can still ask otherwise"
    generation = json.loads((tmp_path / "weights" / "generation_config.json").read_text())
    assert {
        name: generation.get(name) for name in ("do_sample", "temperature", "top_p", "top_k", "max_new_tokens")
    } == {
        "do_sample": True,
        "temperature": 0.9,
        "top_p": 1.0,
        "top_k": 50,
        "max_new_tokens": 12,
    }
    assert "repetition_penalty" not in generation and generation["eos_token_id"] is not None
    card = (tmp_path / "weights" / "README.md").read_text()
    assert "temperature 0.9, top-p 1, top-k 50" in card and "`enable_thinking = false`" in card


async def test_a_notebook_whose_event_loop_runs_can_check_too(run: lightningrl.Run, tmp_path: Path) -> None:
    assert run.export(tmp_path / "weights", check=1) in (0, 1)


def test_the_next_run_can_begin_from_it(run: lightningrl.Run, tmp_path: Path) -> None:
    run.export(tmp_path / "weights")
    again = PolicyRenderer(tmp_path / "weights", template_kwargs=SWITCHES)
    assert again.render(MESSAGES, None) == own_renderer(run).render(MESSAGES, None)


def test_a_gguf_file_asks_and_samples_as_the_run(run: lightningrl.Run, tmp_path: Path, warm: WarmCommand) -> None:
    folder = run.folder.parents[1]  # the starter's tokenizer is none of those that llama.cpp has
    save_family("llama", tmp_path / "llama")
    (tmp_path / "llama" / "chat_template.jinja").write_text(TEMPLATE.split("{% if add_gen")[0] + END, encoding="utf-8")
    mine = lightningrl.train(
        folder, run=tmp_path / "run", settings={**SETTINGS, "policy.model": str(tmp_path / "llama")}
    )
    words = ("--run", str(mine.folder), "--gguf", "f32", "--check", "4")
    ran = warm.run("lightningrl", "export", "model.gguf", *words, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "the validation calls, asked again of llama.cpp, are answered as the run did" in " ".join(ran.stdout.split())
    fields = GGUFReader(tmp_path / "model.gguf").fields
    sampling = [fields[f"general.sampling.{name}"].contents() for name in ("temp", "top_p", "top_k")]
    assert sampling == [pytest.approx(0.9), 1.0, 50]
    with running(tmp_path / "model.gguf") as server:
        written = server.apply_template(MESSAGES)
    renderer = PolicyRenderer(tmp_path / "llama", template_kwargs=SWITCHES)
    assert written == renderer.decode(renderer.render(MESSAGES, None)) and "think not " in written


def test_other_weights_are_found_at_the_first_token_that_differs(run: lightningrl.Run, tmp_path: Path) -> None:
    step = run.export(tmp_path / "weights")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "weights")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.5)
    model.save_pretrained(tmp_path / "weights")
    asked: dict[str, Any] = {"policy": "policy", "step": step, "count": 4, "renderer": own_renderer(run), "base": None}
    with pytest.raises(
        lightningrl.LightningError, match=r"call \S+: token \d+ of its answer is .+, where the run said"
    ):
        check_export(run.folder, tmp_path / "weights", **asked)


def test_another_template_is_found_at_the_first_token_that_differs(run: lightningrl.Run, tmp_path: Path) -> None:
    step = run.export(tmp_path / "weights")
    template = tmp_path / "weights" / "chat_template.jinja"
    template.write_text(template.read_text().replace("think not ", ""))
    asked: dict[str, Any] = {"policy": "policy", "step": step, "count": 1, "renderer": own_renderer(run), "base": None}
    with pytest.raises(lightningrl.LightningError, match=r"the prompt of .*: token \d+ is .+, where the run had"):
        check_export(run.folder, tmp_path / "weights", **asked)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft asks for it
def test_an_adapter_has_the_template_the_sampling_and_the_stops(run: lightningrl.Run, tmp_path: Path) -> None:
    folder = run.folder.parents[1]
    settings = {**SETTINGS, "learner": {"lora": {"rank": 4}, "learning_rate": 1e-3}}
    lora = lightningrl.train(folder, run=folder / "runs" / "lora", settings=settings)
    lora.export(tmp_path / "adapter", adapter=True, check=2)
    assert "set enable_thinking = False" in (tmp_path / "adapter" / "chat_template.jinja").read_text()
    assert json.loads((tmp_path / "adapter" / "generation_config.json").read_text())["top_k"] == 50
    assert "temperature 0.9" in (tmp_path / "adapter" / "README.md").read_text()


def test_a_step_that_was_not_validated_cannot_be_checked(run: lightningrl.Run, tmp_path: Path) -> None:
    folder = run.folder.parents[1]
    blind = lightningrl.train(folder, run=folder / "runs" / "blind", settings={**SETTINGS, "validation.every": 0})
    with pytest.raises(lightningrl.ConfigError, match=r"has no greedy call .* from after step 1, .* leave out --check"):
        blind.export(tmp_path / "weights", check=2)
