"""The jobs for TRL's GRPOTrainer: the prompts that the agents would send, the same rewards. Runs in TRL's environment.

    .peers/trl/bin/python benchmarks/peers/trl_jobs.py pretrained_call OUT --steps 40 --seed 0

OUT/metrics.jsonl has lines as a run of ours has: `{"step": 1}`, and `validation/reward` before the first step, every
few steps and after the last; and a line with what TRL logs of the step. Settings are the recipe's; where TRL leaves a
choice it is the quicker one (no checkpointing of gradients, as many rows in a forward as memory holds). TRL's defaults
are the recipe's for what is not said.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parents[1]
SMOLLM2: Final = ROOT / ".peers/smollm2"
HERMES: Final = ROOT / "packages/server/src/lightningrl_server/rendering/chat_templates/hermes.jinja"
GROUP, WARM_UP = 8, 3
LOGGED: Final = (
    *("reward", "grad_norm", "learning_rate", "frac_reward_zero_std", "entropy"),
    *("completions/mean_length", "completions/clipped_ratio", "tools/call_frequency", "tools/failure_frequency"),
)
"""What tells why a run learns or falls, by TRL's names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Tasks, prompt and reward of a job."""

    train: Iterable[Mapping[str, Any]]
    held_out: Iterable[Mapping[str, Any]]
    """Tasks of ours."""
    prompt: Callable[[Any], list[dict[str, Any]]]
    """Messages, from a task's input."""
    reward: Callable[..., list[float]]
    most_tokens: int
    tasks_per_step: int
    batch: int
    """Rows of a forward."""
    model: Path = SMOLLM2
    learning_rate: float = 2e-5
    temperature: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Arguments of the trainer: an environment, a tokenizer."""

    def rows(self, tasks: Iterable[Mapping[str, Any]]) -> Any:
        """Tasks as TRL's data set."""
        from datasets import Dataset

        return Dataset.from_list(
            [
                {
                    "prompt": self.prompt(task["input"]),
                    "answer": task["answer"],
                    **(task["input"] if isinstance(task["input"], Mapping) else {}),
                }
                for task in tasks
            ]
        )


def two_tools() -> Job:
    sys.path.insert(0, str(HERE / "two_tools"))
    from store_room import TOOLS, StoreRoom, held_out_tasks, prompt, train_tasks
    from transformers import AutoTokenizer
    from transformers.utils.chat_template_utils import get_json_schema
    from trl.chat_template_utils import qwen3_template

    def right(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        return [
            float(str(messages[-1].get("content", "")).strip() == number)
            for messages, number in zip(completions, answer, strict=True)
        ]

    room = StoreRoom()
    if [get_json_schema(tool) for tool in (room.find, room.how_many)] != TOOLS:
        raise SystemExit("TRL reads other descriptions off StoreRoom than the agent sends; write them alike")
    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2)
    tokenizer.chat_template = HERMES.read_text()
    tokenizer.response_template = qwen3_template  # the same markup, which TRL knows by the template's text
    return Job(
        train=train_tasks(),
        held_out=held_out_tasks(),
        prompt=lambda task: prompt(task["question"]),
        reward=right,
        most_tokens=160,  # of all turns, with what the tools said
        tasks_per_step=2,
        batch=8,
        temperature=0.5,
        options={"processing_class": tokenizer, "environment_factory": StoreRoom},
    )


def pretrained_call() -> Job:
    sys.path.insert(0, str(HERE / "pretrained_call"))
    from calculation_agent import prompt, value_of
    from sums import train, validation

    def right(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        return [
            float(value_of(said[-1]["content"]) == wanted) for said, wanted in zip(completions, answer, strict=True)
        ]

    return Job(
        train=train(),
        held_out=validation(),
        prompt=prompt,
        reward=right,
        most_tokens=32,
        tasks_per_step=8,
        batch=8,  # 129 s a step; 16 rows: 142, 32: 147 and 21 GB
    )


def train(job: Job, out: Path, steps: int, seed: int, every: int | None = None) -> None:
    """`every`: validate after so many steps, too."""
    import torch
    from torch.optim.lr_scheduler import LambdaLR
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    out.mkdir(parents=True, exist_ok=True)
    lines = (out / "metrics.jsonl").open("w")

    def write(**figures: float) -> None:
        print(json.dumps(figures), file=lines, flush=True)

    class Steps(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            write(step=state.global_step)
            if every and state.global_step % every == 0 and state.global_step < steps:
                validate(state.global_step)

        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            logs = kwargs["logs"]
            if "reward" in logs:  # of a training step, not of a validation
                write(step=state.global_step, **{name: logs[name] for name in LOGGED if name in logs})

    class Trainer(GRPOTrainer):  # type: ignore[misc]
        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            """Warm up as ours does: transformers' own would take the first step at a learning rate of 0."""
            self.lr_scheduler = LambdaLR(optimizer or self.optimizer, lambda step: min(1.0, (step + 1) / WARM_UP))
            return self.lr_scheduler

    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32),
        reward_funcs=job.reward,
        train_dataset=job.rows(job.train),
        eval_dataset=job.rows(job.held_out),
        callbacks=[Steps()],
        args=GRPOConfig(
            output_dir=str(out),
            max_steps=steps,
            seed=seed,
            per_device_train_batch_size=job.batch,
            gradient_accumulation_steps=GROUP * job.tasks_per_step // job.batch,
            num_generations=GROUP,
            num_generations_eval=1,
            per_device_eval_batch_size=20,  # of 160, 80 or 40 held-out tasks: batches of one size
            max_completion_length=job.most_tokens,
            loss_type="dr_grpo",
            scale_rewards="none",
            learning_rate=job.learning_rate,
            adam_beta2=0.99,
            temperature=job.temperature,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            save_strategy="no",
            logging_steps=1,
            report_to="none",
        ),
        **{"processing_class": AutoTokenizer.from_pretrained(job.model), **job.options},
    )

    def validate(step: int) -> None:
        """Greedy, as ours does."""
        configured, trainer.generation_config.do_sample = trainer.generation_config.do_sample, False
        figures = trainer.evaluate()
        trainer.generation_config.do_sample = configured
        trainer.model.train()  # else TRL files what it logs of the step under validation
        write(step=step, **{"validation/reward": figures["eval_reward"]})

    validate(0)
    trainer.train()
    validate(steps)


def main() -> None:
    jobs = {job.__name__: job for job in (two_tools, pretrained_call)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=jobs)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, help="validate after so many steps, too")
    parser.add_argument("--batch", type=int, help="rows of a forward; the job's own if not said")
    options = parser.parse_args()
    job = jobs[options.job]()
    train(replace(job, batch=options.batch or job.batch), options.out, options.steps, options.seed, options.every)


if __name__ == "__main__":
    main()
