"""`lightningrl try`: what two rollouts of one worker share is seen; a harness does what it is told in an empty folder,
without a recipe.

`pi` is the real program where `make test-peers-clients ONLY=pi` has installed it, and one of ours that reads the same
configuration, which its row writes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from warm import WarmCommand

from lightningrl_testing.tokenizers import tiny_tokenizer

ROOT = Path(__file__).resolve().parents[1]
REAL = ROOT / ".clients" / "pi" / "node_modules" / ".bin"
PI = '''#!{python}
"""Asks the model that ~/.pi/agent/models.json names, and writes what it says into said.txt."""
import json, os, pathlib, sys

sys.path.insert(0, {support!r})
provider = json.loads((pathlib.Path.home() / ".pi/agent/models.json").read_text())["providers"]["lightningrl"]
os.environ.update(OPENAI_BASE_URL=provider["baseUrl"], OPENAI_API_KEY=os.environ[provider["apiKey"]])
from small_harness import ask

message = ask([{{"role": "user", "content": sys.argv[-1]}}])
pathlib.Path("said.txt").write_text(str(message), errors="replace")
print("It is done.")
'''


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from lightningrl_torch.testing import make_model

    folder, tokenizer = tmp_path_factory.mktemp("policy"), tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    make_model(vocab_size=len(tokenizer), max_position_embeddings=16_384, **ends).save_pretrained(folder)
    return folder


SHARED = """
import asyncio
import openai

jobs = worker = both = None

async def serve():
    async with openai.AsyncOpenAI(api_key="mine") as client:
        while True:
            text, done = await jobs.get()
            answer = await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": text}], max_tokens=4
            )
            done.set_result(answer.choices[0].message.content)

async def answer(text):
    global jobs, worker, both
    if worker is None:
        jobs, both = asyncio.Queue(), asyncio.Barrier(2)
        worker = asyncio.create_task(serve())
    if SHARES:
        await both.wait()
    done = asyncio.get_running_loop().create_future()
    jobs.put_nowait((text, done))
    answer = await done
    if SHARES:
        await both.wait()
    else:
        worker.cancel()
        worker = None
    return answer
"""
RECIPE = """
agent = "agent.py:answer"
rewards.right.use = "reward.py:right"
tasks.train = "tasks.jsonl"
policy.model = "POLICY"
runtime.concurrency = CONCURRENCY
"""


@pytest.mark.slow
@pytest.mark.parametrize(("shares", "concurrency"), [(True, 8), (False, 1)])
def test_two_rollouts_that_share_a_task_are_told_of_before_any_run(
    warm: WarmCommand, policy: Path, tmp_path: Path, shares: bool, concurrency: int
) -> None:
    (tmp_path / "agent.py").write_text(SHARED.replace("SHARES", str(shares)))
    (tmp_path / "reward.py").write_text("def right(task, output, trajectory):\n    return 1.0\n")
    (tmp_path / "tasks.jsonl").write_text('{"input": "hi"}\n')
    recipe = RECIPE.replace("POLICY", str(policy)).replace("CONCURRENCY", str(concurrency))
    (tmp_path / "recipe.toml").write_text(recipe)
    ran = warm.run("lightningrl", "try", "recipe.toml", cwd=tmp_path, environment={"COLUMNS": "200"})
    shown = " ".join((ran.stdout + ran.stderr).split())
    assert ran.returncode == 0, shown
    lines = ran.stderr.splitlines()
    assert any(line.startswith("running the agent on task") for line in lines), "in a pipe"
    assert ("task 'serve', started by this rollout, goes on after it" in shown) is shares, shown


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    """A folder for PATH, with our `pi`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "pi").write_text(PI.format(python=sys.executable, support=str(ROOT / "tests" / "support")))
    (folder / "pi").chmod(0o755)
    return folder


def try_pi(warm: WarmCommand, cwd: Path, programs: Path | None, *words: str) -> tuple[int, str]:
    """The exit status, and what was said."""
    rooms = cwd / "tmp"
    rooms.mkdir(exist_ok=True)
    path = os.pathsep.join([*([str(programs)] if programs else []), "/usr/bin", "/bin"])
    environment = {"PATH": path, "TMPDIR": str(rooms), "COLUMNS": "200"}
    ran = warm.run("lightningrl", "try", "--harness", *words, cwd=cwd, environment=environment)
    assert [name.name for name in rooms.iterdir() if name.name.startswith("lightningrl-")] == [], "nothing is left"
    return ran.returncode, ran.stdout + ran.stderr


@pytest.mark.slow
def test_a_harness_is_tried_without_a_recipe_and_earns_one_where_it_changed_its_folder(
    warm: WarmCommand, policy: Path, ours: Path, tmp_path: Path
) -> None:
    settings = ("--set", "sampling.max_tokens=8")
    status, said = try_pi(warm, tmp_path, ours, "pi", "Write the word ‘good’", "--policy", str(policy), *settings)
    assert status == 0, said
    assert "Write the word ‘good’" in said and "changed 1" in said, said


@pytest.mark.slow
@pytest.mark.skipif(not REAL.exists(), reason="make test-peers-clients ONLY=pi")
def test_the_real_pi_is_tried_without_a_recipe(warm: WarmCommand, policy: Path, tmp_path: Path) -> None:
    settings = ("--set", "sampling.max_tokens=8")
    status, said = try_pi(warm, tmp_path, REAL, "pi", "Write answer.txt", "--policy", str(policy), *settings)
    assert status == 0, said
    assert "Write answer.txt" in said and "changed 0" in said, said


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("pi",), "say what 'pi' is to do: lightningrl try --harness pi"),
        (("pi", "Write it"), "name the model that 'pi' asks: --policy"),
        (("pie", "Write it", "--policy", "none"), "no harness named 'pie'; there are claude-code, codex"),
        (
            ("pi", "Write it", "--policy", "POLICY"),
            "no program 'pi'; install it: npm install -g @mariozechner/pi-coding",
        ),
    ],
)
def test_what_a_trial_lacks_is_one_sentence(
    warm: WarmCommand, policy: Path, tmp_path: Path, words: tuple[str, ...], sentence: str
) -> None:
    named = [str(policy) if word == "POLICY" else word for word in words]
    status, said = try_pi(warm, tmp_path, None, *named)
    assert status != 0
    assert sentence in " ".join(said.split()), said
