"""Runs become rows: what the agents were asked comes back as messages that the gateway renders to the recorded ids."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from model_families import FAMILIES, Family, build_tokenizer
from openai import AsyncOpenAI
from recorded import RECIPE, record_run, write_recipe
from typer.testing import CliRunner

from lightningrl.commands import app
from lightningrl.errors import ConfigError, RunFolderError
from lightningrl.plugins import load_plugins
from lightningrl.records import Score
from lightningrl.types import BranchPoint, OtherCall, OtherCallKind, Outcome, RolloutMode, RolloutSpec, Task
from lightningrl_runs.reader import open_run
from lightningrl_server.records import AttemptEnd
from lightningrl_server.rendering.renderer import PolicyRenderer
from lightningrl_server.rendering.tokenizer import load_tokenizer
from lightningrl_server.store import SqlStore
from lightningrl_testing.live_gateway import LiveGateway, live_gateway
from lightningrl_testing.scripted_engine import ScriptedEngine
from lightningrl_traces.curation.curation import curate
from lightningrl_traces.curation.near_equality import NearTexts, TaskFamilies
from lightningrl_traces.curation.prompts import render_prompt
from lightningrl_traces.curation.rules import LeftOut, Rules
from lightningrl_traces.importing import import_traces

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} of a thing, “in euros”",
            "parameters": {"type": "object", "properties": {"of": {"type": "string"}}},
        },
    }
    for name in ("price", "weight")
]
CALL = '<tool_call>\n{{"name": "price", "arguments": {{"of": "{}"}}}}\n</tool_call>'
WORDS = ("roof", "garden", "cellar", "window", "kitchen", "stairs", "attic", "porch", "chimney", "hall")
Rows = list[dict[str, Any]]


class Player:
    """Plays agents at a live gateway, and ends their rollouts with a reward."""

    def __init__(self, gateway: LiveGateway) -> None:
        self.gateway = gateway
        self._places: dict[str, tuple[str, str]] = {}

    async def begin(self, rollout: str, question: str, **spec: Any) -> list[Any]:
        """The history that its agent begins with."""
        store = self.gateway.store
        task = Task(id=spec.pop("task", rollout[:2]), input=question, answer="3 €", metadata={"level": 1})
        await store.create_rollouts([RolloutSpec(id=rollout, task=task, group_id=f"g-{rollout[:2]}", **spec)])
        lease = await store.lease("worker", 3600.0)
        assert lease is not None and lease.rollout_id == rollout
        self._places[rollout] = self.gateway.url + lease.base_path, lease.key
        return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]

    async def ask(self, rollout: str, role: str, says: str | None, history: Sequence[Any], **options: Any) -> Any:
        if says is not None:
            self.gateway.engine.enqueue(says)
        url, key = self._places[rollout]
        async with AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
            answer = await client.chat.completions.create(
                model="any", messages=list(history), extra_headers={"x-lightningrl-agent": role}, **options
            )
        return answer.choices[0].message.model_dump(exclude_none=True)

    async def end(self, rollout: str, reward: float | None, outcome: Outcome = Outcome.SUCCEEDED, **named: Any) -> None:
        await self.gateway.store.finish_attempt(rollout, 1, outcome, "out", duration_s=0.1)
        await self.gateway.store.set_scores([Score(rollout_id=rollout, attempt=1, reward=reward, rewards=named)])

    async def shop(self, rollout: str, thing: str, says: str, reward: float | None, **named: Any) -> None:
        """A planner with tools, a result of each call, an answer; and a critic with a history of its own."""
        history = await self.begin(rollout, f"What costs {thing}?")
        asked = await self.ask(rollout, "planner", CALL.format(thing) + "\n" + CALL.format("air"), history, tools=TOOLS)
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": text}
            for call, text in zip(asked["tool_calls"], ("3 €", "free\nas air"), strict=True)
        ]
        history = [*history, asked, *results]
        said = await self.ask(rollout, "planner", says, history, tools=TOOLS)
        await self.ask(rollout, "critic", "Fine.", [{"role": "user", "content": f"Is it right that {says}?"}])
        again = [*history, said, {"role": "user", "content": "Are you sure?"}]
        await self.ask(rollout, "planner", f"Yes, {says}", again, tools=TOOLS)
        await self.end(rollout, reward, **named)


@asynccontextmanager
async def new_run(folder: Path, **options: Any) -> AsyncIterator[Player]:
    folder.mkdir()
    recipe = RECIPE.model_copy(update={"policy": RECIPE.policy.model_copy(update={"trained_agents": None})})
    write_recipe(folder, recipe)
    async with live_gateway(folder, **options) as gateway:
        gateway.engine.tokenizer.save_pretrained(folder / "policy")
        yield Player(gateway)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tasks of three rollouts, a branch, a validation and a failure."""
    folder = tmp_path_factory.mktemp("curated") / "shop"

    async def play() -> None:
        async with new_run(folder) as player:
            await player.shop("t0-0", "tea", "It costs 3 €.", 1.0, judge=0.9)
            await player.shop("t0-1", "tea", "It is dear.", 0.0, judge=0.9)
            await player.shop("t0-2", "tea", "It costs 3 €.", 1.0, judge=0.2)
            await player.shop("t1-0", "salt", "Nothing.", 0.5)
            await player.shop("t1-1", "salt", "One euro.", 0.5)
            point = BranchPoint(rollout_id="t0-0", attempt=1, calls=1)
            history = await player.begin("t0-b", "What costs tea?", mode=RolloutMode.BRANCH, branch=point)
            asked = await player.ask("t0-b", "planner", None, history, tools=TOOLS)
            ids = [call["id"] for call in asked["tool_calls"]]
            results = [{"role": "tool", "tool_call_id": id_, "content": "4 €"} for id_ in ids]
            await player.ask("t0-b", "planner", "Four.", [*history, asked, *results], tools=TOOLS)
            await player.end("t0-b", 0.25)
            history = await player.begin("v0-0", "What costs oil?", mode=RolloutMode.VALIDATION)
            await player.ask("v0-0", "planner", "Much.", history)
            await player.end("v0-0", 1.0)
            history = await player.begin("t2-0", "What costs rice?")
            await player.ask("t2-0", "planner", "It costs", history, max_tokens=5)
            await player.end("t2-0", None, Outcome.AGENT_ERROR)

    asyncio.run(play())
    return folder


async def write_import(folder: Path) -> None:
    """Three rollouts as an import leaves them: one question asked twice, with another answer; one call of each grade."""
    folder.mkdir()
    write_recipe(folder, RECIPE)
    told = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    (folder / "run.json").write_text(json.dumps({**told, "traces": {"mark": "x"}}), encoding="utf-8")
    store = await SqlStore.open(f"sqlite:///{folder / 'store.sqlite'}")
    grades = []
    for number, (question, says, reward) in enumerate(
        [("What costs tea?", "3 €", 1.0), ("what costs  tea?", "Dunno.", 0.0), ("Who?", "Me.", None)]
    ):
        rollout = f"trace-{number}"
        await store.create_rollouts([RolloutSpec(id=rollout, task=Task(id=rollout, input=question), group_id=rollout)])
        assert await store.lease("import", 3600.0) is not None
        calls = [
            OtherCall(
                kind=OtherCallKind.FORWARDED,
                path="chat/completions",
                agent="planner",
                request={"messages": [{"role": "user", "content": "What costs tea?"}], "tools": TOOLS},
                answer={
                    "id": f"{rollout}/{grade}",
                    "grade": grade,
                    "choices": [
                        {"message": {"role": "assistant", "content": f"{says} {grade}"}, "finish_reason": "stop"}
                    ],
                },
            )
            for grade in ("sft-safe", "rl-safe", "judge-only", "unusable")
        ]
        grades += [
            {"rollout_id": rollout, "call_id": f"{rollout}/{grade}", "grade": grade, "reasons": reasons}
            for grade, reasons in (("sft-safe", ["no token ids"]), ("rl-safe", ["no tool schemas"]), ("judge-only", []))
        ]
        end = AttemptEnd(outcome=Outcome.SUCCEEDED, output=says, other_calls=calls)
        await store.finish_and_lease(rollout, 1, end, None)
        await store.set_scores([Score(rollout_id=rollout, attempt=1, reward=reward, rewards={"user": reward})])
    await store.close()
    (folder / "grades.jsonl").write_text("".join(json.dumps(line) + "\n" for line in grades), encoding="utf-8")


async def test_imported_calls_are_rows_by_their_grade_and_compared_by_their_task(tmp_path: Path) -> None:
    await write_import(tmp_path / "traces")
    report = await curate([tmp_path / "traces"], tmp_path / "rows", Rules(above_mean=True))
    (row,) = read(tmp_path / "rows", "sft")
    assert row["messages"][-1]["content"] == "3 € sft-safe" and row["tools"] == TOOLS
    (pair,) = read(tmp_path / "rows", "dpo")
    assert pair["rejected"][0]["content"] == "Dunno. sft-safe", "two rollouts of one question"
    told = report.as_json()
    assert told["calls"]["left_out"] == {"grade": 6, "unfit": 3}
    assert told["rows"]["sft"]["left_out"] == {"mean": 1, "no_reward": 1}
    assert told["prompts"] == {"foreign": 1}
    (tmp_path / "traces" / "grades.jsonl").write_text("{}\n", encoding="utf-8")
    with pytest.raises(RunFolderError, match=r"line 1 .* is no grade"):
        await curate([tmp_path / "traces"], tmp_path / "again", Rules())


@pytest.mark.parametrize(
    "rules", [Rules(min_reward=0.5), Rules(best=1), Rules(above_mean=True), Rules(scores={"user": 0.5}), Rules()]
)
async def test_a_rollout_without_a_reward_is_never_a_negative(tmp_path: Path, rules: Rules) -> None:
    await write_import(tmp_path / "traces")
    await curate([tmp_path / "traces"], tmp_path / "rows", rules)
    labels = {row["completion"][0]["content"]: row["label"] for row in read(tmp_path / "rows", "kto")}
    assert labels == {"3 € sft-safe": True, "Dunno. sft-safe": False}, "and nothing of `Me.`, which nobody rewarded"
    assert [row["rejected"][0]["content"] for row in read(tmp_path / "rows", "dpo")] == ["Dunno. sft-safe"]


def read(folder: Path, kind: str) -> Rows:
    return [json.loads(line) for line in (folder / f"{kind}.jsonl").read_text(encoding="utf-8").splitlines()]


def report_of(folder: Path) -> Any:
    return json.loads((folder / "report.json").read_text(encoding="utf-8"))


async def recorded_prompts(run: Path) -> Mapping[str, list[int]]:
    async with open_run(run) as stored:
        records = await stored.list_rollouts()
        trajectories = await stored.look.trajectories([record.id for record in records])
    return {call.id: call.prompt_ids.tolist() for one in trajectories for call in one.transitions}


async def test_rows_of_a_branched_run_of_several_agents_render_to_the_recorded_ids(run: Path, tmp_path: Path) -> None:
    rules = Rules(modes=frozenset({"train", "branch"}), near=1.0)
    report = await curate([run], tmp_path / "rows", rules)
    rows = read(tmp_path / "rows", "sft")
    prompts = await recorded_prompts(run)
    renderer = PolicyRenderer(load_tokenizer(run / "policy"))
    for row in rows:
        rendered = render_prompt(renderer, row["messages"][:-1], row.get("tools", ()))
        assert list(rendered) == prompts[row["source"]["call_id"]], row
        assert row["messages"][-1]["role"] == "assistant"
    assert report.as_json()["prompts"] == {"exact": len(rows)}
    assert report_of(tmp_path / "rows")["calls"]["left_out"] == {"replayed": 1, "cut": 1}
    assert {row["source"]["rollout_id"] for row in rows} >= {"t0-0", "t0-b"}


async def test_a_row_says_what_the_agent_was_asked_and_offered(run: Path, tmp_path: Path) -> None:
    await curate([run], tmp_path / "rows", Rules(min_reward=1.0))
    first, second, *_ = read(tmp_path / "rows", "sft")
    assert first["tools"] == TOOLS, "descriptions are in the prompt alone"
    assert [message["role"] for message in first["messages"]] == ["system", "user", "assistant"]
    call = first["messages"][-1]["tool_calls"][0]
    assert call["function"] == {"name": "price", "arguments": '{"of": "tea"}'}
    result = second["messages"][3]
    assert result == {"role": "tool", "tool_call_id": call["id"], "name": "price", "content": "3 €"}
    assert second["messages"][4]["content"] == "free\nas air"
    assert second["source"] == {
        "run": "shop", "rollout_id": second["source"]["rollout_id"], "call_id": second["source"]["call_id"],
        "reward": 1.0,
    }  # fmt: skip


async def test_good_answers_are_imitated_and_others_told_apart_from_them(run: Path, tmp_path: Path) -> None:
    await curate([run], tmp_path / "rows", Rules(min_reward=1.0))
    sft, dpo, kto = (read(tmp_path / "rows", kind) for kind in ("sft", "dpo", "kto"))
    assert {row["source"]["rollout_id"] for row in sft} <= {"t0-0", "t0-2"}
    (pair,) = [row for row in dpo if row["chosen"][0]["content"].startswith("It")]
    assert (pair["chosen"][0]["content"], pair["rejected"][0]["content"]) == ("It costs 3 €.", "It is dear.")
    assert pair["prompt"][-1]["role"] == "tool" and pair["tools"] == TOOLS
    assert {row["label"] for row in kto if row["source"]["reward"] == 1.0} == {True}
    assert {row["label"] for row in kto if row["source"]["reward"] != 1.0} == {False}
    told = report_of(tmp_path / "rows")["rows"]
    assert told["sft"]["left_out"]["near"] >= 2, "two rollouts said the same"
    assert told["sft"]["left_out"]["reward"] and told["dpo"]["left_out"]["no_pair"]
    assert read(tmp_path / "rows", "tasks")[0] == {"level": 1, "id": "t0", "input": "What costs tea?", "answer": "3 €"}


@pytest.mark.parametrize(
    ("rules", "rollouts"),
    [
        (Rules(above_mean=True), {"t0-0", "t0-2"}),
        (Rules(best=1), {"t0-0", "t1-0"}),
        (Rules(scores={"judge": 0.5}), {"t0-0", "t0-1"}),
        (Rules(per_task=1, min_reward=0.1), {"t0-0", "t1-0"}),
        (Rules(roles=frozenset({"critic"}), min_reward=1.0), {"t0-0", "t0-2"}),
        (Rules(modes=frozenset({"validation"})), {"v0-0"}),
        (Rules(max_characters=60, min_reward=1.0), {"t0-0", "t0-2"}),
    ],
    ids=("above the mean", "best", "score", "per task", "role", "mode", "length"),
)
async def test_each_rule_keeps_what_it_says(run: Path, tmp_path: Path, rules: Rules, rollouts: set[str]) -> None:
    await curate([run], tmp_path / "rows", rules)
    kept = {row["source"]["rollout_id"] for row in read(tmp_path / "rows", "sft")}
    assert kept and kept <= rollouts
    roles = [row["messages"][0]["role"] for row in read(tmp_path / "rows", "sft")]
    assert not rules.roles or set(roles) == {"user"}


async def test_an_own_run_with_thoughts_and_an_edited_history_says_what_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "recorded").mkdir()
    await record_run(tmp_path / "recorded")
    report = await curate([tmp_path / "recorded"], tmp_path / "rows", Rules(max_tool_failures=0))
    told = report.as_json()
    assert told["calls"]["left_out"]["rerendered"], "the gateway kept a thought that the template does not write"
    assert told["calls"]["left_out"]["not_trained"], "a role that the recipe does not train"
    assert told["rows"]["sft"]["left_out"]["tools"], "air has no price"
    await curate([tmp_path / "recorded"], tmp_path / "more", Rules(rerendered=True, near=1.0))
    thoughts = [
        message
        for row in read(tmp_path / "more", "sft")
        for message in row["messages"]
        if message.get("reasoning_content")
    ]
    assert {thought["reasoning_content"] for thought in thoughts} == {"Look it up."}


@pytest.mark.parametrize(
    "family", [family for family in FAMILIES if family.write and family.takes_system], ids=lambda family: family.name
)
async def test_prompts_of_a_model_family_come_back_as_messages(family: Family, tmp_path: Path) -> None:
    tokenizer = build_tokenizer(family)
    engine, renderer = ScriptedEngine(tokenizer), PolicyRenderer(tokenizer)
    assert family.write is not None
    async with new_run(tmp_path / "run", engine=engine, renderer=renderer) as player:
        history = await player.begin("t0-0", "What costs tea?")
        asked = await player.ask("t0-0", "planner", family.write([("price", {"of": "tea"})]), history, tools=TOOLS)
        if not asked.get("tool_calls"):
            pytest.skip("its markup is another token's end, which the engine's script does not write")
        result = {"role": "tool", "tool_call_id": asked["tool_calls"][0]["id"], "content": "3 €"}
        await player.ask("t0-0", "planner", family.plain("3 €."), [*history, asked, result], tools=TOOLS)
        await player.end("t0-0", 1.0)
    await curate([tmp_path / "run"], tmp_path / "rows", Rules(rerendered=True))
    rows = read(tmp_path / "rows", "sft")
    asked = "\n\n".join(message["content"] for message in rows[0]["messages"][:-1])
    assert asked == "Be brief.\n\nWhat costs tea?", "some templates write instructions into the user's turn"
    assert rows[0]["messages"][-1]["tool_calls"][0]["function"]["name"] == "price"
    assert report_of(tmp_path / "rows")["prompts"]["exact"] >= 1


async def test_tasks_that_are_nearly_equal_are_on_one_side_of_the_split(run: Path, tmp_path: Path) -> None:
    async with new_run(tmp_path / "again") as player:
        for number, (thing, question) in enumerate([("tea", "What  costs TEA?"), ("rum", "Name the price of rum")]):
            history = await player.begin(f"u{number}-0", question, task=f"other-{number}")
            await player.ask(f"u{number}-0", "planner", f"{thing}: 3 €", history)
            await player.end(f"u{number}-0", 1.0)
    await curate([run, tmp_path / "again"], tmp_path / "rows", Rules(validation=0.3))
    sides = {
        side: {row["input"] for row in read(tmp_path / "rows" / side, "tasks")} for side in ("train", "validation")
    }
    assert sides["train"] and sides["validation"]
    everywhere = [row["messages"] for side in sides for row in read(tmp_path / "rows" / side, "sft")]
    assert len(everywhere) == report_of(tmp_path / "rows")["rows"]["sft"]["kept"]
    for side in sides:
        asked = {row["source"]["rollout_id"][:2] for row in read(tmp_path / "rows" / side, "sft")}
        assert not {"t0", "u0"} & asked or {"t0", "u0"} <= asked, "one question, two ids"


def test_near_texts_are_found_and_numbers_tell_tasks_apart() -> None:
    texts = NearTexts(0.9)
    long = " ".join(f"the {word} of the house was {word[::-1]} when it rained" for word in WORDS)
    texts.add(texts.read(long))
    assert texts.find(texts.read(long.upper() + "!")) == [0]
    assert texts.find(texts.read(long, within="other instructions")) == []
    assert texts.find(texts.read(long[: len(long) // 2])) == []
    texts.add(texts.read(f"what is 12 + 30? {long}"))
    assert texts.find(texts.read(f"what is 12 + 31? {long}")) == []
    families = TaskFamilies(0.9)
    numbers = [families.add(Task(id=name, input=text)) for name, text in (("a", long), ("b", long), ("a", "else"))]
    assert len({families.family(number) for number in numbers}) == 2
    with pytest.raises(ConfigError, match="one family"):
        TaskFamilies(0.9).validation(0.5)


def test_the_command_writes_rows_for_their_owner_and_prints_what_it_left_out(run: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["curate", str(run), "--into", str(tmp_path / "rows"), "--min-reward", "1"])
    assert result.exit_code == 0, result.output
    assert "reward below --min-reward" in result.output and "sft.jsonl" in result.output
    assert (tmp_path / "rows" / "sft.jsonl").stat().st_mode & 0o777 == 0o600


async def test_what_cannot_be_curated_is_said_and_leaves_nothing(run: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    for folder, into, rules, said in (
        (tmp_path / "none", "a", {}, "no run in"),
        (tmp_path / "mine", "a", {}, "no run in"),
        (run, "mine", {}, "no empty folder"),
        (run, "a", {"grades": frozenset({"judge-only"})}, "no row is left.*its grade"),
        (run, "a", {"modes": frozenset({"trian"})}, "'trian' is unknown"),
        (run, "a", {"near": 0.0}, "no similarity"),
        (run, "a", {"validation": 1.0}, "no share"),
    ):
        with pytest.raises((ConfigError, RunFolderError), match=said):
            await curate([folder], tmp_path / into, Rules(**rules))
    assert {path.name for path in tmp_path.iterdir()} == {"mine"}


def test_traces_of_chat_messages_are_imported_and_become_rows(tmp_path: Path) -> None:
    lines = [
        {
            "id": name,
            "messages": [{"role": "user", "content": "What costs tea?"}, {"role": "assistant", "content": says}],
            "reward": reward,
        }
        for name, says, reward in (("a", "3 euros", 1.0), ("b", "No idea", 0.0))
    ]
    (tmp_path / "traces.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    imported, rows = str(tmp_path / "imported"), str(tmp_path / "rows")
    for command in (
        ["import-traces", str(tmp_path / "traces.jsonl"), "--into", imported],
        ["curate", imported, "--into", rows, "--min-reward", "1"],
    ):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
    (row,) = read(tmp_path / "rows", "sft")
    assert [message["content"] for message in row["messages"]] == ["What costs tea?", "3 euros"]
    (pair,) = read(tmp_path / "rows", "dpo")
    assert pair["rejected"][0]["content"] == "No idea"
    assert [row["label"] for row in read(tmp_path / "rows", "kto")] == [True, False]


@pytest.mark.parametrize(("spelt", "pairs"), [('{"of":"tea"}', 0), ('{"of": "salt"}', 1)])
def test_a_call_that_is_spelt_otherwise_is_no_other_answer_to_compare(tmp_path: Path, spelt: str, pairs: int) -> None:
    rows = []
    for number, arguments in enumerate(('{"of": "tea"}', spelt)):
        call = {"id": f"c{number}", "type": "function", "function": {"name": "price", "arguments": arguments}}
        answer = {"role": "assistant", "content": None, "tool_calls": [call]}
        messages = [{"role": "user", "content": "What costs tea?"}, answer]
        rows.append({"messages": messages, "tools": TOOLS, "reward": 1.0 - number})
    (tmp_path / "traces.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    import_traces(tmp_path / "traces.jsonl", tmp_path / "run", None, load_plugins())
    report = asyncio.run(curate([tmp_path / "run"], tmp_path / "rows", Rules(min_reward=0.5)))
    assert report.total("dpo") == pairs and report.total("sft") == 1
    assert report.rows_left_out["dpo"] == ({} if pairs else {LeftOut.NO_PAIR: 1})
