"""An exported adapter names its base as whoever gets it finds it, and peft loads it by the lines of its README."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_models import save_family
from transformers import AutoModelForCausalLM

from lightningrl_runs.model_files import find_model, read_model
from lightningrl_torch.backend import TorchBackend
from lightningrl_torch.gguf.format import GgufFormat
from lightningrl_torch.testing import make_sample
from lightningrl_training.export import name_base

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft asks for it
PROMPT = (30, 31, 32)


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([PROMPT])).logits
    return found


def test_an_adapter_of_a_model_in_a_package_names_the_package_and_loads_as_its_readme_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    package = tmp_path / "site" / "tiny_llm" / "models"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    save_family("llama", tmp_path / "made")
    GgufFormat().write(tmp_path / "made", package / "tiny.gguf", "f32")
    monkeypatch.syspath_prepend(tmp_path / "site")
    file = find_model("package:tiny_llm", ())
    assert file is not None
    model = str(read_model(file))
    backend = TorchBackend(policy=model, lora={"rank": 4}, learning_rate=3e-2, loss="reinforce", device="cpu")
    try:
        for _ in range(5):
            backend.learn([make_sample(PROMPT, (40, 41))])
        backend.export(tmp_path / "merged", dtype="float32")
        backend.export(tmp_path / "adapter", adapter=True)
    finally:
        backend.close()

    name_base(tmp_path / "adapter", "package:tiny_llm", model)

    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "package:tiny_llm"
    readme = (tmp_path / "adapter" / "README.md").read_text()
    assert str(tmp_path) not in readme, "no folder of this machine"
    (lines,) = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path / "adapter")
    names: dict[str, Any] = {}
    exec(lines, names)  # what the README tells a reader to do
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(names["policy"]), logits(merged), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(logits(merged), logits(AutoModelForCausalLM.from_pretrained(model)), atol=1e-2)


@pytest.mark.parametrize(("base", "is_of_hub"), [("Qwen/Qwen2.5-0.5B-Instruct", True), ("/data/my-model", False)])
def test_an_adapter_of_a_hub_model_or_a_folder_names_that(tmp_path: Path, base: str, is_of_hub: bool) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base, "r": 4}))
    name_base(tmp_path, base, base)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config == {"base_model_name_or_path": base, "r": 4}
    readme = (tmp_path / "README.md").read_text()
    assert f'from_pretrained("{base}")' in readme
    assert (f"\nbase_model: {base}\n" in readme) is is_of_hub, "the hub refuses a base that is none of its names"
