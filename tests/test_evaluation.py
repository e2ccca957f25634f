"""`lightningrl eval` on a real run: checkpoints, an exported folder, a provider's model; alone and against each
other."""

from __future__ import annotations

import json
import re
import shutil
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from gguf_models import save_family
from warm import WarmCommand

import lightningrl
from lightningrl.figures import Verdict
from lightningrl_torch.gguf.format import GgufFormat

pytestmark = pytest.mark.slow
SMALL = {
    "loop.steps": 2,
    "loop.checkpoint_every": 1,
    "loop.keep_checkpoints": 9,
    "validation.every": 2,
    "validation.tasks": 12,
    "runtime.workers": 1,
}
MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]
BAD: list[tuple[str, dict[str, Any], str]] = [
    ("runs/a@7", {}, "has no checkpoint of step '7'; take 'newest', 'best', or one of: 0, 1, 2"),
    ("nowhere", {}, "'nowhere' is no run folder, no model's file or folder and no model of a provider"),
    ("starter", {}, "'starter' says nothing of agent, tasks and rewards; name the recipe"),
    ("runs/a", {"stop_every": 5}, "only a comparison can be decided before all tasks have run"),
    ("runs/a", {"samples": 4, "temperature": 0.0}, "4 samples of a greedy policy are one and the same"),
    ("runs/a", {"samples": 0}, "samples is 0; give 1 or more"),
    ("runs/a", {"out": "found.txt"}, "is no .json file"),
    ("runs/a", {"against": "recipe.toml"}, "'recipe.toml' is no evaluation"),
]


@pytest.fixture(scope="module")
def project(first_agent: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder with a run of two steps in it."""
    folder = tmp_path_factory.mktemp("evaluated") / "first"
    shutil.copytree(first_agent, folder)
    lightningrl.train(folder, run=folder / "runs" / "a", settings=SMALL)
    return folder


class Provider(BaseHTTPRequestHandler):
    """Answers like a provider whose model writes every date right, and remembers what it was asked."""

    asked: list[tuple[str, str | None]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append((body["model"], self.headers["authorization"]))
        day, month, year = re.findall(r"\d+", body["messages"][-1]["content"])
        message = {"role": "assistant", "content": f"{day} {MONTHS[int(month) - 1]} {year}"}
        answer = {
            "id": "1",
            "object": "chat.completion",
            "created": 1,
            "model": body["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 30, "completion_tokens": 5, "total_tokens": 35},
        }
        said = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, *args: Any) -> None: ...


@pytest.fixture(scope="module")
def provider() -> Iterator[str]:
    Provider.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Provider)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()
    thread.join()


def test_an_evaluation_says_what_validation_said_of_the_same_weights(project: Path, warm: WarmCommand) -> None:
    run = lightningrl.Run(project / "runs" / "a")
    scores = {row["step"]: row["validation/reward"] for row in run.metrics if "validation/reward" in row}
    before = run.rollouts()
    ran = warm.run(
        "lightningrl",
        "eval",
        "runs/a@newest",
        "--against",
        "runs/a@0",
        "--price",
        "1",
        "2",
        cwd=project,
        environment={"COLUMNS": "160"},
    )
    assert ran.returncode == 0, ran.stderr
    for words in ("runs/a after step 2", "pass@1", "mean reward", "on 12 of 12 tasks", "kept in runs/a/evaluations/"):
        assert words in ran.stdout, ran.stdout
    (path,) = (run.folder / "evaluations").glob("*.json")
    found = json.loads(path.read_text(encoding="utf-8"))
    for evaluation, step in zip(found["evaluations"], (2, 0), strict=True):
        assert (evaluation["step"], len(evaluation["tasks"])) == (step, 12)
        assert (
            evaluation["summary"]["reward"]["mean"]
            == evaluation["summary"]["pass_at"]["1"]["mean"]
            == pytest.approx(scores[step])
        )
        is_best = step == max(scores, key=lambda step: (scores[step], -step))
        assert (evaluation["chosen_by"], evaluation["chosen_among"]) == ((12, len(scores)) if is_best else (0, 0))
    assert f"these tasks chose this checkpoint among {len(scores)} validations" in " ".join(ran.stdout.split())
    assert found["comparison"]["difference"]["mean"] == pytest.approx(scores[2] - scores[0])
    assert found["evaluations"][0]["summary"]["cost"] > 0 and found["evaluations"][1]["summary"]["cost"] is None
    assert run.rollouts() == before, "the run's own store stays as it is"


def test_tasks_that_chose_nothing_are_not_said_to_have_chosen_the_checkpoint(
    project: Path, tmp_path: Path, warm: WarmCommand
) -> None:
    rows = [{"input": "7/8/1999", "answer": "7 August 1999"}, {"input": "1/2/2003", "answer": "1 February 2003"}]
    third = tmp_path / "third.jsonl"
    third.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    out = tmp_path / "third-set.json"
    ran = warm.run("lightningrl", "eval", "runs/a@best", "--tasks", str(third), "--out", str(out), cwd=project)
    assert ran.returncode == 0, ran.stderr
    assert "chose this checkpoint" not in " ".join(ran.stdout.split())
    (evaluation,) = json.loads(out.read_text(encoding="utf-8"))["evaluations"]
    assert (evaluation["chosen_by"], evaluation["chosen_among"]) == (0, 2)


def test_a_model_file_is_a_policy_as_in_a_recipe(project: Path, tmp_path: Path, warm: WarmCommand) -> None:
    save_family("llama", tmp_path / "small")
    GgufFormat().write(tmp_path / "small", tmp_path / "small.gguf", "f16")
    words = ("--recipe", str(project), "--limit", "2", "--json")
    ran = warm.run("lightningrl", "eval", "small.gguf", *words, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert len(json.loads(ran.stdout)["evaluations"][0]["tasks"]) == 2
    missing = warm.run("lightningrl", "eval", "package:no_such_package", *words, cwd=tmp_path)
    assert missing.returncode == 2 and "package 'no_such_package'" in missing.stderr, missing.stderr


def test_exported_weights_earn_what_their_checkpoint_earns_on_the_same_tasks(project: Path, tmp_path: Path) -> None:
    run = lightningrl.Run(project / "runs" / "a")
    run.export(tmp_path / "weights", step=1)
    tasks = tmp_path / "held_out.jsonl"
    rows = [
        {
            "id": f"x{number}",
            "input": f"{number} / 3 / 2011",
            "answer": f"{number} March 2011",
            "metadata": {"odd": number % 2},
        }
        for number in range(1, 9)
    ]
    tasks.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    first = run.evaluate(step=1, tasks=str(tasks), out=tmp_path / "first.json", slices=["odd"])
    both = lightningrl.evaluate(
        str(tmp_path / "weights"),
        recipe=project,
        tasks=str(tasks),
        against=str(tmp_path / "first.json"),
        slices=["odd"],
        out=tmp_path / "both.json",
        settings={"runtime.workers": 1},
    )
    exported, stored = both.evaluations
    assert stored.means() == first.evaluations[0].means() == exported.means()
    assert both.comparison is not None and both.comparison.verdict is Verdict.NOT_ENOUGH
    assert [(part.key, part.value, part.tasks) for part in both.comparison.slices] == [("odd", "0", 4), ("odd", "1", 4)]


def test_a_providers_model_is_better_after_a_look_at_some_tasks(
    project: Path, provider: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THEIR_KEY", "secret")
    report = lightningrl.evaluate(
        f"clever@{provider}",
        recipe=project,
        against=f"{project / 'runs' / 'a'}@0",
        stop_every=20,
        samples=2,
        api_key_env="THEIR_KEY",
        price=(2.0, 10.0),
        out=tmp_path / "found.json",
        settings={"runtime.workers": 1},
    )
    theirs, ours = report.evaluations
    assert set(Provider.asked) == {("clever", "Bearer secret")}
    assert report.comparison is not None and report.comparison.verdict is Verdict.BETTER
    assert len(theirs.tasks) == len(ours.tasks) < theirs.asked == 100, "it was decided before all had run"
    at_two = theirs.pass_at(2)
    assert at_two is not None and at_two.mean == 1.0
    assert theirs.tokens == (30.0, 5.0)
    assert theirs.cost == pytest.approx(len(theirs.tasks) * 2 * (30 * 2.0 + 5 * 10.0) / 1e6)
    assert ours.cost is None and ours.step == 0


def test_a_comparison_with_an_earlier_evaluation_stops_once_it_is_decided(
    project: Path, provider: str, tmp_path: Path
) -> None:
    run = lightningrl.Run(project / "runs" / "a")
    earlier = run.evaluate(step=0, out=tmp_path / "earlier.json", settings={"validation.tasks": 100})
    report = lightningrl.evaluate(
        f"clever@{provider}",
        recipe=project,
        against=str(earlier.path),
        against_price=(1.0, 2.0),
        stop_every=10,
        out=tmp_path / "both.json",
        settings={"runtime.workers": 1},
    )
    theirs, stored = report.evaluations
    assert report.comparison is not None and report.comparison.verdict is Verdict.BETTER
    assert len(theirs.tasks) < theirs.asked == len(stored.tasks) == 100
    assert stored.cost is not None and stored.cost > 0


def test_what_can_be_refused_is_refused_before_anything_has_run(project: Path, tmp_path: Path) -> None:
    run = lightningrl.Run(project / "runs" / "a")
    with pytest.raises(
        lightningrl.LightningError, match=r"no task has 'colour' in its metadata or its input.* there are: "
    ):
        run.evaluate(slices=["colour"], out=tmp_path / "a.json")
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"id": "another", "input": "1 / 3 / 2011", "answer": "1 March 2011"}), encoding="utf-8")
    earlier = run.evaluate(tasks=str(other), out=tmp_path / "earlier.json")
    with pytest.raises(lightningrl.LightningError, match="has no result of these tasks; evaluate both on the same"):
        run.evaluate(against=str(earlier.path), out=tmp_path / "b.json")
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists(), "no rollout was run"
    (tmp_path / "c").symlink_to(tmp_path / "gone")
    for out, why in ((other / "c.json", "Not a directory|File exists"), (tmp_path / "c.json", "File exists")):
        with pytest.raises(lightningrl.LightningError, match=rf"cannot be written: ({why}); give another"):
            run.evaluate(out=out)


def test_a_provider_that_is_not_there_is_said_with_its_address_and_the_reason(
    project: Path, tmp_path: Path, warm: WarmCommand
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    words = ("--recipe", str(project), "--limit", "2", "--set", "runtime.workers=1")
    ran = warm.run("lightningrl", "eval", f"gpt@{url}", *words, cwd=tmp_path, environment={"COLUMNS": "300"})
    assert ran.returncode == 1, ran.stdout
    (sentence,) = [line for line in ran.stderr.splitlines() if line.startswith("error: ")]
    assert f"the upstream at '{url}' does not answer (ConnectionRefusedError: " in sentence
    for said in ("check its address", "lightningrl rollouts list --run"):
        assert said in sentence
    assert "File" not in sentence and list((tmp_path / "evaluations").glob("*.json")) == []


def test_what_is_wrong_is_said_in_one_sentence(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    for policy, options, sentence in BAD:
        with pytest.raises(lightningrl.LightningError, match=re.escape(sentence)):
            lightningrl.evaluate(policy, **options)
