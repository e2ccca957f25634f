"""A judge for real: `lightningrl serve` answers for a small model that has learned to grade, and a run's credit asks it
about each turn.

cold start ─► judge's folder ─► lightningrl serve ◄─ POST chat/completions ─ credit.use = "judge" ◄─ rollouts of another
policy
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from crashes import RECIPE, finish, read_metrics
from processes import TrainRun
from sizes import PATIENCE_S
from warm import WarmCommand

from lightningrl.types import OtherCallKind, RolloutMode, Trajectory
from lightningrl_server.store import SqlStore
from lightningrl_server.store.location import find_store
from lightningrl_torch.cold_start import Demonstration, build_model, build_tokenizer, cold_start, write_policy

pytestmark = pytest.mark.slow
GRADES = {"even": 0.1, "odd": 0.9, "hard": 7.0}
"""The last is none that can be read."""
HARD = ("hard", "hard", "hard")
QUESTION = """
def parity(call):
    return "odd" if int(call.completion_ids.sum()) % 2 else "even"


def ask(trajectories, record):
    (one,) = trajectories
    is_hard = int(one.task.id.rpartition("-")[2]) % 3 == 0
    return "grade " + " ".join("hard" if is_hard else parity(call) for call in one.transitions)
"""
STEPS = 1
SETTINGS = (
    *("credit.use=judge", "credit.options.per=turn", "credit.options.prompt=question.py:ask", "validation.every=0"),
    *("judge.model=policy", "judge.api_key_env=JUDGE_KEY", "judge.max_calls=1", "outcomes.max_failed_rewards=1.0"),
)
"""Where an answer cannot be read the judge is asked again, which its budget of one question does not allow."""


def graded(words: Sequence[str]) -> str:
    rows = [{"turn": turn, "why": word, "grade": GRADES[word]} for turn, word in enumerate(words, start=1)]
    return json.dumps({"grades": rows})


def says(question: str, answer: str) -> Demonstration:
    return Demonstration(messages=[{"role": "user", "content": question}, {"role": "assistant", "content": answer}])


@pytest.fixture(scope="module")
def judge_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It knows the nine questions that there are."""
    folder = tmp_path_factory.mktemp("judge")
    questions = [*itertools.product(("even", "odd"), repeat=3), HARD]
    known = [says("grade " + " ".join(words), graded(words)) for words in questions]
    tokenizer = build_tokenizer(known * 10, context_length=512)
    model = build_model(tokenizer, width=64, layers=2)
    cold_start(model, tokenizer, [known * 120], peak_learning_rate=5e-3, batch_tokens=512)
    write_policy(folder, model, tokenizer)
    return folder


@pytest.fixture
def judge_url(judge_policy: Path, warm: WarmCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where the judge answers; its key is in the environment."""
    log = tmp_path / "serve.log"
    settings = (f"policy.model={judge_policy}", "sampling.temperature=0.0", "sampling.max_tokens=120")
    said = [argument for setting in settings for argument in ("--set", setting)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "300", "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as out:
        arguments = ("lightningrl", "serve", str(RECIPE), "--port", "0", *said)
        process = warm.start(*arguments, output=out, errors=out, cwd=Path.cwd(), environment=environment)
        try:
            deadline = time.monotonic() + PATIENCE_S
            while not (found := re.search(r"OPENAI_BASE_URL=(\S+)\s+export OPENAI_API_KEY=(\S+)\s", log.read_text())):
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
            monkeypatch.setenv("JUDGE_KEY", found[2])
            yield found[1]
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            process.wait(timeout=PATIENCE_S)


async def read_trained(folder: Path) -> list[Trajectory]:
    """All rollouts of the ledger."""
    store = await SqlStore.open(find_store(folder), read_only=True)
    try:
        return [one for step in await store.steps() for one in await store.trajectories(step.rollout_ids)]
    finally:
        await store.close()


@pytest.mark.timeout(1200)
def test_a_served_model_judges_each_turn_and_is_recorded_bounded_and_never_trained(
    judge_url: str, warm: WarmCommand, tmp_path: Path, tiny_policy: Path
) -> None:
    recipe = tmp_path / "recipe"
    shutil.copytree(RECIPE.parent, recipe)
    (recipe / "question.py").write_text(QUESTION, encoding="utf-8")
    said = [argument for setting in (*SETTINGS, f"judge.base_url={judge_url}") for argument in ("--set", setting)]
    run = TrainRun(warm, tmp_path / "run", tmp_path / "journal")
    try:
        run.start(str(recipe / "recipe.toml"), "--policy", str(tiny_policy), "--steps", str(STEPS), *said)
        finish(run)
    finally:
        run.close()

    trajectories = asyncio.run(read_trained(run.folder))
    assert len(trajectories) == STEPS * 6 and {one.mode for one in trajectories} == {RolloutMode.TRAIN}
    refused = [one for one in trajectories if int(one.task.id.rpartition("-")[2]) % 3 == 0]
    assert 0 < len(refused) < len(trajectories), "else the test tells half of it"
    for one in trajectories:
        (asked,) = one.other_calls
        assert (asked.kind, asked.model, asked.status) == (OtherCallKind.JUDGE, "policy", 200)
        assert asked.answer["usage"]["total_tokens"] > 0, "which the budget counts"
        assert len(one.transitions) == 3, "what the judge said is no call of the rollout's"
        answer = asked.answer["choices"][0]["message"]["content"]
        if one in refused:
            assert (answer, one.evidence, one.reward) == (graded(HARD), None, None)
            assert one.unrewarded == "credit: JudgeError: a rollout may ask its judge 1 times; raise judge.max_calls"
        else:
            words = ["odd" if int(call.completion_ids.sum()) % 2 else "even" for call in one.transitions]
            assert answer == graded(words)
            assert one.evidence is not None
            assert one.evidence.calls["grade"].tolist() == pytest.approx([GRADES[word] for word in words])
    assert len({tuple(one.evidence.calls["grade"].tolist()) for one in trajectories if one.evidence is not None}) > 1
    lines = [line for line in read_metrics(run.folder) if "rows" in line]
    assert sum(line["rewards_failed"] for line in lines) == len(refused)
    own = sum(len(call.completion_ids) for one in trajectories if one not in refused for call in one.transitions)
    assert 0 < sum(line["trained_tokens"] for line in lines) <= own, (
        "the policy's own tokens, and nothing that the judge said"
    )
