"""The pages Rollout, Group, System and Recipe of a recorded run, asked as a browser asks."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from recorded import RecordedRun
from viewing import ReadPage, read_page, viewing

from lightningrl.errors import StoreError
from lightningrl.types import Outcome, ToolCall, ToolStatus
from lightningrl_runs.listing import show_command
from lightningrl_server.records import AttemptEnd, ToolCallRecord
from lightningrl_server.store import SqlStore
from lightningrl_testing.store_conformance import leased, make_call, make_spec


@pytest.fixture
def run(played_run: RecordedRun) -> RecordedRun:
    return played_run


async def page_of(run: RecordedRun, address: str, status: int = 200) -> ReadPage:
    async with viewing(run.folder) as client:
        return await read_page(client, address, status)


def links(page: ReadPage) -> dict[str, str]:
    """Addresses by the key that presses them."""
    return {
        attributes["data-key"]: attributes.get("href", "") for _, attributes in page.tags if "data-key" in attributes
    }


def articles(page: ReadPage) -> list[str]:
    return [attributes["id"] for tag, attributes in page.tags if tag == "article"]


async def test_a_rollout_is_a_conversation_with_its_tools_credit_and_attempts(run: RecordedRun) -> None:
    page = await page_of(run, "/rollouts/g000000-000")
    assert articles(page) == ["call-0", "call-1"]
    for said in (
        "What costs tea?",
        "Look it up.",
        "3 €",
        "KeyError",
        "buy tea",
        "+0.667",
        "right 1.000",
        "reported polite 0.250",
        "bell",
    ):
        assert said in page.text, said
    assert "Tools that no call is known to have asked for" in page.text


async def test_breaks_retries_refusals_judges_and_missing_gradients_are_marked(run: RecordedRun) -> None:
    edited = (await page_of(run, "/rollouts/g000003-000?call=2")).text
    assert "break: history rendered anew" in edited and "judge-1" in edited
    assert "No gradient: Its role 'critic' is not trained" in edited
    assert "refused" in (await page_of(run, "/rollouts/g000000-002")).text
    failed = (await page_of(run, "/rollouts/g000000-002")).text
    assert "ValueError: no tea left" in failed and "agent error reward 0.000 trained in" in " ".join(failed.split())
    retried = (await page_of(run, "/rollouts/g000002-000")).text
    assert (
        "the worker went away" in retried
        and "infrastructure error" in retried
        and "only rollout of its group" in retried
    )


async def test_tokens_are_coloured_and_numbered_and_a_table_has_them_all(run: RecordedRun) -> None:
    page = await page_of(run, "/rollouts/g000000-001?view=tokens&call=1")
    tokens = [attributes for tag, attributes in page.tags if tag == "span" and "data-say" in attributes]
    logprobs = [float(token["data-say"].split()[1].replace("−", "-")) for token in tokens]
    shades = [min(3, int(-logprob)) for logprob in logprobs]
    assert [token["class"] for token in tokens] == [f"tok m{shade}" if shade else "tok" for shade in shades]
    advantages = await page_of(run, "/rollouts/g000000-001?view=tokens&call=1&colour=advantage")
    assert {"tok m3"} == {attributes["class"] for _, attributes in advantages.tags if "data-say" in attributes}
    assert "advantage −0.333 · version 0 · mask 1" in tokens[0]["data-say"] and "logprob −" in tokens[0]["data-say"]
    table = await page_of(run, "/rollouts/g000000-001?view=tokens&call=1&form=table")
    assert len([tag for tag, _ in table.tags if tag == "tr"]) == len(tokens) + 1
    silent = await page_of(run, "/rollouts/g000003-000?view=tokens&call=1&colour=advantage")
    assert {"tok off"} == {attributes["class"] for _, attributes in silent.tags if "data-say" in attributes}


async def test_keys_walk_calls_failures_and_to_the_group_with_the_state_in_the_address(run: RecordedRun) -> None:
    first = links(await page_of(run, "/rollouts/g000000-000"))
    assert first["t"] == "/rollouts/g000000-000?view=tokens"
    assert (first["c"], first["n"], first["]"]) == (
        "/groups/g000000",
        "/rollouts/g000000-000?call=0#call-0",
        "/rollouts/g000000-000?call=0#call-0",
    )
    second = links(await page_of(run, "/rollouts/g000000-000?call=0&view=tokens"))
    assert second["]"] == "/rollouts/g000000-000?view=tokens&call=1#call-1" and second["t"].endswith("?call=0#call-0")
    assert second["n"] == "/rollouts/g000000-002", "no failure is left here, so n goes to the next failed rollout"
    last = links(await page_of(run, "/rollouts/g000000-000?call=1"))
    assert "]" not in last and last["["].endswith("call=0#call-0") and last["p"].endswith("call=0#call-0")


async def test_another_call_has_the_tokens_as_those_of_this_one_were_shown(run: RecordedRun) -> None:
    keys = links(await page_of(run, "/rollouts/g000000-000?call=0&view=tokens&form=table&colour=logprob"))
    assert keys["]"] == "/rollouts/g000000-000?view=tokens&form=table&colour=logprob&call=1#call-1"


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("/rollouts/nobody", "no rollout 'nobody'; near it are"),
        ("/rollouts/g000000-000?call=9", "has 2 calls, numbered from 0; there is no call 9"),
        ("/rollouts/g000000-000?call=x", "call is 'x', which is no number"),
        ("/rollouts/g000000-000/text?part=nothing", "has no text 'nothing'"),
        ("/groups/nobody", "there is no group 'nobody'"),
    ],
)
async def test_what_is_not_there_is_one_sentence(run: RecordedRun, address: str, words: str) -> None:
    assert words in (await page_of(run, address, 404)).text


async def test_a_group_shows_what_is_shared_and_where_its_rollouts_part(run: RecordedRun) -> None:
    page = await page_of(run, "/groups/g000003")
    assert "They part in call 2, at token 0 of what was sampled." in page.text
    assert "2 calls are the same in all of them" in page.text
    assert "+0.500" in page.text and "−0.500" in page.text
    asked = page.text.partition("They part")[0]
    assert "task-g000003" in asked and "What costs tea?" in asked and "right answer 3 €" in asked
    assert "output buy tea" in page.text and "output sell tea" in page.text
    assert "They never part" in (await page_of(run, "/groups/g000001")).text


async def test_the_system_says_who_works_what_failed_and_what_was_refused(run: RecordedRun) -> None:
    text = (await page_of(run, "/system")).text
    for said in ("read from the run's folder", "worker-1", "g000004-000", "no tea left", "the worker went away", "400"):
        assert said in text, said


async def test_the_recipe_says_each_value_where_it_is_from_and_who_reads_it(run: RecordedRun) -> None:
    text = (await page_of(run, "/recipe?show=all")).text
    assert "loop.steps 2 --set the training loop" in text
    assert "credit.options.parts [\"dr_grpo\"] recipe credit assigner 'sum'" in text
    changed = (await page_of(run, "/recipe")).text
    assert "loop.seed" in text and "loop.seed" not in changed and "loop.group_size" in changed


async def test_a_run_without_a_recipe_is_shown_all_the_same(run: RecordedRun, tmp_path: Path) -> None:
    (tmp_path / "store.sqlite").write_bytes((run.folder / "store.sqlite").read_bytes())
    (tmp_path / "run.json").write_text("{}", encoding="utf-8")
    async with viewing(tmp_path) as client:
        text = (await read_page(client, "/rollouts/g000000-000")).text
        assert "call 0" in text and "Nobody has the tokenizer of policy policy any more" in text
        assert "that has a recipe" in (await read_page(client, "/recipe", 503)).text


async def test_threads_that_outlived_a_rollout_are_told_apart_from_refused_calls(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = await SqlStore.open(f"sqlite:///{tmp_path}/store.sqlite")
    await store.create_rollouts([make_spec("r0")])
    await store.lease("w", 60.0)
    await store.finish_and_lease(
        "r0", 1, AttemptEnd(outcome=Outcome.SUCCEEDED, left_threads=["memory-writer"]), None, 60.0
    )
    await store.close()
    (tmp_path / "run.json").write_text("{}", encoding="utf-8")
    async with viewing(tmp_path) as client:
        system = (await read_page(client, "/system")).text
        rollout = (await read_page(client, "/rollouts/r0")).text
    assert (
        "None was refused." in system
        and "Threads that outlived their rollout" in system
        and "memory-writer 1 r0" in system
    )
    assert "left threads running: memory-writer" in rollout
    await asyncio.to_thread(show_command, "r0", run=tmp_path, runs=tmp_path, full=False)
    assert "left threads memory-writer" in " ".join(capsys.readouterr().out.split())


async def test_what_an_agent_told_otherwise_is_counted_on_the_page_and_on_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = await SqlStore.open(f"sqlite:///{tmp_path}/store.sqlite")
    await store.create_rollouts([make_spec("r0")])
    await store.lease("w", 60.0)
    for status in (ToolStatus.ERROR, ToolStatus.OK):
        await store.append_tool_calls("r0", 1, [ToolCallRecord(tool_call=ToolCall(id="t", name="sql", status=status))])
    await store.finish_attempt("r0", 1, Outcome.SUCCEEDED, "forged")
    with pytest.raises(StoreError):
        await store.finish_attempt("r0", 1, Outcome.SUCCEEDED, "honest")
    await store.close()
    (tmp_path / "run.json").write_text("{}", encoding="utf-8")
    async with viewing(tmp_path) as client:
        page = (await read_page(client, "/rollouts/r0")).text
    assert "error contradicted 1" in page and "1 further results that said something else, refused" in page
    await asyncio.to_thread(show_command, "r0", run=tmp_path, runs=tmp_path, full=False)
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "→ error (contradicted 1 times; the worst stands)" in shown
        and "1 further results that said something else" in shown
    )


async def test_a_tool_call_that_cannot_be_read_is_marked_on_the_page_and_on_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sentence = "'<tool_call>{' is no tool call: the call has no end; expected <tool_call>…</tool_call>"
    store = await SqlStore.open(f"sqlite:///{tmp_path}/store.sqlite")
    await store.create_rollouts([make_spec("r0")])
    await store.append_call(make_call(await leased(store), "c0", [1], [2], malformed=(sentence,)))
    await store.finish_attempt("r0", 1, Outcome.SUCCEEDED, "")
    await store.close()
    (tmp_path / "run.json").write_text("{}", encoding="utf-8")
    async with viewing(tmp_path) as client:
        page = (await read_page(client, "/rollouts/r0")).text
    assert "malformed tool call" in page and sentence in page
    await asyncio.to_thread(show_command, "r0", run=tmp_path, runs=tmp_path, full=False)
    assert sentence in " ".join(capsys.readouterr().out.split())
