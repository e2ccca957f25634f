"""verl's FSDP2 engine on the CPU, one or more ranks on gloo: prints, as JSON, what five updates did to the rows'
logprobs.

usage: process_engine.py POLICY FOLDER
"""

import json
import os
import socket
import sys
from functools import partial
from typing import Any

with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = str(probe.getsockname()[1])
os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)

import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import AutoModelForCausalLM
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine_workers import TrainingWorker, TrainingWorkerConfig
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

POLICY, FOLDER = sys.argv[1:]
PROMPTS, RESPONSES, ADVANTAGES = (5, 7, 4, 6), (6, 3, 5, 4), (1.0, -1.0, 1.0, -1.0)


def make_worker() -> Any:
    precision = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    attention = {"attn_implementation": "sdpa"}
    model = HFModelConfig(
        path=POLICY, use_remove_padding=False, enable_gradient_checkpointing=False, override_config=attention
    )
    engine = FSDPEngineConfig(
        strategy="fsdp2",
        use_torch_compile=False,
        model_dtype="fp32",
        mixed_precision=precision,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=2,
        infer_micro_batch_size_per_gpu=2,
        max_token_len_per_gpu=4096,
        infer_max_token_len_per_gpu=4096,
    )
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=model,
            engine_config=engine,
            optimizer_config=FSDPOptimizerConfig(lr=5e-3, total_training_steps=10, lr_warmup_steps=0, weight_decay=0.0),
            checkpoint_config=CheckpointConfig(),
            profiler_config=None,
        )
    )
    worker.reset()
    actor = FSDPActorConfig(
        strategy="fsdp2",
        ppo_mini_batch_size=4,
        ppo_micro_batch_size_per_gpu=2,
        rollout_n=1,
        use_dynamic_bsz=False,
        loss_agg_mode="token-mean",
        entropy_coeff=0.0,
    )
    worker.set_loss_fn(partial(ppo_loss, config=actor))
    return worker


def nest(rows: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


torch.manual_seed(1)
prompts = [torch.randint(0, 250, (length,)) for length in PROMPTS]
responses = [torch.randint(0, 250, (length,)) for length in RESPONSES]


def make_rows(**extra: Tensor) -> TensorDict:
    ids = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    ones = nest([torch.ones(length, dtype=torch.int64) for length in RESPONSES])
    rows = TensorDict(
        {
            "prompts": nest(prompts),
            "responses": nest(responses),
            "input_ids": nest(ids),
            "position_ids": nest([torch.arange(len(row)) for row in ids]),
            "response_mask": ones,
            "loss_mask": ones,
            "advantages": nest(
                [torch.full((length,), value) for length, value in zip(RESPONSES, ADVANTAGES, strict=True)]
            ),
            **extra,
        },
        batch_size=4,
    )
    tu.assign_non_tensor(rows, temperature=1.0, calculate_entropy=True, compute_loss=False)
    return rows


def logprobs(worker: Any) -> list[Tensor]:
    rows = make_rows()
    padded = no_padding_2_padding(tu.get(worker.infer_batch(rows), "log_probs"), rows)
    return [padded[row, :length].clone() for row, length in enumerate(RESPONSES)]


def update(worker: Any) -> None:
    rows = make_rows(old_log_probs=nest(logprobs(worker)))
    options = {
        "global_batch_size": 4,
        "mini_batch_size": 4,
        "epochs": 1,
        "seed": 42,
        "dataloader_kwargs": {"shuffle": False},
    }
    tu.assign_non_tensor(rows, compute_loss=True, **options)
    worker.train_mini_batch(rows)


def gap_to_transformers(values: list[Tensor]) -> float:
    model = AutoModelForCausalLM.from_pretrained(POLICY)
    gaps = []
    with torch.no_grad():
        for prompt, response, value in zip(prompts, responses, values, strict=True):
            logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
            gaps.append((logits.log_softmax(-1).gather(1, response[:, None])[:, 0] - value).abs().max().item())
    return float(max(gaps))


worker = make_worker()
first = logprobs(worker)
for _ in range(5):
    update(worker)
trained = logprobs(worker)
worker.save_checkpoint(FOLDER, global_step=5)
update(worker)
moved = logprobs(worker)
worker.load_checkpoint(FOLDER)
restored = logprobs(worker)
print(
    json.dumps(
        {
            "gap": gap_to_transformers(first),
            "advantages": ADVANTAGES,
            "changes": [(after - before).mean().item() for before, after in zip(first, trained, strict=True)],
            "moved": max((a - b).abs().max().item() for a, b in zip(moved, trained, strict=True)),
            "restored": max((a - b).abs().max().item() for a, b in zip(restored, trained, strict=True)),
        }
    )
)
