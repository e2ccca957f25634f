"""vLLM in this process: prints, as JSON, how far its logprobs are from transformers' before and after two weight
updates.

usage: process_vllm.py POLICY
"""

import json
import os
import sys

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")

from typing import Any

import torch
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams

POLICY = sys.argv[1]
SAMPLING = SamplingParams(temperature=0.7, max_tokens=8, logprobs=0, ignore_eos=True, seed=3)

engine = LLM(
    model=POLICY,
    dtype="float32",
    enforce_eager=True,
    max_model_len=128,
    max_num_seqs=8,
    kv_cache_memory_bytes=32 << 20,
    block_size=32,
    logprobs_mode="processed_logprobs",
    worker_extension_cls="verl.workers.rollout.vllm_rollout.utils.vLLMColocateWorkerExtension",
    seed=0,
)
model: Any = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32)
model.eval()
prompts = [
    torch.randint(0, 250, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in (9, 40, 70)
]


@torch.no_grad()
def gap() -> float:
    gaps = []
    for prompt, answer in zip(
        prompts,
        engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], SAMPLING, use_tqdm=False),
        strict=True,
    ):
        completion = list(answer.outputs[0].token_ids)
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        expected = (logits / 0.7).log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
        found = torch.tensor(
            [entry[token].logprob for entry, token in zip(answer.outputs[0].logprobs, completion, strict=True)]
        )
        gaps.append((expected - found).abs().max().item())
    return float(max(gaps))


@torch.no_grad()
def train(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


def send() -> None:
    """As verl's worker does it: load bucket by bucket into the live model, then finish (vllm_rollout/utils.py
    `update_weights_from_ipc`). The head comes in the last bucket, the embeddings it may be tied to in the first."""
    weights = [(name, value.clone()) for name, value in model.state_dict().items()]
    buckets = [weights[:1], weights[1:-1], weights[-1:]]

    def load(worker: object) -> None:
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        for bucket in buckets:
            worker._update_weights(bucket, peft_config=None, base_sync_done=True)  # type: ignore[attr-defined]
        runner = worker.model_runner  # type: ignore[attr-defined]
        process_weights_after_loading(runner.model, runner.vllm_config.model_config, torch.device("cpu"))

    engine.collective_rpc(load)
    engine.reset_prefix_cache()


gaps = {"start": gap()}
train(1)
gaps["trained, not sent"] = gap()
send()
gaps["sent"] = gap()
train(2)
send()
gaps["sent again"] = gap()
print(json.dumps(gaps))
