"""Questions about a run that an import made: another reward, X-ray, pages."""

from __future__ import annotations

import asyncio
import html
import json
import random
import re
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import httpx
import pytest
from langchain.agents import create_agent
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import HumanMessage
from planted_traces import MAKERS, plant, write_sources
from typer.testing import CliRunner
from viewing import read_page, viewing
from warm import WarmCommand

from lightningrl.commands import app
from lightningrl.errors import ConfigError
from lightningrl.plugins import load_plugins
from lightningrl.scaffold import new_agent_of_traces
from lightningrl_client.recipe_file import load_recipe
from lightningrl_traces.importing import import_traces
from lightningrl_training.build import load_tasks
from lightningrl_viewer.app import viewer_of

REWARD = """\
def said_it(task, output, trajectory):
    assert "9" not in str(output)
    return float("meaning" in str([call.result for call in trajectory.tool_calls]))
"""


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source")
    write_sources(source, list(plant(len(MAKERS), 5)), random.Random(5))
    folder = tmp_path_factory.mktemp("runs") / "production"
    import_traces(source, folder, None, load_plugins())
    (folder.parent / "new.py").write_text(REWARD)
    return folder


def test_a_reward_is_tried_on_imported_rollouts(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run_folder.parent)
    run = CliRunner()
    ran = run.invoke(app, ["rescore", str(run_folder), "--reward", "new.py:said_it", "--json"])
    assert ran.exit_code == 0, ran.output
    rescored = json.loads(ran.stdout)
    assert rescored["rollouts"] == rescored["groups"] > 25
    assert rescored["after"]["rewarded"] > rescored["before"]["rewarded"] > 0
    assert rescored["failures"] > 0, "a reward that fails is shown"
    assert 0.0 < rescored["after"]["mean"] < 1.0
    shown = run.invoke(app, ["rescore", str(run_folder), "--reward", "new.py:said_it"])
    assert shown.exit_code == 0 and "mean reward" in shown.output
    steps = run.invoke(app, ["rescore", str(run_folder), "--reward", "new.py:said_it", "--steps", "1"])
    assert "trained no step" in str(steps.exception)


def test_imported_rollouts_are_given_rewards_and_keep_them(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run_folder.parent)
    run = CliRunner()
    copied = tmp_path / "copied"
    shutil.copytree(run_folder, copied)
    again = run.invoke(app, ["rescore", str(copied), "--reward", "new.py:said_it", "--write"])
    assert again.exit_code == 0, again.output
    assert "the first: reported: AssertionError" in " ".join(again.output.split()), "which reward failed, and why"
    listed = run.invoke(
        app, ["rollouts", "list", "--run", str(copied), "--json", "--limit", "1000"]
    ).stdout.splitlines()
    kept = {row["rollout"]: row["reward"] for row in map(json.loads, listed)}
    assert set(kept.values()) == {0.0, 1.0}
    curated = ["curate", str(run_folder), "--into", str(tmp_path / "rows"), "--near", "1", "--min-reward", "1"]
    told = run.invoke(app, [*curated, "--reward", "new.py:said_it"])
    assert told.exit_code == 0, told.output
    assert "said_it: AssertionError" in told.output
    rows = [json.loads(line) for line in (tmp_path / "rows" / "sft.jsonl").read_text().splitlines()]
    assert rows and all(kept[row["source"]["rollout_id"]] == row["source"]["reward"] == 1.0 for row in rows)


def test_no_call_of_an_imported_run_has_credit_and_a_sentence_says_so(run_folder: Path) -> None:
    run = CliRunner()
    rows = run.invoke(app, ["rollouts", "list", "--run", str(run_folder), "--json"]).stdout.splitlines()
    rollout = json.loads(rows[0])["rollout"]
    for arguments in ([], ["--rollout", rollout]):
        ran = run.invoke(app, ["xray", str(run_folder), *arguments])
        assert "trains no policy, as its traces were imported, so no call has credit" in str(ran.exception)


async def test_every_page_of_an_imported_run_opens(run_folder: Path) -> None:
    async with viewer_of(run_folder, "a-key", is_run=True) as viewer:
        browser = httpx.AsyncClient(
            transport=httpx.ASGITransport(viewer), base_url="http://127.0.0.1:8000", follow_redirects=True, timeout=None
        )
        async with browser:
            first = await browser.get("/?key=a-key")
            seen, waiting = {str(first.url)}, links(first)
            while (left := waiting - seen) and len(seen) < 12:
                page = min(left)
                seen.add(page)
                answer = await browser.get(page)
                if "/credit" in page:
                    assert "trains no policy" in answer.text, answer.text
                else:
                    assert answer.status_code == 200, f"{page}: {answer.text[:300]}"
                    waiting |= links(answer)
    assert len(seen) > 5, seen


def links(page: httpx.Response) -> set[str]:
    """Pages of the viewer's own that a page links to."""
    assert page.status_code == 200
    hrefs = re.findall(r'href="([^"#]+)', page.text)
    urls = {urljoin(str(page.url), html.unescape(link)) for link in hrefs}
    return {
        url
        for url in urls
        if url.startswith("http://127.0.0.1:8000/") and "." not in url.rpartition("/")[2] and "?" not in url
    }


RECORDED = Path(__file__).parent / "instrumentations" / "recorded"


@pytest.fixture(scope="module")
def langchain_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What OpenInference recorded of a LangChain agent with a tool: two calls, one of the tool."""
    folder = tmp_path_factory.mktemp("runs") / "langchain"
    import_traces(RECORDED / "openinference_langchain-chat.otlp.gz", folder, None, load_plugins())
    return folder


@pytest.fixture(scope="module")
def rollout(langchain_run: Path) -> dict[str, Any]:
    (row,) = list_rollouts(langchain_run)
    return row


def list_rollouts(folder: Path) -> list[dict[str, Any]]:
    listed = CliRunner().invoke(app, ["rollouts", "list", "--run", str(folder), "--json", "--limit", "1000"])
    return [json.loads(line) for line in listed.stdout.splitlines()]


async def test_an_imported_dialogue_is_shown_as_a_conversation(langchain_run: Path, rollout: dict[str, Any]) -> None:
    async with viewing(langchain_run) as client:
        page = await read_page(client, f"/rollouts/{rollout['rollout']}")
        peeked = await read_page(client, f"/rollouts?peek={rollout['rollout']}")
    articles = [attributes["id"] for tag, attributes in page.tags if tag == "article"]
    assert articles == ["call-0", "call-1"]
    words = " ".join(page.text.split())
    spoken = ("Answer in a word.", "What is the word of the day?", "look_up", "serendipity", "Serendipity.")
    assert [words.index(text) for text in spoken] == sorted(words.index(text) for text in spoken)
    assert "3 messages as in call 0" in words, "what a call repeats is not said again"
    for wrong in (
        "No call of a policy",
        "no call is known",
        "response_metadata",
        "not trained",
        "No step",
        "asked and",
    ):
        assert wrong not in page.text, wrong
    assert "Serendipity." in peeked.text and "response_metadata" not in peeked.text
    assert 'class="n extra">2<' in peeked.html.replace("\n", ""), "its calls are counted"


async def test_every_imported_call_is_an_article_of_its_rollouts_page(run_folder: Path) -> None:
    rows = await asyncio.to_thread(list_rollouts, run_folder)
    assert len(rows) > 25 and all(row["calls"] for row in rows)
    async with viewing(run_folder) as client:
        for row in rows:
            page = await read_page(client, f"/rollouts/{row['rollout']}")
            assert sum(tag == "article" for tag, _ in page.tags) == row["calls"], row["rollout"]
            assert "no call is known" not in page.text or "unmatched" in str(row), row["rollout"]
            assert "Nobody has the tokenizer" not in page.text


def test_the_terminal_shows_an_imported_dialogue_and_counts_its_calls(
    langchain_run: Path, rollout: dict[str, Any]
) -> None:
    assert rollout["calls"] == 2
    shown = CliRunner().invoke(app, ["rollouts", "show", rollout["rollout"], "--run", str(langchain_run)])
    words = " ".join(shown.stdout.split())
    assert shown.exit_code == 0, shown.output
    assert 'look_up({"day": "today"})' in words and "→ ok serendipity" in words
    assert words.count("Answer in a word.") == 1 and "3 messages as in call 0" in words
    assert "output Serendipity." in words and "response_metadata" not in words
    assert "What is the word of the day?" in words and '[["user"' not in words


async def test_the_page_of_an_imported_run_says_what_it_is_and_nothing_of_training(langchain_run: Path) -> None:
    async with viewing(langchain_run) as client:
        page = await read_page(client, "/")
    for text in ("imported", "openinference_langchain-chat.otlp.gz", "Rollouts", "sft-safe", "look_up", "curate"):
        assert text in page.text, text
    for wrong in ("resume", "steps", "grpo", "tasks a step", "Validation", "Credit", "Recipe"):
        assert wrong not in page.text, wrong
    run = CliRunner()
    listed = run.invoke(app, ["runs", "--runs", str(langchain_run.parent)], env={"COLUMNS": "140"})
    assert "imported" in listed.stdout and "100" not in listed.stdout, listed.output


def test_a_report_of_an_imported_run_has_its_dialogues(langchain_run: Path, tmp_path: Path) -> None:
    told = CliRunner().invoke(app, ["report", str(langchain_run), "--html", str(tmp_path / "report.html")])
    assert told.exit_code == 0, told.output
    text = (tmp_path / "report.html").read_text()
    assert "Serendipity." in text and "--resume" not in text


def test_tasks_of_langgraph_traces_are_what_the_agent_takes_and_answers(langchain_run: Path, tmp_path: Path) -> None:
    curated = CliRunner().invoke(app, ["curate", str(langchain_run), "--into", str(tmp_path / "rows")])
    assert curated.exit_code == 0, curated.output
    assert "states of messages" not in curated.output
    recipe = load_recipe(new_agent_of_traces(tmp_path / "mine", tmp_path / "rows"))
    (task,) = load_tasks(recipe, None).train
    assert (task.input, task.answer) == ("What is the word of the day?", "Serendipity.")

    agent = create_agent(GenericFakeChatModel(messages=iter(["Serendipity."])), [])
    state = agent.invoke({"messages": [HumanMessage(task.input)]})
    assert state["messages"][-1].content == task.answer


def test_a_reward_reads_what_the_agent_takes_and_answers_in_place_of_states(
    langchain_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("words.py").write_text(
        "def right(task, output, trajectory):\n"
        "    return float((task.input, output) == ('What is the word of the day?', 'Serendipity.'))\n"
    )
    tried = CliRunner().invoke(app, ["rescore", str(langchain_run), "--reward", "words.py:right", "--json"])
    assert json.loads(tried.stdout)["after"]["mean"] == 1.0, tried.output
    curated = ["curate", str(langchain_run), "--into", "rows", "--reward", "words.py:right", "--min-reward", "1"]
    assert CliRunner().invoke(app, curated).exit_code == 0
    assert json.loads(Path("rows", "sft.jsonl").read_text().splitlines()[0])["source"]["reward"] == 1.0


@pytest.mark.parametrize(
    ("path", "input_is"),
    [
        ("messages.0.1", "What is the word of the day?"),
        ("messages.0", ["user", "What is the word of the day?"]),
        ("messages.1", None),
        ("question", None),
    ],
)
def test_a_named_place_of_the_input_is_taken_or_refused_with_the_first_task(
    langchain_run: Path, tmp_path: Path, path: str, input_is: Any
) -> None:
    command = ["curate", str(langchain_run), "--into", str(tmp_path / "rows"), "--input", path]
    curated = CliRunner().invoke(app, [*command, "--output", "messages.-1.data.content"])
    if input_is is None:
        sentence = f"--input {path!r} does not fit task 'ed804191bf78da668098482e508f15d3': there is no "
        assert isinstance(curated.exception, ConfigError) and sentence in str(curated.exception)
        assert not (tmp_path / "rows").exists()
        return
    assert curated.exit_code == 0, curated.output
    task = json.loads((tmp_path / "rows" / "tasks.jsonl").read_text())
    assert (task["input"], task["answer"]) == (input_is, "Serendipity.")


def test_init_from_traces_needs_rows(tmp_path: Path) -> None:
    for words in (["--from", "traces"], ["--rows", str(tmp_path)], ["--from", "traces", "--rows", str(tmp_path)]):
        made = CliRunner().invoke(app, ["init", str(tmp_path / "mine"), *words])
        assert "--rows" in str(made.exception) or "lightningrl curate" in str(made.exception)
        assert not (tmp_path / "mine").exists()


@pytest.mark.slow
def test_init_from_traces_is_tuned_on_them_and_trains(first_agent: Path, warm: WarmCommand, tmp_path: Path) -> None:
    days = [(f"{day} / 6 / 2011", f"{day} June 2011") for day in range(1, 9)]
    traces = [
        {"messages": [{"role": "user", "content": date}, {"role": "assistant", "content": words}]}
        for date, words in days
    ]
    (tmp_path / "traces.jsonl").write_text("".join(json.dumps(trace) + "\n" for trace in traces))

    def run(*words: str) -> str:
        ran = warm.run("lightningrl", *words, cwd=tmp_path, environment={"COLUMNS": "160", "HF_HUB_OFFLINE": "1"})
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    run("import-traces", "traces.jsonl", "--into", "runs/traces")
    assert "next: lightningrl init my-agent --from traces --rows rows" in run(
        "curate", "runs/traces", "--into", "rows", "--near", "1", "--validation", "0.25"
    )
    run("init", "my-agent", "--from", "traces", "--rows", "rows")
    small = ("loop.tasks_per_step=2", "loop.group_size=2", "validation.every=1", "tune.epochs=30", "tune.batch=4")
    settings = [word for setting in (*small, "tune.learning_rate=1e-3") for word in ("--set", setting)]
    told = run("train", "my-agent", "--policy", str(first_agent / "starter"), "--steps", "1", *settings)
    assert "tuning: sft on 6 rows" in told
    assert (next((tmp_path / "runs").glob("*/warm_start")) / "tuning" / "policy").is_dir()
