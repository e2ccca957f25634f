"""The gradient of the same samples on both backends, printed as JSON: cosine and length ratio, for rows as they are and
rows gone wrong.

usage: process_agreement.py POLICY LOSS
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

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import AutoModelForCausalLM
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, PolicyLossConfig
from verl.workers.engine_workers import TrainingWorker, TrainingWorkerConfig
from verl.workers.utils.losses import ppo_loss

from lightningrl.types import Sample, TrajectoryGroup
from lightningrl_credit.samples import build_samples
from lightningrl_testing.groups import make_trajectory, make_transition
from lightningrl_torch.learner import Before, Learner
from lightningrl_torch.settings import Settings as TorchSettings
from lightningrl_verl.rows import build_rows
from lightningrl_verl.settings import loss_name

POLICY, LOSS = sys.argv[1:]
RATE = 1e-3
random = np.random.default_rng(3)


def tokens(count: int) -> tuple[int, ...]:
    return tuple(int(token) for token in random.integers(1, 250, count))


def logprobs_of(model: Any, sample: Sample) -> np.ndarray:
    with torch.no_grad():
        logits = model(torch.from_numpy(sample.token_ids.astype(np.int64))[None]).logits[0, :-1]
    targets = torch.from_numpy(sample.token_ids[1:].astype(np.int64))
    found = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0].numpy()
    return np.concatenate(([0.0], found)).astype(np.float32)


def make_samples(model: Any, rows: str) -> list[Sample]:
    """Four rollouts of one to four calls, each call with an advantage of its own; the policy has moved a little since
    they were sampled."""
    global random
    random = np.random.default_rng(3)
    trajectories, advantages = [], []
    for number, calls in enumerate((1, 4, 2, 3)):
        transitions, credit, history = [], [], tokens(4)
        for call in range(calls):
            completion = tokens(int(random.integers(2, 6)))
            parent = f"{number}/{call - 1}" if call else None
            transitions.append(
                make_transition(f"{number}/{call}", prompt=history, completion=completion, parent=parent)
            )
            credit.append(np.full(len(completion), random.normal(), np.float32))
            history = (*history, *completion, *tokens(2 * (call % 2)))  # nothing between a rollout's first two calls
        trajectories.append(make_trajectory(str(number), transitions))
        advantages.append(tuple(credit))
    group = TrajectoryGroup(id="g", trajectories=tuple(trajectories))
    samples = build_samples([group], [tuple(advantages)], rows=rows, aggregation="rollout_mean")  # type: ignore[arg-type]
    for sample in samples:
        noise = 0.05 * np.sin(np.arange(len(sample.logprobs)))
        sample.logprobs[sample.mask] = (logprobs_of(model, sample) + noise)[sample.mask]
    return samples


def make_worker() -> Any:
    exact = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    model = HFModelConfig(
        path=POLICY,
        use_remove_padding=False,
        enable_gradient_checkpointing=False,
        override_config={"attn_implementation": "sdpa"},
    )
    engine = FSDPEngineConfig(
        strategy="fsdp2",
        use_torch_compile=False,
        model_dtype="fp32",
        mixed_precision=exact,
        use_dynamic_bsz=True,
        max_token_len_per_gpu=64,
        infer_max_token_len_per_gpu=64,
    )
    optimizer = FSDPOptimizerConfig(
        optimizer="SGD", lr=RATE, total_training_steps=10, lr_warmup_steps=0, weight_decay=0.0, clip_grad=1e9
    )
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=model,
            engine_config=engine,
            optimizer_config=optimizer,
            checkpoint_config=CheckpointConfig(),
            profiler_config=None,
        )
    )
    worker.reset()
    actor = FSDPActorConfig(
        strategy="fsdp2",
        ppo_mini_batch_size=4,
        rollout_n=1,
        use_dynamic_bsz=True,
        loss_agg_mode="token-sum",
        entropy_coeff=0.0,
        policy_loss=PolicyLossConfig(loss_mode=loss_name(LOSS)),
    )
    worker.set_loss_fn(partial(ppo_loss, config=actor))
    return worker


def nest(rows: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def weights(worker: Any) -> dict[str, Tensor]:
    return {name: value.full_tensor().detach().clone() for name, value in worker.engine.module.named_parameters()}


def verl_gradient(worker: Any, samples: list[Sample], spoil: Any = None) -> tuple[dict[str, Tensor], float]:
    """One step of plain gradient descent, undone again: the gradient is what it moved."""
    rows = build_rows(samples, "p", 1).fields
    if spoil is not None:
        spoil(rows)
    for row in rows:
        row |= {"advantages": row["rm_scores"], "old_log_probs": row["rollout_log_probs"]}
    names = (
        "prompts",
        "responses",
        "input_ids",
        "position_ids",
        "response_mask",
        "loss_mask",
        "advantages",
        "old_log_probs",
    )
    data = TensorDict({name: nest([row[name] for row in rows]) for name in names}, batch_size=len(rows))
    options = {
        "global_batch_size": len(rows),
        "mini_batch_size": len(rows),
        "epochs": 1,
        "seed": 1,
        "dataloader_kwargs": {"shuffle": False},
    }
    tu.assign_non_tensor(data, temperature=1.0, calculate_entropy=False, compute_loss=True, **options)
    before = weights(worker)
    metrics = tu.get(worker.train_mini_batch(data), "metrics")
    after = weights(worker)
    with torch.no_grad():
        for name, parameter in worker.engine.module.named_parameters():
            parameter.to_local().copy_(before[name])
    loss = metrics["actor/pg_loss"]
    return {name: (before[name] - after[name]) / RATE for name in before}, float(
        np.sum(loss.aggregate() if hasattr(loss, "aggregate") else loss)
    )


def compare(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, float]:
    names = sorted(ours)
    a = torch.cat([ours[name].flatten() for name in names]).double()
    b = torch.cat([theirs[name].flatten() for name in names]).double()
    return {"cosine": float(a @ b / (a.norm() * b.norm())), "ratio": float(b.norm() / a.norm())}


def permute(rows: list[dict[str, Any]]) -> None:
    """Each row's credit goes to the next row."""
    means = [float(row["rm_scores"][row["response_mask"].bool()].mean()) for row in rows]
    for row, value in zip(rows, means[1:] + means[:1], strict=True):
        row["rm_scores"] = row["response_mask"] * value


def only_last(rows: list[dict[str, Any]]) -> None:
    """Every row of a rollout gets the last row's credit, as verl's GRPO does."""
    last = {row["session_id"]: float(row["rm_scores"][row["response_mask"].bool()][-1]) for row in rows}
    for row in rows:
        row["rm_scores"] = row["response_mask"] * last[row["session_id"]]


def unweighted(rows: list[dict[str, Any]]) -> None:
    """A row counts one, so that a rollout counts by its rows."""
    for row in rows:
        mask = row["response_mask"].bool()
        row["rm_scores"] = row["rm_scores"].sign() * mask / mask.sum()


start: Any = AutoModelForCausalLM.from_pretrained(POLICY)
start.eval()
CLIPS: dict[str, Any] = {} if LOSS == "reinforce" else {"clip_low": 0.2, "clip_high": 0.2}
learner = Learner(start, TorchSettings(policy=POLICY, learning_rate=RATE, loss=LOSS, **CLIPS))
worker = make_worker()
by_call, merged = make_samples(start, "call"), make_samples(start, "merged")
reference = learner.gradients(by_call)
found, loss = verl_gradient(worker, by_call)
if set(found) != set(reference):
    reference = {name: value for name, value in reference.items() if name in found}
with torch.no_grad():
    torch_loss = sum(float(learner._sum_losses(batch, Before())[0].item()) for batch in learner._batches(by_call))
report = {
    "rows": [len(by_call), len(merged)],
    "call": compare(reference, found),
    "merged": compare(reference, verl_gradient(worker, merged)[0]),
    "losses": [torch_loss, loss],
    "permuted": compare(reference, verl_gradient(worker, by_call, permute)[0]),
    "only_last": compare(reference, verl_gradient(worker, by_call, only_last)[0]),
    "unweighted": compare(reference, verl_gradient(worker, by_call, unweighted)[0]),
}
print(json.dumps(report))
