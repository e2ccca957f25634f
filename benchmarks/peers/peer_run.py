"""What a job of TRL's has besides its tasks and its reward: settings, a line for each step, accuracy at both ends.

OUT/metrics.jsonl has lines as a run of ours has: `{"step": 1}`, and `validation/reward` before the first step and after
the last. Settings are the recipe's; where TRL leaves a choice it is the quicker one (no checkpointing of gradients, one
forward of all 128 rows).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["row_of", "train"]

GROUP, TASKS_PER_STEP = 8, 16


def row_of(task: Mapping[str, Any], prompt: str) -> dict[str, Any]:
    """A task of ours as a row of TRL's data set."""
    inputs = task["input"] if isinstance(task["input"], dict) else {}
    return {"prompt": [{"role": "user", "content": prompt}], "answer": task["answer"], **inputs}


def train(
    model: Path,
    rows: Sequence[Mapping[str, Any]],
    held_out: Sequence[Mapping[str, Any]],
    reward: Callable[..., list[float]],
    *,
    most_tokens: int,
    **more: Any,
) -> None:
    """`more` goes to the trainer: an environment, a tokenizer."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    lines = (options.out / "metrics.jsonl").open("w")

    def write(**figures: float) -> None:
        print(json.dumps(figures), file=lines, flush=True)

    class Steps(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            write(step=state.global_step)

    tokenizer = more.pop("processing_class", None) or AutoTokenizer.from_pretrained(model)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        processing_class=tokenizer,
        reward_funcs=reward,
        train_dataset=Dataset.from_list([dict(row) for row in rows]),
        eval_dataset=Dataset.from_list([dict(row) for row in held_out]),
        callbacks=[Steps()],
        args=GRPOConfig(
            output_dir=str(options.out),
            max_steps=options.steps,
            seed=options.seed,
            per_device_train_batch_size=GROUP * TASKS_PER_STEP,
            num_generations=GROUP,
            num_generations_eval=1,
            per_device_eval_batch_size=32,  # 160 held-out tasks: batches of one size, so that their mean is the mean
            max_completion_length=most_tokens,
            temperature=1.0,
            loss_type="dr_grpo",
            scale_rewards="none",
            beta=0.0,
            learning_rate=4e-4,
            adam_beta1=0.9,
            adam_beta2=0.99,
            weight_decay=0.0,
            max_grad_norm=1.0,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=3,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
            logging_steps=10,
            disable_tqdm=True,
        ),
        **more,
    )

    def validate(step: int) -> None:
        """Greedy, as ours does."""
        configured, trainer.generation_config.do_sample = trainer.generation_config.do_sample, False
        figures = trainer.evaluate()
        trainer.generation_config.do_sample = configured
        write(step=step, **{"validation/reward": figures["eval_reward"]})

    validate(0)
    trainer.train()
    validate(options.steps)
