"""The pages of a real run that has ended: what they show is what the run recorded, each state has an address, bad input
is a sentence."""

from __future__ import annotations

import html
import itertools
import json
import re
import shutil
import sqlite3
import statistics
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlencode

import httpx
import pytest

from lightningrl.figures import wilson
from lightningrl.records import RolloutFilter, RolloutRecord, Score
from lightningrl.sanitize import as_text, one_line
from lightningrl.types import Outcome, RolloutMode, RolloutSpec, Task
from lightningrl_runs.metrics import read_metrics
from lightningrl_runs.reader import open_run
from lightningrl_runs.summary import interval, read_summary
from lightningrl_server.store import SqlStore
from lightningrl_testing.store_conformance import make_spec
from lightningrl_training.run import Run
from lightningrl_viewer.app import create_viewer
from lightningrl_viewer.page import ViewedRun
from lightningrl_viewer.report import make_report
from lightningrl_viewer.runs import OneFolder, OneRun, Runs, RunsFolder

KEY = "the-view-key"


@asynccontextmanager
async def browsing(folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A browser before the viewer of a run, or of a folder of runs, that was let in."""
    if (folder / "store.sqlite").is_file():
        async with (
            open_run(folder) as run,
            _browser(OneRun(ViewedRun(name=folder.name, folder=folder, run=run))) as browser,
        ):
            yield browser
        return
    several = RunsFolder(folder)
    try:
        async with _browser(several) as browser:
            yield browser
    finally:
        await several.close()


@asynccontextmanager
async def _browser(runs: Runs) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_viewer(runs, key=KEY))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as browser:
        await browser.get("/", params={"key": KEY})
        yield browser


async def page(browser: httpx.AsyncClient, path: str, status: int = 200) -> str:
    answer = await browser.get(path)
    assert answer.status_code == status, answer.text
    return html.unescape(answer.text)


def listed(text: str) -> list[str]:
    """The rollouts of a table, in order."""
    return re.findall(r'data-open href="[^"]*rollouts/([^"]+)"', text)


@pytest.fixture(scope="module")
def records(recorded_run: Path) -> dict[str, RolloutRecord]:
    return {record.spec.id: record for record in Run(recorded_run).rollouts(RolloutFilter(limit=1000))}


async def test_the_run_says_what_was_measured(recorded_run: Path) -> None:
    rows = read_metrics(recorded_run / "metrics.jsonl")
    async with open_run(recorded_run) as run:
        summary = await read_summary(run, recorded_run)
    trained = [row for row in rows if "reward" in row]
    assert [(point.step, pytest.approx(point.mean)) for point in summary.train] == [
        (row["step"], row["reward"]) for row in trained
    ]
    checked = [(row["step"], row["validation/reward"]) for row in rows if "validation/reward" in row]
    assert [(point.step, pytest.approx(point.mean)) for point in summary.validation] == checked
    assert [dict(line.endings) for line in summary.steps] == [
        {"succeeded": row["outcome/succeeded"]} for row in trained
    ]
    sampled = sum(row.get("completion_tokens", 0) + row.get("validation/completion_tokens", 0) for row in rows)
    assert summary.bill.completion_tokens == sampled
    assert sum(summary.bill.seconds.values()) == pytest.approx(sum(row["seconds"] for row in trained))
    assert not summary.is_live
    counted = sum(row.get("rollouts", 0) + row.get("validation/rollouts", 0) for row in rows)
    async with browsing(recorded_run) as browser:
        text = await page(browser, "/")
    a_rollout = {"read (prompts)": counted, "sampled": counted, "trained": sum(row["rollouts"] for row in trained)}
    for name, rollouts in a_rollout.items():
        line = re.search(re.escape(f"<td>{name}</td>") + r'.*?class="n">([\d,]+)<.*?class="n">([\d,]+)<', text)
        assert line is not None, name
        tokens, each = (int(number.replace(",", "")) for number in line.groups())
        assert each == round(tokens / rollouts), f"{name}: of the rollouts whose tokens they are"
    assert all(f">{row['reward']:.3f}<" in text for row in trained)
    assert text.count('class="dot"') == len(trained) + len(checked)


async def test_what_intermediate_rewards_pay_stands_beside_the_rewards(recorded_run: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(recorded_run, tmp_path / "mine"))
    with (folder / "metrics.jsonl").open("a") as log:
        log.write(json.dumps({"step": 1, "air/tool_status": 0.625, "air/correlation": 0.1}) + "\n")
    async with browsing(folder) as browser:
        text = await page(browser, "/")
    assert re.search(r"tool_status \(intermediate\).*?0\.625", text, re.DOTALL) and "correlation (" not in text


async def test_an_intervals_width_is_that_of_the_groups_means(
    recorded_run: Path, records: dict[str, RolloutRecord]
) -> None:
    """Rollouts of a group share a task: counted one by one they would promise too much."""
    async with open_run(recorded_run) as run:
        first = (await read_summary(run, recorded_run)).train[0]
    groups: dict[str, list[float]] = {}
    for record in records.values():
        if record.trained_step == 1 and record.reward is not None:
            groups.setdefault(record.spec.group_id, []).append(record.reward)
    means = [statistics.fmean(rewards) for rewards in groups.values()]
    spread, of_mean = first.mean * (1 - first.mean), statistics.variance(means) / len(means)
    draws = min(32.0, max(4.0, spread / of_mean))  # as many say as much as 32 rollouts of four tasks
    assert len(means) == 4
    assert (first.low, first.high) == pytest.approx(wilson(first.mean, draws))


@pytest.mark.parametrize(
    ("groups", "quantile"), [(2, 12.706), (3, 4.303), (4, 3.182), (6, 2.571), (11, 2.228), (31, 2.042), (1000, 1.962)]
)
def test_few_groups_make_a_wide_interval(groups: int, quantile: float) -> None:
    found = interval(0.0, 1.0, groups)
    assert found is not None
    assert found[1] * (groups - 1) ** 0.5 == pytest.approx(quantile, rel=0.01)
    assert interval(0.5, 0.0, 1) is None


async def test_groups_that_disagree_most_come_first_and_pages_have_each_rollout_once(
    recorded_run: Path, records: dict[str, RolloutRecord]
) -> None:
    async with browsing(recorded_run) as browser:
        found, address = list[str](), "/rollouts"
        while address:
            text = await page(browser, address)
            found += listed(text)
            further = re.search(r'href="([^"]+)"[^>]*rel="next"', text)
            address = further[1] if further else ""
    assert sorted(found) == sorted(records) and len(found) > 60
    groups: dict[str, list[float]] = {}
    for record in records.values():
        if record.reward is not None:
            groups.setdefault(record.spec.group_id, []).append(record.reward)
    rewards = [groups[records[name].spec.group_id] for name in found]
    spreads = [statistics.pstdev(of_group) if len(of_group) > 1 else -1 for of_group in rewards]
    assert all(before >= after - 1e-9 for before, after in itertools.pairwise(spreads))
    assert spreads[0] > 0


@pytest.mark.parametrize("sort", ["task", "newest", "worst", "best", "slowest"])
async def test_another_order_has_each_rollout_once_too(
    recorded_run: Path, records: dict[str, RolloutRecord], sort: str
) -> None:
    async with browsing(recorded_run) as browser:
        found, address = list[str](), f"/rollouts?sort={sort}"
        while address:
            text = await page(browser, address)
            found += listed(text)
            further = re.search(r'href="([^"]+)"[^>]*rel="next"', text)
            address = further[1] if further else ""
    assert sorted(found) == sorted(records)
    rewards = [records[name].reward or 0.0 for name in found]
    if sort in {"worst", "best"}:
        assert rewards == sorted(rewards, reverse=sort == "best")


async def test_a_list_says_what_came_out_of_each_rollout(recorded_run: Path, records: dict[str, RolloutRecord]) -> None:
    async with browsing(recorded_run) as browser:
        text = await page(browser, "/rollouts?sort=newest")
    rows = re.findall(r"<tr data-row.*?</tr>", text, re.DOTALL)
    for name, row in zip(listed(text), rows, strict=True):
        record = records[name]
        said = record.attempts[-1].error or record.attempts[-1].output
        (cell,) = re.findall(r'<td class="text output">(.*?)</td>', row, re.DOTALL)
        assert one_line(as_text(said), 160) in cell
        assert (
            record.spec.task.answer is None
            or record.attempts[-1].error
            or f'<td class="text answer"><bdi>{as_text(record.spec.task.answer)[:30]}' in row
        )


async def test_choices_narrow_the_list_and_their_numbers_are_right(
    recorded_run: Path, records: dict[str, RolloutRecord]
) -> None:
    of_step = [record for record in records.values() if record.trained_step == 2]
    solved = [
        record for record in records.values() if record.reward == 1.0 and record.spec.mode is RolloutMode.VALIDATION
    ]
    task = of_step[0].spec.task.id
    of_task = [record for record in records.values() if record.spec.task.id == task]
    expected = {
        "step=2&mode=train": len(of_step),
        "from=1&to=2&mode=train": len([record for record in records.values() if record.trained_step in {1, 2}]),
        "mode=validation&reward=1.0": len(solved),
        f"task={task}": len(of_task),
        "reward=none": 0,
        "mark=cut": None,
        "mark=silent&mode=train": None,
        "q=v000001": len([name for name in records if name.startswith("v000001")]),
        "q=100%25": 0,
        "outcome=agent_error": 0,
        "outcome=succeeded": len(records),
    }
    async with browsing(recorded_run) as browser:
        for query, number in expected.items():
            text = await page(browser, f"/rollouts?{query}")
            shown = re.search(r'<span class="muted">(\d[\d,]*\d|\d)', text)
            assert shown is not None
            if number is not None:
                assert int(shown[1].replace(",", "")) == number, query
            assert len(listed(text)) == min(60, int(shown[1].replace(",", ""))), query


async def test_a_facet_counts_what_choosing_it_gives(recorded_run: Path) -> None:
    async with browsing(recorded_run) as browser:
        text = await page(browser, "/rollouts?step=1")
        mean = '(?:<span class="n muted">[^<]*</span>)?'
        choices = re.findall(rf'<li><a href="([^"]+)"><bdi class="choice">[^<]*</bdi>{mean}<span class="n">(\d+)', text)
        choices = [(address, number) for address, number in choices if "role=" not in address]
        assert len(choices) > 5
        for address, number in choices:
            shown = re.search(r'<span class="muted">(\d[\d,]*\d|\d)', await page(browser, address))
            assert shown is not None and shown[1].replace(",", "") == number, address


async def reward_run(
    folder: Path, rewards: Sequence[float], *, group: int = 8, mode: RolloutMode = RolloutMode.TRAIN
) -> None:
    """A store of rollouts that earned these."""
    store = await SqlStore.open(f"sqlite:///{folder / 'store.sqlite'}")
    specs = [
        replace(make_spec(f"r{number:03d}"), group_id=f"g{number // group}", mode=mode, step=number // group)
        for number in range(len(rewards))
    ]
    await store.create_rollouts(specs)
    for spec, reward in zip(specs, rewards, strict=True):
        assert await store.lease("w", 60.0) is not None
        await store.finish_attempt(spec.id, 1, Outcome.SUCCEEDED)
        await store.set_scores([Score(rollout_id=spec.id, attempt=1, reward=reward)])
    await store.close()


@pytest.mark.parametrize(
    ("rewards", "choices"),
    [
        (
            [number / 10 for number in range(11)],
            {"0.00 to 0.20": 2, "0.20 to 0.40": 2, "0.40 to 0.60": 2, "0.60 to 0.80": 2, "0.80 to 1.00": 3},
        ),
        ([-1.0, -1.0, 1.0], {"−1.00": 2, "1.00": 1}),
    ],
    ids=["tenths", "right or wrong"],
)
async def test_a_facet_of_partial_rewards_counts_what_choosing_it_gives(
    tmp_path: Path, rewards: list[float], choices: dict[str, int]
) -> None:
    """Eleven tenths were shown as 0.00 and 1.00, and a range's end was in it and in the next."""
    await reward_run(tmp_path, rewards)
    async with browsing(tmp_path) as browser:
        text = await page(browser, "/rollouts")
        found = re.findall(
            r'<a href="(/rollouts[?]reward=[^"]+)"><bdi class="choice">([^<]*)</bdi><span class="n">(\d+)', text
        )
        assert {name: int(number) for _, name, number in found} == choices
        for address, number in [
            *((address, number) for address, _, number in found),
            ("/rollouts?reward=-0.35..0.35", None),
        ]:
            text = await page(browser, address)
            shown = re.search(r'<span class="muted">(\d+)', text)
            assert shown is not None and int(shown[1]) == len(listed(text)) == int(number or shown[1]), address
        assert "reward is 'nan'; write a number" in await page(browser, "/rollouts?reward=nan", 404)


async def test_a_group_larger_than_its_page_has_the_mean_of_all(tmp_path: Path) -> None:
    """Of 40 rollouts with the first 32 wrong it said: 32 rollouts, reward 0.000, nothing to learn."""
    await reward_run(tmp_path, [float(number >= 32) for number in range(40)], group=40)
    async with browsing(tmp_path) as browser:
        text = await page(browser, "/groups/g0")
    assert "the first 32 of 40 rollouts" in text and "reward 0.200 ± 0.400" in text and "nothing to learn" not in text
    assert len(listed(text)) == 32


async def test_of_equal_validations_the_first_is_the_best_as_it_is_for_checkpoints(tmp_path: Path) -> None:
    await reward_run(tmp_path, [0.0, 1.0, 1.0], group=1, mode=RolloutMode.VALIDATION)
    async with browsing(tmp_path) as browser:
        text = await page(browser, "/")
    assert re.search(r"Best validation.*?1\.000.*?step 1<", text)


async def test_equal_rewards_of_any_size_have_a_curve(tmp_path: Path) -> None:
    await reward_run(tmp_path, [1e17, 1e17])
    async with browsing(tmp_path) as browser:
        assert 'class="chart"' in await page(browser, "/")


async def test_a_peek_shows_the_task_what_was_said_and_what_it_earned(
    recorded_run: Path, records: dict[str, RolloutRecord]
) -> None:
    name, record = next(item for item in records.items() if item[1].reward == 1.0)
    async with browsing(recorded_run) as browser:
        text = await page(browser, f"/rollouts?peek={name}")
    peek = text[text.index('id="peek"') :]
    assert name in peek and record.spec.task.id in peek and "reward <b>1.000</b>" in peek
    said = record.attempts[-1].output
    assert str(said) in peek or json.dumps(said) in peek


async def test_a_task_that_is_called_as_it_asks_is_said_once(tmp_path: Path) -> None:
    store, question = await SqlStore.open(f"sqlite:///{tmp_path / 'store.sqlite'}"), "What is 39 plus 22?"
    try:
        await store.create_rollouts([RolloutSpec(id="g0-0", group_id="g0", task=Task(id=question, input=question))])
    finally:
        await store.close()
    async with browsing(tmp_path) as browser:
        for path in ("/rollouts/g0-0", "/rollouts?peek=g0-0"):
            text = await page(browser, path)
            assert text[text.index('id="peek"' if "peek" in path else "<aside") :].count(question) == 1, path


async def test_what_does_not_exist_is_a_sentence(recorded_run: Path) -> None:
    asked = {
        "/nowhere": "there is no page '/nowhere' here",
        "/rollouts?step=x": "step is 'x', which is no number",
        "/rollouts?step=99999999999": "there is no step 99999999999",
        "/rollouts?mode=dance": "there is no mode 'dance'; choose of: train, validation, branch",
        "/rollouts?reward=a..b": "reward is 'a..b'; write a number",
        "/rollouts?sort=x": "there is no sort 'x'",
        "/rollouts?peek=nobody": "no rollout 'nobody'; near it are",
        "/rollouts?after=nobody": "no rollout 'nobody' to go on from",
    }
    async with browsing(recorded_run) as browser:
        for path, sentence in asked.items():
            assert sentence in await page(browser, path, 404), path
        assert not listed(await page(browser, "/rollouts?task=<script>alert(1)</script>&role=%27&tool=%22"))


async def test_what_somebody_searches_for_is_text(recorded_run: Path) -> None:
    async with browsing(recorded_run) as browser:
        answer = await browser.get(
            "/rollouts", params={"q": '"><script>alert(1)</script>', "task": "<img src=x onerror=alert(1)>"}
        )
    assert "<script>alert" not in answer.text and "<img" not in answer.text


async def test_runs_of_a_folder_stand_beside_each_other_and_are_compared(recorded_run: Path, tmp_path: Path) -> None:
    for name, rate in (("a", 0.1), ("b", 0.2)):
        shutil.copytree(recorded_run, tmp_path / name, ignore=shutil.ignore_patterns("checkpoints"))
        recipe = json.loads((tmp_path / name / "recipe.json").read_text())
        recipe["sampling"]["top_p"] = rate
        (tmp_path / name / "recipe.json").write_text(json.dumps(recipe))
    (tmp_path / "b" / "metrics.jsonl").write_text("{}\n")
    for name in ("begun", "opened"):  # as a run that is just starting has its files, a moment later with a journal
        (tmp_path / name).mkdir()
        for file in ("run.json", "store.sqlite"):
            (tmp_path / name / file).touch()
    with closing(sqlite3.connect(tmp_path / "opened" / "store.sqlite")) as database:
        database.execute("PRAGMA journal_mode = WAL")
    rows = read_metrics(tmp_path / "a" / "metrics.jsonl")
    steps = len([row for row in rows if "rollouts" in row])
    recipe = json.loads((tmp_path / "a" / "recipe.json").read_text())
    recipe["loop"]["steps"] = steps + 3
    (tmp_path / "a" / "recipe.json").write_text(json.dumps(recipe))
    async with browsing(tmp_path) as browser:
        text = await page(browser, "/")
        assert f">{steps} of {steps + 3}<" in text, "a run that ended early"
        assert set(re.findall(r'href="/runs/(\w+)/"', text)) == {"a", "b", "begun", "opened"}
        assert "sampling.top_p 0.1" in text and "is no metrics entry" in text
        (tmp_path / "b" / "metrics.jsonl").unlink()
        compared = await page(browser, "/?compare=a&compare=b")
        assert compared.count('class="chart"') == 2 and "sampling.top_p" in compared
        assert "Their recipes are the same" not in compared
        assert listed(await page(browser, "/runs/a/rollouts"))
        assert "there is no run 'c'" in await page(browser, "/?compare=c", 404)
        assert "there is no run '..'" in await page(browser, "/runs/%2e%2e/", 404)
        for name in ("a" * 5000, "é" * 200, "%00", "a%00"):
            assert "there is no run" in await page(browser, f"/runs/{name}/rollouts", 404)
        for name in ("begun", "opened"):
            assert "its run is just starting" in await page(browser, f"/runs/{name}/", 503)


async def test_a_form_hands_back_a_value_that_a_page_may_not_hold(recorded_run: Path) -> None:
    async with browsing(recorded_run) as browser:
        first = await page(browser, "/rollouts?tool=%1B%5D0%E2%80%AE%25+%2B")
        field = re.search(r'name="(tool\*)" value="([^"]+)"', first)
        assert field is not None and field[2] == "%1B%5D0%E2%80%AE%25%20%2B"
        again = await page(browser, f"/rollouts?{urlencode({field[1]: field[2]})}")
    assert again == first


async def test_older_runs_and_a_comparison_keep_what_was_chosen(recorded_run: Path, tmp_path: Path) -> None:
    """The second page was that of all runs, and comparing forgot the search and the runs of other pages."""
    for number in range(42):
        for name in (f"mine-{number:02d}", f"other-{number:02d}"):
            (tmp_path / name).mkdir()
            for file in ("run.json", "recipe.json", "store.sqlite", "metrics.jsonl"):
                shutil.copy(recorded_run / file, tmp_path / name)
    async with browsing(tmp_path) as browser:
        first = await page(browser, "/?q=mine&compare=mine-03")
        (older,) = re.findall(r'href="([^"]+)"[^>]*rel="next"', first)
        second = await page(browser, older)
    runs = (
        re.findall(r'data-open href="/runs/([^/"]+)/"', first),
        re.findall(r'data-open href="/runs/([^/"]+)/"', second),
    )
    assert (len(runs[0]), len(runs[1])) == (40, 2) and all(name.startswith("mine") for part in runs for name in part)
    assert 'class="chart"' in second
    kept = re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', second[second.index("</section>") :])
    assert kept == [("q", "mine"), ("after", "40"), *([] if "mine-03" in runs[1] else [("compare", "mine-03")])]


@pytest.mark.parametrize("name", ["lr#2", "done?", "50%25 a"])
async def test_a_run_of_any_name_has_pages(recorded_run: Path, tmp_path: Path, name: str) -> None:
    """Links of `lr#2` led to the run `lr`; the store of `done?` was looked for, and written, in a folder `done`."""
    shutil.copytree(recorded_run, tmp_path / name, ignore=shutil.ignore_patterns("checkpoints"))
    async with browsing(tmp_path) as browser:
        (address,) = re.findall(r'data-open href="([^"]+)"', await page(browser, "/"))
        text = await page(browser, address)
        for link in re.findall(r'<a href="([^"]+)"[^>]*data-key="g [lse]"', text):
            assert "Not found" not in await page(browser, link), link


async def test_a_run_that_is_written_over_is_read_anew(recorded_run: Path, tmp_path: Path) -> None:
    """After `train --overwrite` a viewer went on to show the rollouts that were gone, beside the new run's metrics."""
    folder = tmp_path / "mine"
    shutil.copytree(recorded_run, folder, ignore=shutil.ignore_patterns("checkpoints"))
    one, several = OneFolder(folder), RunsFolder(tmp_path)
    async with _browser(one) as browser, _browser(several) as lister:
        assert "r000" not in listed(await page(browser, "/rollouts")) + listed(
            await page(lister, "/runs/mine/rollouts")
        )
        for file in folder.glob("store.sqlite*"):
            file.unlink()
        await reward_run(folder, [1.0])
        assert [listed(await page(browser, "/rollouts")), listed(await page(lister, "/runs/mine/rollouts"))] == [
            ["r000"],
            ["r000"],
        ]
        shutil.rmtree(folder)
        assert "name the folder of a run" in await page(browser, "/", 503)
    await one.close()
    await several.close()


async def test_a_run_without_a_step_has_pages_too(tmp_path: Path) -> None:
    await (await SqlStore.open(f"sqlite:///{tmp_path / 'store.sqlite'}")).close()
    async with browsing(tmp_path) as browser:
        assert "Nothing was rewarded yet" in await page(browser, "/")
        assert "No rollout is like this" in await page(browser, "/rollouts")


async def test_a_report_is_one_file_that_needs_nothing_else(recorded_run: Path) -> None:
    async with open_run(recorded_run) as run:
        text = await make_report(run, recorded_run)
    assert not re.search(r"<script|<link|\bsrc=|url\(|\shref=\"(?!#)", text)
    assert text.count('class="told"') == 24 and "Reward by step" in text and "--accent:" in text


async def test_a_report_of_more_steps_than_it_lists_says_so(recorded_run: Path, tmp_path: Path) -> None:
    shutil.copytree(recorded_run, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints"))
    row = read_metrics(recorded_run / "metrics.jsonl")[-1]
    rows = [json.dumps({**row, "step": step, "rollouts": 4}) for step in range(1, 101)]
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    async with open_run(tmp_path / "run") as run:
        text = await make_report(run, tmp_path / "run")
    assert "the newest 60 of 100" in text
