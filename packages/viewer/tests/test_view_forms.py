"""Tags, notes and deletion in the folder of runs: a form of these pages does it, nothing else can, and nothing that is no
run of ours goes."""

from __future__ import annotations

import fcntl
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from recorded import RECIPE, write_recipe

from lightningrl.errors import RunFolderError
from lightningrl_runs.notes import RunNotes, read_notes, write_notes
from lightningrl_runs.origin import read_models
from lightningrl_runs.runs import read_runs
from lightningrl_server.store import SqlStore
from lightningrl_viewer.app import create_viewer
from lightningrl_viewer.runs import OneFolder, Runs, RunsFolder, remove_run

KEY = "the-view-key"
ORIGIN = {"origin": "http://127.0.0.1"}
ODD = "lr #2?"


async def make_run(folder: Path) -> Path:
    """A run that has just begun."""
    (folder / "logs").mkdir(parents=True)
    write_recipe(folder, RECIPE)
    await (await SqlStore.open(f"sqlite:///{folder / 'store.sqlite'}")).close()
    (folder / "metrics.jsonl").write_text('{"step": 1, "rollouts": 4, "reward": 0.5}\n')
    (folder / "logs" / "server.log").touch()
    return folder


@pytest.fixture
async def folder(tmp_path: Path) -> Path:
    """A folder of two runs, and of something that is none."""
    for name in ("first", ODD):
        await make_run(tmp_path / name)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "run.json").write_text("{}")
    return tmp_path


@asynccontextmanager
async def browsing(runs: Runs, *, may_write: bool = True) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_viewer(runs, key=KEY, may_write=may_write))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as browser:
        await browser.get("/", params={"key": KEY})
        yield browser
    if not isinstance(runs, OneFolder | RunsFolder):
        return
    await runs.close()


async def read_token(browser: httpx.AsyncClient, path: str) -> str:
    found = re.search(r'name="token" value="([0-9a-f]+)"', (await browser.get(path)).text)
    assert found is not None
    return found[1]


async def test_tags_and_a_note_are_kept_shown_and_searched(folder: Path) -> None:
    async with browsing(RunsFolder(folder)) as browser:
        path = f"/runs/{quote(ODD)}/notes"
        fields = {"token": await read_token(browser, path), "tags": "baseline, lr=1e-4", "note": "<b>for</b> the talk"}
        saved = await browser.post(path, data=fields, headers=ORIGIN)
        assert (saved.status_code, saved.headers["location"]) == (303, "/")
        assert read_notes(folder / ODD) == RunNotes(tags=("baseline", "lr=1e-4"), note="<b>for</b> the talk")
        page = (await browser.get("/")).text
        assert "lr=1e-4" in page and "&lt;b&gt;for&lt;/b&gt; the talk" in page and "<b>for" not in page
        for query, shown in (("tag=baseline", True), ("q=TALK", True), ("tag=other", False), ("q=nothing", False)):
            rows = re.findall("<tr data-row.*?</tr>", (await browser.get(f"/?{query}")).text, re.DOTALL)
            assert len(rows) == shown, query
        wrong = await browser.post(path, data={**fields, "tags": "-no"}, headers=ORIGIN)
        assert wrong.status_code == 400 and "is no tag" in wrong.text
        assert "baseline" in (await browser.get(f"/runs/{quote(ODD)}/")).text


async def test_a_run_is_deleted_after_a_page_that_asks(folder: Path) -> None:
    async with browsing(RunsFolder(folder)) as browser:
        await browser.get("/runs/first/")  # it is open now
        asked = (await browser.get("/runs/first/delete")).text
        assert "Delete it for good" in asked and "files" in asked and (folder / "first").exists()
        path = "/runs/first/delete"
        fields = {"token": await read_token(browser, path), "run": "first"}
        assert (await browser.post(path, data=fields, headers=ORIGIN)).status_code == 303
        assert not (folder / "first").exists()
        assert (await browser.get("/runs/first/")).status_code == 404
        assert "first" not in re.findall(r'runs/([^"/]+)/"', (await browser.get("/")).text)


async def test_what_is_not_the_runs_stays(folder: Path) -> None:
    mine = folder / "first" / "thesis.tex"
    mine.write_text("my words")
    (folder / "first" / "logs" / "mine.log").write_text("mine")
    async with browsing(RunsFolder(folder)) as browser:
        path = "/runs/first/delete"
        fields = {"token": await read_token(browser, path), "run": "first"}
        said = await browser.post(path, data=fields, headers=ORIGIN)
    assert "2 more in its folder" in said.text and "thesis.tex" in said.text
    assert sorted(file.name for file in (folder / "first").iterdir()) == ["logs", "thesis.tex"]
    assert mine.read_text() == "my words"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://127.0.0.1:9999"}, 403),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "https://127.0.0.1"}, 403),
        ({"origin": "http://["}, 403),
        ({**ORIGIN, "sec-fetch-site": "same-site"}, 403),
        ({**ORIGIN, "content-type": "text/plain"}, 403),
        ({**ORIGIN, "content-type": "application/json"}, 403),
    ],
)
async def test_a_form_of_elsewhere_deletes_nothing(folder: Path, headers: dict[str, str], status: int) -> None:
    async with browsing(RunsFolder(folder)) as browser:
        fields = {"token": await read_token(browser, "/runs/first/delete"), "run": "first"}
        refused = await browser.post("/runs/first/delete", data=fields, headers=headers)
        assert refused.status_code == status
        browser.cookies.clear()
        assert (await browser.post("/runs/first/delete", data=fields, headers=ORIGIN)).status_code == 403
    assert (folder / "first" / "store.sqlite").exists()


@pytest.mark.parametrize(
    "fields",
    [{}, {"token": "0" * 64}, {"token": "ü"}, {"run": ODD}, {"run": ""}, {"note": "x" * 70_000}, {"n" * 9: "\udcff"}],
)
async def test_a_form_without_its_token_or_of_another_run_deletes_nothing(folder: Path, fields: dict[str, str]) -> None:
    async with browsing(RunsFolder(folder)) as browser:
        token = await read_token(browser, "/runs/first/delete")
        body = {"token": token, **fields} if fields.keys() - {"token"} else fields
        data = "&".join(f"{name}={quote(value, errors='surrogateescape')}" for name, value in body.items())
        form = {**ORIGIN, "content-type": "application/x-www-form-urlencoded"}
        assert (await browser.post("/runs/first/delete", content=data, headers=form)).status_code == 400
    assert (folder / "first" / "store.sqlite").exists()


@pytest.mark.parametrize("name", ["photos", "..", "%2e%2e", "first%2f..%2fphotos", "nowhere", "."])
async def test_what_is_no_run_has_no_form(folder: Path, name: str) -> None:
    async with browsing(RunsFolder(folder)) as browser:
        token = await read_token(browser, "/runs/first/delete")
        for path in (f"/runs/{name}/delete", f"/runs/{name}/notes"):
            answer = await browser.post(path, data={"token": token, "run": name}, headers=ORIGIN)
            assert answer.status_code in {400, 404, 405}
    assert (folder / "photos" / "run.json").exists() and (folder / "first" / "store.sqlite").exists()


async def test_pages_that_only_show_offer_and_take_nothing(folder: Path) -> None:
    for runs, path in ((RunsFolder(folder), "/runs/first"), (OneFolder(folder / "first"), "")):
        async with browsing(runs, may_write=isinstance(runs, OneFolder)) as browser:
            page = (await browser.get("/")).text
            assert "/notes" not in page and "/delete" not in page
            for form in ("notes", "delete"):
                assert (await browser.get(f"{path}/{form}")).status_code == 404
                answer = await browser.post(f"{path}/{form}", data={"run": "first"}, headers=ORIGIN)
                assert answer.status_code == 405
    assert (folder / "first" / "store.sqlite").exists()


def test_a_link_a_run_that_trains_and_another_programs_folder_are_not_deleted(folder: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(folder / "first")
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "run.json").write_text(json.dumps({"source": "make"}))
    (theirs / "store.sqlite").write_text("a shop")
    for place in (link, theirs, tmp_path / "absent", folder / "photos"):
        with pytest.raises(RunFolderError, match="no run of ours"):
            remove_run(place)
    write_notes(folder / "first", RunNotes.of(["keep"]))
    with (folder / "first" / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RunFolderError, match="is training"):
            remove_run(folder / "first")
    assert (folder / "first" / "store.sqlite").exists() and (theirs / "store.sqlite").read_text() == "a shop"
    assert remove_run(folder / "first") == [] and not (folder / "first").exists()


async def test_deletion_of_a_hostile_folder_follows_no_link_out_of_it(folder: Path, tmp_path: Path) -> None:
    victim = await make_run(tmp_path / "victim")
    checkpoint = victim / "checkpoints" / "step-000001"
    for file in (victim / "deep" / "f", checkpoint / "policies" / "f", checkpoint / "loop.json"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("mine")
    (checkpoint / "files.json").write_text(json.dumps({"files of this checkpoint": ["policies/f"]}))
    for name in ("branches/step-1/a/run.json", "evaluations/a/b/run.json", "evaluations/a.json", "tune/rows.json"):
        (victim / name).parent.mkdir(parents=True, exist_ok=True)
        (victim / name).write_text('{"evaluations": 1, "comparison": 2}')
    stage = await make_run(victim / "warm_start" / "teacher")
    before = sorted(path for path in victim.rglob("*"))

    first = folder / "first"
    (first / "lnk").symlink_to(victim)
    for name in ("branches", "evaluations", "tune", "warm_start", "tensorboard"):
        (first / name).symlink_to(victim / name if name != "tensorboard" else victim)
    hostile = first / "checkpoints" / "step-000001"
    hostile.mkdir(parents=True)
    (hostile / "policies").symlink_to(checkpoint / "policies")
    (hostile / "up").symlink_to(victim)
    names = ["policies/f", "up/deep/f", "up/store.sqlite", "../../../victim/deep/f", str(victim / "deep" / "f")]
    (hostile / "files.json").write_text(json.dumps({"files of this checkpoint": names}))
    origin = json.loads((first / "run.json").read_text())
    made = ["lnk/deep", "tensorboard/deep", "lnk/../victim/deep", "../victim", "tensorboard/store.sqlite"]
    (first / "run.json").write_text(json.dumps({**origin, "made": made}))

    remove_run(first)

    assert sorted(path for path in victim.rglob("*")) == before
    assert stage.is_dir() and (checkpoint / "loop.json").read_text() == "mine"
    assert not (first / "store.sqlite").exists() and not (hostile / "policies").is_symlink()

    whole = await make_run(tmp_path / "whole")
    (whole / "checkpoints").symlink_to(victim / "checkpoints")
    assert remove_run(whole) == ["checkpoints"]
    assert sorted(path for path in victim.rglob("*")) == before


@pytest.mark.parametrize("odd", [None, True, 5, "a\0b", ["a\0/b", "x" * 5_000 + "/b", 7], {"policy": [1], "a": "a\0b"}])
async def test_a_folder_whose_files_say_anything_is_listed_and_deleted(folder: Path, odd: Any) -> None:
    first = folder / "first"
    for name in ("made", "models", "files", "settings", "traces", "store", "run", "folder"):
        origin = {"source": None, "models": {}, "settings": {}, name: odd}
        (first / "run.json").write_text(json.dumps(origin))
        assert len(read_runs(folder)) == 2 and isinstance(read_models(first), dict)
    (first / "run.json").write_text(json.dumps({"source": None, "models": {}, "settings": {}, "made": odd}))
    checkpoint = first / "checkpoints" / "step-000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "files.json").write_text(json.dumps({"files of this checkpoint": odd}))
    deep = "import os, sys; os.chdir(sys.argv[1]); [(os.mkdir('a'), os.chdir('a')) for _ in range(1_200)]"
    subprocess.run([sys.executable, "-c", deep, str(first)], check=True)
    assert {*remove_run(first)} <= {"a", "checkpoints"}
    assert not (first / "store.sqlite").exists()
    subprocess.run(["rm", "-r", str(first)], check=True)


async def test_a_name_that_reorders_text_is_shown_and_not_obeyed(folder: Path) -> None:
    name = "a\u202egnp.exe"
    await make_run(folder / name)
    async with browsing(RunsFolder(folder)) as browser:
        for path in ("/", f"/runs/{quote(name)}/", f"/runs/{quote(name)}/notes", f"/runs/{quote(name)}/delete"):
            page = await browser.get(path)
            assert page.status_code == 200, path
            assert "\u202e" not in page.text and "\\u202e" in page.text, path


async def test_an_origin_that_is_none_is_refused_before_any_key(folder: Path) -> None:
    transport = httpx.ASGITransport(create_viewer(RunsFolder(folder), key=KEY, may_write=True))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as browser:
        for origin in ("http://[", "https://127.0.0.1", "null"):
            assert (await browser.get("/", headers={"origin": origin})).status_code == 403
