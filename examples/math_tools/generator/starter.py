"""Build the starter policy: a small transformer with its own tokenizer, cold-started on imperfect demonstrations.

    python generator/starter.py --out starter

The result is an ordinary transformers folder. The policy has seen other structures of problems than reinforcement
learning and validation use, and demonstrators who know the right calls and often prefer wrong ones (mistakes.py,
demonstrations.py).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("OPENAI_API_KEY", "unused")  # the agent's file makes its client; nothing is sent

from agent import SYSTEM
from demonstrations import TOOLS, build_demonstrations

from lightningrl_torch.cold_start import NUMBERS, build_command, build_model, build_tokenizer, cold_start, write_policy

__all__ = ["build_starter"]

SEED = 7
RIGHT_PROBLEMS, FAULTY_PROBLEMS = 26_000, 6_000
"""First demonstrations that are right, then imperfect ones, which decide what the policy prefers."""
CONTEXT_LENGTH = 512


def build_starter(
    out: Path, *, right_problems: int = RIGHT_PROBLEMS, faulty_problems: int = FAULTY_PROBLEMS, seed: int = SEED
) -> None:
    """Train the starter policy and write its folder."""
    right = list(build_demonstrations(right_problems, seed, is_faulty=False))
    faulty = list(build_demonstrations(faulty_problems, seed, is_faulty=True))
    tokenizer = build_tokenizer(
        [*right[:6000], *faulty[:6000]], phrases=fixed_texts(), words=NUMBERS, context_length=CONTEXT_LENGTH
    )
    model = build_model(tokenizer, seed=seed)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens")
    print(f"{len(right):,} right and {len(faulty):,} imperfect demonstrations")
    cold_start(model, tokenizer, [right, faulty], seed=seed, peak_learning_rate=2e-3, batch_tokens=1024)
    write_policy(out, model, tokenizer)


def fixed_texts() -> list[str]:
    """What every call repeats, as tokens of its own: a rollout is some hundred tokens instead of a thousand."""
    system = [{"role": "system", "content": SYSTEM}]
    prompt = str(build_tokenizer([]).apply_chat_template(system, tools=TOOLS, tokenize=False))
    prompt = prompt.removeprefix("<|im_start|>system\n").removesuffix("<|im_end|>\n")
    call = ['\n{"name": "calculator", "arguments": {"expression": "', '"}}\n']
    result = ["\n<|im_start|>user\n<tool_response>\n", "\n</tool_response><|im_end|>\n<|im_start|>assistant\n"]
    return [prompt, *call, *result, "### ANSWER: ", " ###", " is no arithmetic expression"]


if __name__ == "__main__":
    build_command(build_starter, Path(__file__).parents[1] / "starter", description=__doc__)
