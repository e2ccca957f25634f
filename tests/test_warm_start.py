"""A warm start: the policy is tuned on a teacher's rollouts or on traces, token for token those of RL, and RL goes on
from there; killed in any stage, the run goes on."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from processes import TrainRun
from teaching import OF_EVERY_OTHER
from warm import WarmCommand

from lightningrl import Run
from lightningrl.errors import RunFolderError
from lightningrl.recipe import Recipe
from lightningrl.records import RolloutFilter
from lightningrl_client.recipe_file import load_recipe
from lightningrl_runs.belongings import remove_made
from lightningrl_runs.origin import newest_run, read_models
from lightningrl_runs.reader import open_run
from lightningrl_training.tuning.rows import read_rows
from lightningrl_training.tuning.session import make_renderer
from lightningrl_training.warm_start import explain_warm_start

SMALL = (
    "loop.steps=1",
    "loop.tasks_per_step=2",
    "loop.group_size=2",
    "validation.every=0",
    "runtime.workers=1",
    f"rewards.right.use={OF_EVERY_OTHER}",
)
TEACHER = ("warm_start.teacher=starter", "warm_start.tasks=4", "warm_start.samples=2", "tune.batch=4")


def words(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


async def calls_of(run: Path) -> list[Any]:
    async with open_run(run) as stored:
        records = await stored.list_rollouts(RolloutFilter(limit=100))
        ended = [record.id for record in records if any(attempt.outcome is not None for attempt in record.attempts)]
        return list(await stored.look.trajectories(ended))


@pytest.mark.slow
def test_a_run_is_tuned_on_its_teachers_good_rollouts_and_starts_from_there(
    first_agent: Path, warm: WarmCommand, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    trained = warm.run(
        "lightningrl", "train", str(first_agent), "--run", str(run), *words(*SMALL, *TEACHER), cwd=tmp_path
    )
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert "teacher: 4 of 8 rollouts have a reward of at least 1" in trained.stdout
    model = read_models(run)["policy"]
    assert Path(model) == run / "warm_start" / "tuning" / "policy"
    assert (run / "warm_start" / "tuning" / "curve.png").is_file()

    taught = asyncio.run(calls_of(run / "warm_start" / "teacher"))
    good = [call for trajectory in taught if trajectory.reward == 1.0 for call in trajectory.transitions]
    recipe = load_recipe(first_agent)
    rows = read_rows(run / "warm_start" / "rows" / "sft.jsonl", "sft", make_renderer(recipe, model)).rows
    of_rl = {(*call.prompt_ids.tolist(), -1, *call.completion_ids.tolist()) for call in good}
    of_tuning = {(*a.context.tolist(), -1, *a.tokens.tolist()) for row in rows for a in row.answers}
    assert of_tuning and of_tuning <= of_rl, "each row has a rollout's tokens, and trains those that it sampled"
    prompts = {tuple(call.prompt_ids.tolist()) for t in asyncio.run(calls_of(run)) for call in t.transitions}
    own_tasks = {t.task.id for t in asyncio.run(calls_of(run))}
    same = [t for t in taught if t.task.id in own_tasks]
    assert {tuple(call.prompt_ids.tolist()) for t in same for call in t.transitions} <= prompts

    assert newest_run(tmp_path) == run
    exported = Run(run).export(tmp_path / "weights", step="newest")
    assert exported is not None
    remove_made(run)
    assert {path.name for path in run.iterdir()} <= {".lock", "run.json", "store.sqlite-lock"}


@pytest.mark.slow
def test_a_run_killed_while_it_tunes_goes_on_with_the_next_update(
    first_agent: Path, warm: WarmCommand, tmp_path: Path
) -> None:
    run = TrainRun(warm, tmp_path / "run", tmp_path / "journal")
    tuning = run.folder / "warm_start" / "tuning"
    try:
        more = ("tune.epochs=100", "tune.checkpoint_every=10")
        run.start(str(first_agent), *words(*SMALL, *TEACHER, *more))
        run.wait_for(lambda: any(tuning.glob("checkpoints/step-*/loop.json")))
        run.kill_trainer()
        run.wait_for_orphans()
        assert not (tuning / "policy").exists()
        asked = len(asyncio.run(calls_of(run.folder / "warm_start" / "teacher")))
        run.start("--resume")
        assert run.wait() == 0, run.describe()
    finally:
        run.close()
    steps = [json.loads(line)["step"] for line in (tuning / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(101))
    assert Run(run.folder).steps == 1
    assert len(asyncio.run(calls_of(run.folder / "warm_start" / "teacher"))) == asked == 8


@pytest.mark.slow
def test_a_run_killed_while_its_teacher_answers_asks_the_rest(
    first_agent: Path, warm: WarmCommand, tmp_path: Path
) -> None:
    run = TrainRun(warm, tmp_path / "run", tmp_path / "journal")
    teacher = run.folder / "warm_start" / "teacher"

    def answered() -> int:
        try:
            return len(asyncio.run(calls_of(teacher)))
        except RunFolderError:  # it is just starting
            return 0

    try:
        run.start(str(first_agent), *words(*SMALL, *TEACHER, "warm_start.tasks=40", "runtime.concurrency=1"))
        run.wait_for(lambda: answered() >= 3)
        run.kill_trainer()
        run.wait_for_orphans()
        before = {trajectory.rollout_id for trajectory in asyncio.run(calls_of(teacher))}
        assert 3 <= len(before) < 80, "it was killed while the teacher answered"
        run.start("--resume")
        assert run.wait() == 0, run.describe()
    finally:
        run.close()
    taught = asyncio.run(calls_of(teacher))
    assert before < {trajectory.rollout_id for trajectory in taught}
    assert Counter(trajectory.task.id for trajectory in taught) == dict.fromkeys({t.task.id for t in taught}, 2)
    assert len(taught) == 80
    assert Run(run.folder).steps == 1


@pytest.mark.slow
def test_a_run_killed_while_it_curates_makes_the_same_rows(
    first_agent: Path, warm: WarmCommand, tmp_path: Path
) -> None:
    dialogues = [
        [
            {"role": "user", "content": f"Write this date in words: day {n}"},
            {"role": "assistant", "content": f"Day {n}"},
        ]
        for n in range(1200)
    ]
    export, traces, rows = tmp_path / "export.jsonl", tmp_path / "traces", tmp_path / "rows"
    export.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in dialogues))
    for command in (
        ["import-traces", str(export), "--into", str(traces)],
        ["curate", str(traces), "--into", str(rows)],
    ):
        made = warm.run("lightningrl", *command, cwd=tmp_path)
        assert made.returncode == 0, made.stdout + made.stderr
    run = TrainRun(warm, tmp_path / "run", tmp_path / "journal")
    place = run.folder / "warm_start"
    try:
        settings = (*SMALL, f"warm_start.traces={traces}", "tune.batch=500", "tune.epochs=1")
        run.start(str(first_agent), *words(*settings))
        run.wait_for(lambda: any(place.glob(".rows.*")))
        run.kill_trainer()
        run.wait_for_orphans()
        assert not (place / "rows").exists()
        run.start("--resume")
        assert run.wait() == 0, run.describe()
    finally:
        run.close()
    assert not list(place.glob(".rows.*"))
    assert (place / "rows" / "sft.jsonl").read_bytes() == (rows / "sft.jsonl").read_bytes()
    assert Run(run.folder).steps == 1


STREAMING = """
from agent import client

def answer(date):
    messages = [{"role": "user", "content": f"Write this date in words: {date}"}]
    chunks = client().chat.completions.create(model="gpt-4o-mini", messages=messages, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks).strip()
"""


class Provider(BaseHTTPRequestHandler):
    """Answers each call of chat with a date in words, streamed where that is asked for."""

    def do_POST(self) -> None:
        is_streamed = json.loads(self.rfile.read(int(self.headers["Content-Length"]))).get("stream", False)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream" if is_streamed else "application/json")
        self.end_headers()
        if not is_streamed:
            self.wfile.write(self._body("", message={"role": "assistant", "content": "March 3, 2014"}, end="stop"))
            return
        for delta, end in (({"content": "March 3"}, None), ({"content": ", 2014"}, None), ({}, "stop")):
            self.wfile.write(b"data: " + self._body(".chunk", delta=delta, end=end) + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def _body(self, kind: str, *, end: str | None, **said: Any) -> bytes:
        choices = [{"index": 0, **said, "finish_reason": end}]
        body = {"id": "c", "object": f"chat.completion{kind}", "created": 0, "model": "m", "choices": choices}
        return json.dumps(body).encode()

    def log_message(self, *_: Any) -> None: ...


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["agent.py:answer", "streaming.py:answer"])
def test_a_providers_answers_are_rows(first_agent: Path, warm: WarmCommand, tmp_path: Path, agent: str) -> None:
    folder, run = tmp_path / "first", tmp_path / "run"
    shutil.copytree(first_agent, folder)
    (folder / "streaming.py").write_text(STREAMING, encoding="utf-8")
    with ThreadingHTTPServer(("127.0.0.1", 0), Provider) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        teacher = f"warm_start.teacher=m@http://127.0.0.1:{server.server_port}/v1"
        settings = words(*SMALL, f"agent={agent}", teacher, "warm_start.tasks=2", "warm_start.samples=2")
        trained = warm.run("lightningrl", "train", str(folder), "--run", str(run), *settings, cwd=tmp_path)
        server.shutdown()
    assert trained.returncode == 0, trained.stdout + trained.stderr
    (asked, *_) = asyncio.run(calls_of(run / "warm_start" / "teacher"))
    assert isinstance(asked.other_calls[0].answer, str) == agent.startswith("streaming"), "as it was asked for"
    rows = [json.loads(line) for line in (run / "warm_start" / "rows" / "sft.jsonl").read_text().splitlines()]
    assert {row["messages"][-1]["content"] for row in rows} == {"March 3, 2014"}
    assert len(rows) == 2


@pytest.mark.parametrize(
    ("table", "tune", "what"),
    [
        ({}, {}, ""),
        ({"threshold": 1.0}, {}, "neither traces nor a teacher"),
        ({"traces": ".", "teacher": "starter"}, {}, "traces and a teacher"),
        ({"trace": "."}, {}, "warm_start.trace: "),
        ({"teacher": "starter", "tasks": 0}, {}, "warm_start.tasks: "),
        ({"traces": "nowhere"}, {}, "no folder 'nowhere'"),
        ({"traces": "."}, {}, "is no run and has no sft.jsonl"),
        ({"teacher": "starter"}, {"data": "rows"}, "tune.data names others"),
        ({"teacher": "starter"}, {"method": "x"}, "tune.method"),
        ({"teacher": "starter", "threshold": 2.0}, {}, "no reward is above 1"),
        ({"teacher": "nobody"}, {}, "warm_start.teacher: 'nobody' is no run folder"),
        ({"teacher": "m@https://x.test/v1?key=abc123456789"}, {}, "the address has a secret behind 'key'"),
        ({"teacher": "m@https://me:PASS@x.test/v1"}, {}, "the address names a user or a password"),
        ({"teacher": "m@https://x.test/v1", "api_key_env": "NO_SUCH_KEY_HERE"}, {}, "'NO_SUCH_KEY_HERE' is not set"),
    ],
)
def test_what_is_wrong_with_the_table_is_said_in_a_sentence(
    first_agent: Path, table: dict[str, Any], tune: dict[str, Any], what: str
) -> None:
    recipe: Recipe = load_recipe(first_agent).model_copy(update={"warm_start": table, "tune": tune})
    said = explain_warm_start(recipe)
    assert said == [] if not what else (len(said) == 1 and what in said[0]), said
    assert not any(secret in text for text in said for secret in ("PASS", "abc123456789"))


def test_doctor_and_sweep_refuse_a_wrong_table_before_they_start(
    first_agent: Path, warm: WarmCommand, tmp_path: Path
) -> None:
    for command in ("doctor", "sweep"):
        refused = warm.run("lightningrl", command, str(first_agent), "--set", "warm_start.tracez=x", cwd=tmp_path)
        assert refused.returncode != 0, refused.stdout
        assert "warm_start.tracez: " in refused.stdout + refused.stderr
    assert not list(tmp_path.rglob("store.sqlite"))
