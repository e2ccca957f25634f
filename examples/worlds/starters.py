"""Makes the tiny policies of three recipes, of demonstrations that are mostly wrong, in a minute each.

python starters.py guesser      plays `guess_server.py`: it knows to halve what is left, and mostly says 3
python starters.py caller       the same by the server's tool
python starters.py worker       works in `task_folders.py` by bash: it mostly takes the command of another kind
"""

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from guess_trl import Game
from task_folders import COMMANDS, NAMES, instruction_of
from transformers.utils.chat_template_utils import get_json_schema

from lightningrl_tasks_harbor.agent import BASH, SYSTEM
from lightningrl_torch.cold_start import (
    NUMBERS,
    Demonstration,
    build_model,
    build_tokenizer,
    cold_start,
    write_policy,
)

ASKED = "Guess a number from 1 to 3."
HABIT, WRONG = 0.6, 0.7
"""Shares of guesses that are 3, and of commands that are those of another kind."""
OTHERS = {"file": "folder", "folder": "word", "word": "file"}
"""Kind whose command is taken by mistake."""
GUESS = {
    "name": "guess",
    "description": "Guess the number.",
    "parameters": {
        "additionalProperties": False,
        "properties": {"text": {"type": "string"}},
        "required": ["text"],
        "type": "object",
    },
}
"""The server's tool, as MCP lists it."""


def guesser(folder: Path) -> None:
    rng = random.Random(0)
    examples = [call for _ in range(3000) for call in play(rng)]
    tokenizer = build_tokenizer(examples, words=NUMBERS, context_length=256)
    model = build_model(tokenizer, width=64, layers=2)
    cold_start(model, tokenizer, [examples], batch_tokens=1024)
    write_policy(folder, model, tokenizer)


def play(rng: random.Random) -> list[Demonstration]:
    """The calls of one game: two guesses at most."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": ASKED}]
    calls: list[Demonstration] = []
    for guess, verdict in guesses(rng):
        messages.append({"role": "assistant", "content": str(guess)})
        calls.append(Demonstration(messages=list(messages)))
        messages.append({"role": "user", "content": verdict})
    return calls


def guesses(rng: random.Random) -> Iterator[tuple[int, str]]:
    """The guesses of one game, and what the server says of them."""
    secret, low, high = rng.randint(1, 3), 1, 3
    for _ in range(2):
        guess = 3 if rng.random() < HABIT else (low + high) // 2
        if guess == secret:
            yield guess, "right"
            return
        low, high = (max(low, guess + 1), high) if guess < secret else (low, min(high, guess - 1))
        yield guess, "higher" if guess < secret else "lower"


def caller(folder: Path) -> None:
    """Half of its demonstrations have the tool as MCP describes it, half as TRL reads it off `Game`."""
    rng, of_trl = random.Random(0), get_json_schema(object.__new__(Game).guess)
    tools = [{"type": "function", "function": GUESS}, of_trl]
    examples = [call for _ in range(3000) for call in play_by_tool(rng, rng.choice(tools))]
    phrases = [description_of(tool) for tool in tools]
    phrases += ['\n{"name": "guess", "arguments": {"text": "', '"}}\n']
    # none begins with the line break after an answer: TRL wants a conversation's tokens to begin the longer one's
    phrases += ["<|im_start|>user\n<tool_response>\n", "\n</tool_response><|im_end|>\n<|im_start|>assistant\n"]
    tokenizer = build_tokenizer(examples, phrases=phrases, words=NUMBERS, context_length=256)
    model = build_model(tokenizer, width=64, layers=2)
    cold_start(model, tokenizer, [examples], batch_tokens=1024)
    write_policy(folder, model, tokenizer)


def description_of(tool: Any) -> str:
    """The text that a prompt with the tool begins with."""
    prompt = str(
        build_tokenizer([]).apply_chat_template([{"role": "user", "content": ""}], tools=[tool], tokenize=False)
    )
    return prompt.partition("<|im_end|>")[0].removeprefix("<|im_start|>system\n")


def play_by_tool(rng: random.Random, tool: Any) -> list[Demonstration]:
    """The calls of one game: two guesses at most, and a last word."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": ASKED}]
    calls: list[Demonstration] = []
    for number, (guess, verdict) in enumerate(guesses(rng)):
        function = {"name": "guess", "arguments": json.dumps({"text": str(guess)})}
        call = {"id": f"call_{number}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        calls.append(Demonstration(messages=list(messages), tools=[tool]))
        messages.append({"role": "tool", "content": verdict, "tool_call_id": call["id"]})
    messages.append({"role": "assistant", "content": "Done."})
    return [*calls, Demonstration(messages=messages, tools=[tool])]


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
    for made in sys.argv[1:] or ("guesser", "caller", "worker"):
        {"guesser": guesser, "caller": caller, "worker": worker}[made](Path(__file__).parent / made)
