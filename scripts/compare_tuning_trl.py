"""TRL's side of compare_tuning.py: steps of its trainers on FOLDER/METHOD.jsonl. Runs in TRL's environment.

    … scripts/compare_tuning_trl.py FOLDER sft dpo                     FOLDER/sft.trl.{json,safetensors}, and so on
    … scripts/compare_tuning_trl.py FOLDER sft --steps 5 --batch 8     CPU seconds of each step, when asked

Settings are TRL's defaults but for the machine's (CPU, float32) and, where TRL leaves a choice, the quicker one: no
checkpointing of gradients. Nothing of TRL is replaced: loss, tokens and gradient are read where it hands them on.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any


def read_rows(path: Path) -> Any:
    """The rows as TRL's data set; of sft only the last message is trained, so it is the completion."""
    from datasets import Dataset

    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        if "messages" in row:
            *row["prompt"], last = row.pop("messages")
            row["completion"] = [last]
        tools = row.pop("tools", None)
        row["tools"] = json.dumps(tools) if tools else None
    return Dataset.from_list(rows)


def build(method: str, rows: Any, callback: Any, options: argparse.Namespace) -> Any:
    """TRL's trainer, which keeps each batch and its loss in `seen`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer

    kinds = {"sft": (SFTConfig, SFTTrainer), "dpo": (DPOConfig, DPOTrainer), "kto": (KTOConfig, KTOTrainer)}
    config, kind = kinds[method]

    class Watched(kind):  # type: ignore[misc,valid-type]
        seen: list[tuple[dict[str, Any], float]]

        def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
            batch = dict(inputs)
            result = super().compute_loss(model, inputs, *arguments, **named)
            loss = result[0] if isinstance(result, tuple) else result
            self.seen.append((batch, float(loss.detach())))
            return result

    def load(name: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(options.folder / name, dtype=torch.float32)

    settings: dict[str, Any] = {} if method == "sft" else {"beta": options.beta}
    models: dict[str, Any] = {} if method == "sft" else {"ref_model": load("start")}
    trainer = Watched(
        model=load("policy"),
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(options.folder / "policy"),
        callbacks=[callback],
        args=config(
            output_dir=str(options.folder / "out"),
            max_steps=options.steps,
            per_device_train_batch_size=options.batch or len(rows),
            gradient_accumulation_steps=1,
            gradient_checkpointing=False,
            max_grad_norm=0.0,
            bf16=False,
            use_cpu=True,
            dataloader_pin_memory=False,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **settings,
        ),
        **models,
    )
    trainer.seen = []
    return trainer


def texts(method: str, batch: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
    """Token ids and mask of each row of a batch, without padding."""
    told = []
    for number, real in enumerate(batch["attention_mask"].bool()):
        ids = batch["input_ids"][number][real].tolist()
        if method == "sft":
            mask = (batch["labels"][number][real] != -100).long().tolist()
        else:
            mask = batch["completion_mask"][number][real].tolist()
        told.append((ids, mask))
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("methods", nargs="+", choices=["sft", "dpo", "kto"])
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--batch", type=int, default=0)
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    for method in options.methods:
        run(method, options)


def run(method: str, options: argparse.Namespace) -> None:
    """Train; without `--batch` one step on all rows, whose tokens, loss and gradient are written."""
    from safetensors.torch import save_file
    from transformers import TrainerCallback

    place = options.folder / f"{method}.trl"

    class Gradients(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            parameters = named["model"].named_parameters()
            weights = [(name, weight) for name, weight in parameters if weight.grad is not None]
            save_file({name: weight.grad.clone() for name, weight in weights}, f"{place}.safetensors")

    class Clock(TrainerCallback):
        began = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            sys.stdin.readline()
            self.began = time.process_time()

        def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            print(time.process_time() - self.began, file=clock, flush=True)

    clock, sys.stdout = sys.stdout, sys.stderr  # what TRL prints is no figure
    rows = read_rows(options.folder / f"{method}.jsonl")
    trainer = build(method, rows, Clock() if options.batch else Gradients(), options)
    trainer.train()
    if not options.batch:
        batch, loss = trainer.seen[0]
        told = {"loss": loss, "rows": texts(method, batch)}
        Path(f"{place}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
