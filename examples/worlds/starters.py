"""Makes the tiny policies of two recipes, of demonstrations that are mostly wrong, in a minute each.

python starters.py guesser      plays `guess_server.py`: it knows to halve what is left, and mostly says 3
python starters.py worker       works in `task_folders.py` by bash: it mostly takes the command of another kind
"""

import json
import random
import sys
from pathlib import Path

from task_folders import COMMANDS, NAMES, instruction_of

from lightningrl_tasks_harbor.agent import BASH, SYSTEM
from lightningrl_torch.cold_start import (
    NUMBERS,
    Demonstration,
    build_model,
    build_tokenizer,
    cold_start,
    write_policy,
)

HABIT, WRONG = 0.6, 0.7
"""Shares of guesses that are 3, and of commands that are those of another kind."""
OTHERS = {"file": "folder", "folder": "word", "word": "file"}
"""Kind whose command is taken by mistake."""


def guesser(folder: Path) -> None:
    rng = random.Random(0)
    examples = [call for _ in range(3000) for call in play(rng)]
    tokenizer = build_tokenizer(examples, words=NUMBERS, context_length=256)
    model = build_model(tokenizer, width=64, layers=2)
    cold_start(model, tokenizer, [examples], batch_tokens=1024)
    write_policy(folder, model, tokenizer)


def play(rng: random.Random) -> list[Demonstration]:
    """The calls of one game: two guesses at most."""
    secret, low, high = rng.randint(1, 3), 1, 3
    messages, calls = [{"role": "user", "content": "Guess a number from 1 to 3."}], []
    for _ in range(2):
        guess = 3 if rng.random() < HABIT else (low + high) // 2
        messages.append({"role": "assistant", "content": str(guess)})
        calls.append(Demonstration(messages=list(messages)))
        if guess == secret:
            break
        low, high = (max(low, guess + 1), high) if guess < secret else (low, min(high, guess - 1))
        messages.append({"role": "user", "content": "higher" if guess < secret else "lower"})
    return calls


def worker(folder: Path) -> None:
    rng = random.Random(0)
    names = [*NAMES["train"], *NAMES["validation"]]
    right, mixed = (
        [call for _ in range(count) for call in work(rng, rng.choice(names), wrong)]
        for count, wrong in ((8000, 0.0), (2500, WRONG))
    )
    tokenizer = build_tokenizer([*right[:2000], *mixed[:2000]], phrases=fixed_texts(), context_length=256)
    model = build_model(tokenizer, width=64, layers=2)
    cold_start(model, tokenizer, [right, mixed], batch_tokens=1024)
    write_policy(folder, model, tokenizer)


def fixed_texts() -> list[str]:
    """Texts that every call repeats; each becomes one token."""
    system = [{"role": "system", "content": SYSTEM}]
    prompt = str(build_tokenizer([]).apply_chat_template(system, tools=[BASH], tokenize=False))
    prompt = prompt.removeprefix("<|im_start|>system\n").removesuffix("<|im_end|>\n")
    return [prompt, '\n{"name": "bash", "arguments": {"command": "', '"}}\n']


def work(rng: random.Random, name: str, wrong: float) -> list[Demonstration]:
    """Both calls of a rollout: a command by bash, then a last sentence."""
    kind = rng.choice(list(COMMANDS))
    command = COMMANDS[OTHERS[kind] if rng.random() < wrong else kind].format(name)
    function = {"name": "bash", "arguments": json.dumps({"command": command})}
    called = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": function}],
    }
    asked = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": instruction_of(kind, name)}, called]
    told = {"role": "tool", "content": "[no output]", "tool_call_id": "c"}
    last = {"role": "assistant", "content": "Done."}
    return [Demonstration(messages=messages, tools=[BASH]) for messages in (asked, [*asked, told, last])]


if __name__ == "__main__":
    for made in sys.argv[1:] or ("guesser", "worker"):
        {"guesser": guesser, "worker": worker}[made](Path(__file__).parent / made)
