"""The policy that both sides begin with: a small transformer that has seen the tools used, more often wrongly than
rightly.

python benchmarks/peers/two_tools/store_starter.py OUT
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from store_room import SHELVES, THINGS, TOOLS, make_room, question_of

from lightningrl_torch.cold_start import NUMBERS, Demonstration, build_model, build_tokenizer, cold_start, write_policy

RIGHT, FAULTY = 7_000, 2_000
MISTAKE = 0.6
"""How often a faulty demonstrator counts the first shelf instead of the one that was found: what the greedy policy then
does."""


def demonstrations(count: int, rng: random.Random, mistake: float) -> Iterator[Demonstration]:
    """Every call of every conversation."""
    for _ in range(count):
        room, thing = make_room(rng), rng.choice(THINGS)
        messages: list[dict[str, Any]] = [{"role": "user", "content": question_of(thing)}]
        right_shelf = room["shelf"][thing]
        shelf = SHELVES[0] if rng.random() < mistake else right_shelf
        turns = (("find", "thing", thing, right_shelf), ("count", "shelf", shelf, room["things"][shelf]))
        for number, (tool, argument, value, answer) in enumerate(turns):
            function = {"name": tool, "arguments": json.dumps({argument: value})}
            call = {"id": f"call_{number}", "type": "function", "function": function}
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            yield Demonstration(messages=list(messages), tools=TOOLS)
            messages.append({"role": "tool", "content": answer, "tool_call_id": f"call_{number}"})
        messages.append({"role": "assistant", "content": room["things"][shelf]})
        yield Demonstration(messages=list(messages), tools=TOOLS)


def build(out: Path) -> None:
    rng = random.Random(7)
    right, faulty = list(demonstrations(RIGHT, rng, 0.0)), list(demonstrations(FAULTY, rng, MISTAKE))
    tools: Any = TOOLS
    system = str(
        build_tokenizer([]).apply_chat_template([{"role": "user", "content": ""}], tools=tools, tokenize=False)
    )
    phrases = [
        system.partition("<|im_end|>")[0].removeprefix("<|im_start|>system\n")
    ]  # the tools' description, a token
    for tool, argument in (("find", "thing"), ("count", "shelf")):
        phrases.append(f'\n{{"name": "{tool}", "arguments": {{"{argument}": "')
    # No phrase begins with the line break after an answer: TRL wants a conversation's tokens to be the first of the
    # longer one's.
    phrases += ['"}}\n', "<|im_start|>user\n<tool_response>\n", "\n</tool_response><|im_end|>\n<|im_start|>assistant\n"]
    tokenizer = build_tokenizer(
        [*right[:3000], *faulty[:3000]], phrases=phrases, words=NUMBERS, common=5, context_length=256
    )
    model = build_model(tokenizer, seed=7)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens")
    cold_start(model, tokenizer, [right, faulty], seed=7, peak_learning_rate=2e-3, batch_tokens=1024)
    write_policy(out, model, tokenizer)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
