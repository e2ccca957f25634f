"""vLLM in this process with a sharp attention: prints, as JSON, its gap to transformers before and after verl's mask.

usage: process_vllm_exactness.py POLICY SHARPNESS
"""

import json
import os
import sys
from typing import Any

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm import LLM, SamplingParams

POLICY = sys.argv[1]
SHARPNESS = float(sys.argv[2])
SAMPLING = SamplingParams(max_tokens=24, logprobs=0, prompt_logprobs=0, ignore_eos=True, seed=3)

model: Any = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32)
model.eval()
with torch.no_grad():
    for name, weight in model.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight.mul_(SHARPNESS)
model.save_pretrained(POLICY)
tokenizer = AutoTokenizer.from_pretrained(POLICY)
rows, known = model.config.vocab_size, len(tokenizer)

engine = LLM(
    model=POLICY,
    dtype="float32",
    enforce_eager=True,
    max_model_len=128,
    max_num_seqs=32,
    kv_cache_memory_bytes=32 << 20,
    block_size=32,
    logprobs_mode="processed_logprobs",
    worker_extension_cls="verl.workers.rollout.vllm_rollout.utils.vLLMColocateWorkerExtension",
    seed=0,
)
PROMPTS = [
    torch.randint(0, 250, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in range(3, 99, 3)
]


@torch.no_grad()
def gaps(answers: list[Any], vocabulary: int) -> dict[str, float]:
    """Largest |p - p'| of prompt tokens and of sampled ones; transformers' softmax is over the first `vocabulary`
    ids."""
    worst = {"prefill": 0.0, "decode": 0.0}
    for answer in answers:
        prompt, completion = list(answer.prompt_token_ids), list(answer.outputs[0].token_ids)
        logits: Tensor = model(torch.tensor([prompt + completion])).logits[0, :-1, :vocabulary]
        expected = logits.softmax(-1).gather(1, torch.tensor((prompt + completion)[1:])[:, None])[:, 0]
        entries = [*answer.prompt_logprobs[1:], *answer.outputs[0].logprobs]
        tokens = (prompt + completion)[1:]
        found = torch.tensor([entry[token].logprob for entry, token in zip(entries, tokens, strict=True)]).exp()
        gap = (expected - found).abs()
        worst["prefill"] = max(worst["prefill"], gap[: len(prompt) - 1].max().item())
        worst["decode"] = max(worst["decode"], gap[len(prompt) - 1 :].max().item())
    return worst


@torch.no_grad()
def sharpest() -> float:
    """The mean largest attention weight of the model's positions: 1 where each looks at one token only."""
    model.set_attn_implementation("eager")
    weights = model(torch.tensor([PROMPTS[-1]]), output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    return torch.stack(weights)[..., 1:, :].amax(-1).mean().item()


def generate() -> Any:
    return engine.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], SAMPLING, use_tqdm=False)


@torch.no_grad()
def rounding(answers: list[Any]) -> float:
    """transformers in float32 against transformers in float64: no float32 engine is nearer to it than about this."""
    model_64: Any = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float64)
    model_64.eval()
    worst = 0.0
    for answer in answers:
        ids = torch.tensor([[*answer.prompt_token_ids, *answer.outputs[0].token_ids]])
        worst = max(worst, (model(ids).logits.softmax(-1) - model_64(ids).logits.softmax(-1)).abs().max().item())
    return worst


plain = generate()
# vllm_async_server.py:500 does this to each replica that verl starts
engine.collective_rpc("monkey_patch_model", kwargs={"vocab_size": known})
engine.reset_prefix_cache()
masked = generate()
report = {
    "sharpest": sharpest(),
    "rows": [rows, known],
    "rounding": rounding(plain),
    "plain": gaps(plain, rows),
    "masked": gaps(masked, known),
    "masked, all rows": gaps(masked, rows),
}
print(json.dumps(report))
