"""Questions about a run that an import made: another reward, X-ray, pages."""

from __future__ import annotations

import html
import json
import random
import re
from pathlib import Path
from urllib.parse import urljoin

import httpx
import pytest
from planted_traces import MAKERS, plant, write_sources
from typer.testing import CliRunner

from lightningrl.commands import app
from lightningrl.plugins import load_plugins
from lightningrl_traces.importing import import_traces
from lightningrl_viewer.browser import viewer_of

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
