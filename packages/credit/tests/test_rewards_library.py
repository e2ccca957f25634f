"""The rewards that come along: what each says of an output, where it takes its text from, and how it fails."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import all_ended, is_alive, written
from sizes import PATIENCE_S

from lightningrl.errors import ConfigError, RewardError
from lightningrl.plugins import load_plugins
from lightningrl.types import Trajectory
from lightningrl_client.recipe_file import load_recipe
from lightningrl_credit.rewards import (
    F1,
    Exact,
    Execution,
    JsonSchema,
    NamedReward,
    Numeric,
    Overlong,
    Pattern,
    RewardSet,
)
from lightningrl_credit.rewards.matching import read_number
from lightningrl_testing.groups import make_trajectory, make_transition
from lightningrl_testing.reward_conformance import RewardConformance
from lightningrl_training.build import build_credit

PYTHON = sys.executable


def episode(output: Any, answer: Any = "4") -> Trajectory:
    return make_trajectory("r", [make_transition("r/0")], output=output, answer=answer, reward=None)


def say(reward: Any, output: Any, answer: Any = "4") -> float:
    trajectory = episode(output, answer)
    return float(reward(trajectory.task, output, trajectory))


async def run(reward: Any, output: Any, answer: Any = "4", **settings: Any) -> tuple[float | None, str | None]:
    """Through `RewardSet`, as a run does it: the value, and what failed."""
    result = await RewardSet([NamedReward(name="mine", function=reward, **settings)]).score(episode(output, answer))
    return result.total, result.failure


class Suite(RewardConformance):
    def trajectories(self) -> list[Trajectory]:
        return [episode("4"), episode("the number is 5"), episode({"deep": ["4"]}), episode(4.0), episode("\ud800")]


class TestExact(Suite):
    def make_reward(self) -> Callable[..., Any]:
        return Exact()


class TestOverlong(Suite):
    def make_reward(self) -> Callable[..., Any]:
        return Overlong(tokens=20, margin=8)


@pytest.mark.parametrize(
    ("lengths", "charge"),
    [([12], 0.0), ([13], -1 / 8), ([16], -0.5), ([20], -1.0), ([30], -1.0), ([3, 16, 5], -0.5), ([], 0.0)],
)
def test_the_longest_call_is_charged_as_it_comes_near_the_limit(lengths: list[int], charge: float) -> None:
    """DAPO, eq. 13, with a limit of 20 and a margin of 8."""
    calls = [make_transition(f"r/{t}", completion=[5] * length, index=t) for t, length in enumerate(lengths)]
    trajectory = make_trajectory("r", calls, reward=None)
    assert Overlong(tokens=20, margin=8)(trajectory.task, None, trajectory) == pytest.approx(charge)


@pytest.mark.parametrize("margin", [0, 21])
def test_a_margin_that_is_no_part_of_the_limit_is_refused(margin: int) -> None:
    with pytest.raises(ConfigError, match="is not from 1 to tokens, which is 20; take a fifth of it"):
        Overlong(tokens=20, margin=margin)


class TestNumeric(Suite):
    def make_reward(self) -> Callable[..., Any]:
        return Numeric()


class TestF1(Suite):
    def make_reward(self) -> Callable[..., Any]:
        return F1(extract="number is (.*)")


class TestPattern(Suite):
    def make_reward(self) -> Callable[..., Any]:
        return Pattern(pattern=r"\d")


class TestJsonSchema(Suite):
    def make_reward(self) -> Callable[..., Any]:
        return JsonSchema(schema={"type": "number"})


class TestExecution(Suite):
    def make_reward(self) -> Callable[..., Any]:
        return Execution(command=["grep", "-q", "4", "{output}"])


# ---------------------------------------------------------------------- what is said, and what would be right


@pytest.mark.parametrize("reward", [Exact(), F1()])
def test_an_answer_of_articles_or_punctuation_alone_has_to_be_said(reward: Any) -> None:
    assert [say(reward, said, "A") for said in ("", "the", ".", "an", "B", "A cat")] == [0.0] * 6
    assert [say(reward, said, "A") for said in ("A", "a.", " (A) ")] == [1.0] * 3
    assert [say(reward, said, "+") for said in ("+", "", "-", "a", "2 + 2")] == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert [say(reward, said, "") for said in ("", " ", "the", ".")] == [1.0, 1.0, 0.0, 0.0]
    assert say(reward, "", "Paris") == 0.0


def test_exact_is_regardless_of_case_punctuation_and_articles_unless_asked() -> None:
    assert say(Exact(), "The Eiffel  tower.", "eiffel tower") == 1.0
    assert say(Exact(), "Eiffel", "eiffel tower") == 0.0
    assert say(Exact(normalized=False), "The Eiffel tower", "eiffel tower") == 0.0
    assert say(Exact(normalized=False), " eiffel tower\n", "eiffel tower") == 1.0


@pytest.mark.parametrize(
    ("said", "answer"),
    [("“It’s Paris”", "it's Paris"), ("北京。", "北京"), ("1914–1918", "1914-1918"), ("Cafe\u0301", "Café")],
)
def test_punctuation_is_of_any_script_and_letters_are_the_same_however_they_are_encoded(said: str, answer: str) -> None:
    assert say(Exact(), said, answer) == say(F1(), said, answer) == 1.0
    assert say(Exact(), said, "x²") == say(Exact(), "x2", "x²") == 0.0


def test_the_best_of_several_right_answers_counts() -> None:
    assert say(Exact(), "nyc", ["New York", "NYC"]) == 1.0
    assert say(Numeric(), "2", [1, 2]) == 1.0
    assert say(F1(), "new york city", ["NYC", "New York"]) == pytest.approx(0.8)  # P = 2/3, R = 1


@pytest.mark.parametrize(
    ("output", "answer"),
    [
        *((24.0, 24), (24, 24.0), (24.0, "24"), (24.0, "24.0"), ("24", 24.0), ([24.0], [[24]])),
        ({"n": [24.0]}, {"n": [24]}),
    ],
)
def test_a_whole_number_is_the_same_as_a_float(output: Any, answer: Any) -> None:
    assert [say(reward, output, answer) for reward in (Exact(), Exact(normalized=False), F1())] == [1.0] * 3
    assert say(Exact(), 24.5, 24) == say(Exact(), True, 1) == 0.0


@pytest.mark.parametrize(
    "answer",
    [
        {"text": ["Paris", "in Paris"], "answer_start": [3, 0]},
        {"text": ["Paris"]},
        {"text": "Paris"},
        [{"text": "Rome", "answer_start": 1}, {"text": "Paris", "answer_start": 3}],
        {"spans": ["Paris"], "types": ["span"]},
        {"value": "Lutetia", "aliases": ["Paris"], "type": "WikipediaEntity"},
        {"value": "Paris", "aliases": None},
        {"style": "rule", "ground_truth": "Paris"},
    ],
)
async def test_answers_are_read_as_data_sets_of_questions_hold_them(answer: Any) -> None:
    assert say(Exact(), "Paris", answer) == say(F1(), "Paris", answer) == 1.0
    assert say(Exact(), "London", answer) == 0.0
    if isinstance(answer, dict) and "answer_start" in answer:
        _, failure = await run(Exact(), "Paris", {**answer, "text": []})
        assert failure is not None and "has no answer; give each task one" in failure


def test_f1_is_that_of_squad() -> None:
    assert say(F1(), "in Paris, the capital", "Paris") == pytest.approx(2 * (1 / 3) * 1 / (1 / 3 + 1))
    assert say(F1(), "London", "Paris") == 0.0
    assert say(F1(), "paris paris", "Paris") == pytest.approx(2 / 3), "a word counts as often as it stands in both"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("72", 72.0),
        ("-1,234.50", -1234.5),
        (" $72. ", 72.0),
        ("-$1,234.50", -1234.5),
        ("$-5", -5.0),
        ("\u22125", -5.0),
        ("- 5", None),
        ("12 %", 12.0),
        ("2/3", 2 / 3),
        ("1e-3", 0.001),
        (".5", 0.5),
        ("1/0", None),
        ("seventy", None),
        ("7 apples", None),
        ("", None),
        ("nan", None),
        ("inf", None),
        ("1e999", None),
    ],
)
def test_what_is_a_number(text: str, number: float | None) -> None:
    assert read_number(text) == number


def test_numeric_has_a_tolerance_and_takes_the_number_that_a_pattern_finds() -> None:
    assert say(Numeric(), "4.1") == 0.0
    assert say(Numeric(tolerance=0.03), "4.1") == 1.0
    assert say(Numeric(absolute=0.2), "0.1", "0") == 1.0
    assert say(Numeric(extract=r"#### (.*)"), "2 + 2\n#### 4") == 1.0
    assert say(Numeric(extract=r"-?\d+"), "first 3, then 4") == 1.0, "the last match, without a group"
    assert say(Numeric(), "I think 4") == 0.0


def test_text_is_taken_from_a_path_into_the_output_and_the_answer() -> None:
    assert (
        say(Exact(field="steps.1.text", answer_field="gold"), {"steps": [{}, {"text": "yes"}]}, {"gold": "yes"}) == 1.0
    )
    outputs: list[Any] = [{"steps": [{}]}, {"steps": {"1": "x"}}, "yes", None, {"steps": [{}, {"text": None}]}]
    for output in outputs:
        assert say(Exact(field="steps.1.text"), output, "yes") == 0.0


def test_a_pattern_matches_the_whole_text_or_anywhere() -> None:
    tags = r"\s*<answer>[^<>]+</answer>\s*"
    assert say(Pattern(pattern=tags), "<answer>4</answer>\n") == 1.0
    assert say(Pattern(pattern=tags), "so <answer>4</answer>") == 0.0
    assert say(Pattern(pattern=tags, whole=False), "so <answer>4</answer>") == 1.0


def test_what_only_python_reads_is_no_json() -> None:
    reward = JsonSchema(schema={"type": "object"})
    assert [say(reward, text) for text in ('{"x": 1e5}', '{"x": NaN}', '{"x": -Infinity}')] == [1.0, 0.0, 0.0]


def test_json_fits_its_schema_as_text_or_as_it_is() -> None:
    reward = JsonSchema(schema={"type": "object", "required": ["city"]}, extract=r"```json(.*?)```")
    assert say(reward, '{"city": 1}') == say(reward, {"city": 1}) == say(reward, 'x ```json\n{"city": 1}``` y') == 1.0
    outputs: list[Any] = ["{}", "city", None, [], "[" * 10_000]
    for output in outputs:
        assert say(reward, output) == 0.0


@pytest.mark.parametrize("reward", [Exact(), F1(), Numeric()])
@pytest.mark.parametrize("answer", [None, [], ["a", None]])
async def test_a_task_without_an_answer_is_broken_data_and_not_a_wrong_answer(reward: Any, answer: Any) -> None:
    value, failure = await run(reward, "4", answer)
    assert value is None
    assert failure == "mine: ValueError: task 'task-g' has no answer; give each task one, or a list of right ones"


async def test_an_answer_that_is_no_number_is_broken_data_for_numeric() -> None:
    _, failure = await run(Numeric(), "4", "four")
    assert (
        failure
        == "mine: ValueError: the answer of task 'task-g' is ['four'], no number; give it one, `extract` it, or use 'exact'"
    )


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Pattern(pattern="("), "'\\(' is no regular expression"),
        (lambda: Exact(extract="["), "is no regular expression"),
        (lambda: Numeric(tolerance=-1.0), "must not be negative"),
        (
            lambda: JsonSchema(schema={"type": "text"}),
            "reward 'json_schema': `schema` is no JSON schema: 'text' is not valid",
        ),
        (lambda: Execution(command="ls"), 'command \'ls\' is no list of words; write \\["python", "{output}"\\]'),
        (lambda: Execution(command=["ls"], score="stdout"), "score 'stdout' is none of 'status', 'answer', 'number'"),  # type: ignore[arg-type]
        (
            lambda: Execution(command=["ls"], range=(0.5, 1.0)),
            r"gives 0 or 1, and range \[0.5, 1.0\] lacks one; write range = ",
        ),
        (
            lambda: NamedReward(name="a", function=Exact(), range=(0.0, 1e10)),
            r"range \[0.0, 10000000000.0\] goes beyond 1e\+09",
        ),
        (
            lambda: NamedReward(name="a", function=Exact(), weight=1e300),
            r"weight 1e\+300 is beyond 1e\+09; set a smaller one",
        ),
        (lambda: Execution(command=["ls"], seconds=0), "seconds 0 is not positive"),
        (lambda: Execution(command=["ls"], folder="no-such"), "no folder '.*no-such'; make it, or leave it out"),
        (
            lambda: Execution(command=["python3", "-I", "check.py", "{output}"]),
            "no program 'check.py' in the empty folder where it runs; beside the recipe it is '{recipe}/check.py'",
        ),
        (lambda: Execution(command=["bash", "{recipe}/no-such.sh"]), "no program '/.*/no-such.sh' in the empty folder"),
        (lambda: Execution(command=["python", "a/check.py"], folder="."), "no program 'a/check.py' in '/"),
        (lambda: NamedReward(name="a", function=Exact(), range=(1.0, 0.0)), r"reward 'a': range \[1.0, 0.0\] is none"),
    ],
)
def test_bad_settings_are_refused_with_a_sentence(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make()


def test_without_jsonschema_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with pytest.raises(ConfigError, match=r"jsonschema is not installed; pip install 'lightningrl\[server\]'"):
        JsonSchema(schema={})


# ---------------------------------------------------------------------- a declared range


@pytest.mark.parametrize("value", [1e308, -1e155, 1.1e9, 10**12])
async def test_a_value_whose_square_or_sum_is_no_number_is_a_failure_and_not_a_reward(value: float) -> None:
    """A validation of 1e308 was inf, and advantages of 1e155 were 0."""
    assert await run(lambda *_: value, "4") == (
        None,
        f"mine: returned {float(value)!r}, beyond 1e+09, which no reward may; scale it",
    )
    assert await run(lambda *_: 1e9, "4") == (1e9, None)


@pytest.mark.parametrize("value", [1.5, -0.1, 1e300])
async def test_a_value_outside_of_its_range_is_a_failure_and_not_a_reward(value: float) -> None:
    total, failure = await run(lambda *_: value, "4", range=(0, 1))
    assert (total, failure) == (
        None,
        f"mine: returned {value!r}, outside of its range [0, 1]; mend the reward, or the range",
    )


async def test_both_ends_of_a_range_and_none_are_in_it_and_what_is_no_number_is_still_a_defect() -> None:
    for value in (0, 1, 0.5, None):
        assert await run(lambda *_, value=value: value, "4", range=(0, 1)) == (value, None)
    with pytest.raises(RewardError, match="returned '1' of type str"):
        await run(lambda *_: "1", "4", range=(0, 1))


# ---------------------------------------------------------------------- execution


async def test_the_exit_status_of_a_command_is_the_reward() -> None:
    reward = Execution(command=[PYTHON, "-I", "{output}"], extract=r"```python(.*?)```")
    assert await run(reward, "Here:\n```python\nassert 2 + 2 == 4\n```") == (1.0, None)
    assert await run(reward, "```python\nassert 2 + 2 == 5\n```") == (0.0, None)


async def test_a_program_beside_the_recipe_is_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mine"
    (folder / "checks").mkdir(parents=True)
    (folder / "checks" / "check.py").write_text(
        "import os, sys\nassert open(sys.argv[1]).read() == '4'\nprint(2 + len(os.listdir('.')))\n"
    )
    recipe = 'agent = "agent.py:answer"\n[policy]\nmodel = "m"\n[tasks]\ntrain = "tasks.py:train"\n'
    monkeypatch.chdir(tmp_path)
    for command, place, seen in (
        (f'["{PYTHON}", "-I", "{{recipe}}/checks/check.py", "{{output}}"]', "", 2.0),
        (f'["{PYTHON}", "-I", "check.py", "{{output}}"]', '\noptions.folder = "checks"', 3.0),
    ):
        part = f'[rewards.mine]\nuse = "execution"\noptions.score = "number"\noptions.command = {command}{place}\n'
        (folder / "recipe.toml").write_text(recipe + part)
        evaluator, _ = build_credit(load_recipe(folder / "recipe.toml"), load_plugins())
        for output, earned in (("4", seen), ("5", 0.0)):
            assert [one.reward for one in await evaluator.reward([episode(output)])] == [earned]


@pytest.mark.parametrize("words", [["-c", "cd / && ls no-such.py"], ["-x", __file__, "made-later.py"]])
def test_code_and_what_a_program_is_told_are_no_programs_that_have_to_be_there(words: list[str]) -> None:
    Execution(command=["bash", *words])


async def test_its_output_is_compared_with_the_answer_or_read_as_a_number() -> None:
    assert await run(Execution(command=[PYTHON, "-I", "{output}"], score="answer"), "print(2 + 2)") == (1.0, None)
    assert await run(Execution(command=[PYTHON, "-I", "{output}"], score="answer"), "print(5)") == (0.0, None)
    assert await run(Execution(command=["bash", "-c", "cat {task}"], score="answer"), "4", {"a": 1}) == (0.0, None)
    check = "import json, sys; print('looking'); print(len(sys.stdin.read()) / json.load(open(sys.argv[1]))['answer'])"
    reward = Execution(command=[PYTHON, "-c", check, "{task}"], score="number")
    assert await run(reward, "abc", 4) == (0.75, None)


async def test_a_command_that_is_not_there_fails_and_is_no_zero() -> None:
    value, failure = await run(Execution(command=["no-such-command"]), "4")
    assert value is None
    assert failure is not None
    assert "no-such-command" in failure


FAILS = {
    "says no number": "print('good')",
    "says nothing": "",
    "says an empty line": "print(' ')",
    "says nan": "print('nan')",
    "says infinity": "print('-inf')",
    "says more than there is": "print(1e308)",
    "says a number that is none": "print('9' * 5000)",
    "says no text": "import sys\nsys.stdout.buffer.write(b'\\xff\\xfe\\x00')",
    "fails": "print(1)\nraise SystemExit(3)",
    "kills itself": "import os\nprint(1, flush=True)\nos.kill(os.getpid(), 9)",
    "stops itself": "import os\nprint(1, flush=True)\nos.kill(os.getpid(), 19)",
    "kills who waits for it": "import os\nprint(1, flush=True)\nos.kill(os.getppid(), 9)",
    "writes without end": "while True: print(1)",
    "closes its output and stays": "import os, time\nos.close(1)\ntime.sleep(100_000)",
    "takes too long": "import time\nprint(1, flush=True)\ntime.sleep(100_000)",
}


@pytest.mark.parametrize("how", FAILS)
async def test_a_program_that(how: str) -> None:
    """Is worth nothing, or the least, whatever it does: a reward that fails would take its rollout out of the
    comparison."""
    seconds = 1.5 if how in ("stops itself", "closes its output and stays", "takes too long") else 20.0
    command = [PYTHON, "-I", "{output}"]
    least = Execution(command=command, score="number", seconds=seconds, range=(-2.0, 1.0))
    assert await run(least, FAILS[how], range=(-2.0, 1.0)) == (-2.0, None)
    if seconds == 20.0:
        assert await run(Execution(command=command, score="number", seconds=seconds), FAILS[how]) == (0.0, None)


async def test_one_that_takes_longer_than_the_reward_may_is_too_late_as_well() -> None:
    reward = Execution(command=[PYTHON, "-I", "{output}"], seconds=PATIENCE_S)
    assert await run(reward, FAILS["takes too long"], timeout_s=1.0) == (0.0, None)


@pytest.mark.parametrize("score", ["status", "answer", "number"])
async def test_a_models_program_does_not_lie_beside_its_answer(score: Any) -> None:
    looks = """
import os
answer, seen = "the" + "-answer", ""
for folder, _, files in os.walk(os.path.dirname(os.getcwd())):
    seen += "".join(open(os.path.join(folder, name), errors="replace").read() for name in files)
raise SystemExit(print(answer if SCORE == "answer" else 0.5) if answer not in seen else "seen")
"""
    value = 0.5 if score == "number" else 1.0
    program = looks.replace("SCORE", repr(score))
    assert await run(Execution(command=[PYTHON, "-I", "{output}"], score=score), program, "the-answer") == (value, None)


async def test_a_program_of_ones_own_is_given_the_task_where_its_command_asks_for_it_and_the_answer_unless_that_is_compared() -> (
    None
):
    looks = "import json, os, sys; print(sorted(json.load(open(sys.argv[1]))), [n for n in os.listdir('..') if 'task' in n])"
    for score, known in (
        ("answer", "['id', 'input', 'metadata'] []"),
        ("answer", "['answer', 'id', 'input', 'metadata'] []"),
    ):
        reward = Execution(command=[PYTHON, "-c", looks, "{task}"], score=score)  # type: ignore[arg-type]
        assert await run(reward, "x", known) == (float("answer" not in known), None)
    told = "import json, sys; sys.exit(json.load(open(sys.argv[1]))['answer'] != '4')"
    assert await run(Execution(command=[PYTHON, "-c", told, "{task}"]), "x", "4") == (1.0, None)


async def test_what_leaves_its_session_is_stopped_as_well(tmp_path: Path) -> None:
    started = tmp_path / "started"
    leaves = (
        "import os, time\n"
        "if not os.fork():\n    os.setsid()\n    if os.fork(): os._exit(0)\n    os.closerange(0, 3)\n"
        f"    open({str(started)!r}, 'w').write(str(os.getpid()))\n    time.sleep(100_000)\n"
        f"while not os.path.exists({str(started)!r}): time.sleep(0.01)\n"
    )
    own: list[subprocess.Popen[bytes]] = []

    def mine(task: Any, output: Any, trajectory: Trajectory) -> float:
        """A reward of one's own around it, with a helper that stays."""
        own.append(subprocess.Popen(["sleep", "100000"]))
        value = execution(task, output, trajectory)
        return value + (own[0].poll() is None)

    execution = Execution(command=[PYTHON, "-I", "{output}"], seconds=PATIENCE_S)
    for reward, value in ((execution, 1.0), (mine, 2.0)):
        started.unlink(missing_ok=True)
        async with all_ended(started):
            assert await run(reward, leaves, timeout_s=PATIENCE_S) == (value, None)


async def test_what_runs_too_long_or_writes_too_much_is_stopped_with_all_that_it_started(tmp_path: Path) -> None:
    started = tmp_path / "started"
    endless = (
        "import pathlib, subprocess, time\n"
        "child = subprocess.Popen(['sleep', '100000'])\n"
        f"pathlib.Path({str(started)!r}).write_text(str(child.pid))\n"
        "time.sleep(100_000)\n"
    )
    seconds = 1.0
    async with all_ended(started):
        while not (started.exists() and started.read_text()):  # a busy machine takes its time to start the two
            assert await run(Execution(command=[PYTHON, "-I", "{output}"], seconds=seconds), endless) == (0.0, None)
            seconds *= 2
    assert await run(Execution(command=["yes"], score="answer", seconds=30.0), "4") == (0.0, None)


async def test_a_command_that_reads_nothing_and_one_cancelled_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert await run(Execution(command=["true"]), "x" * 90_000) == (1.0, None)
    pid_file = tmp_path / "pid"
    code = (
        f"import os, pathlib, time\npathlib.Path({str(pid_file)!r}).write_text(str(os.getpid()))\ntime.sleep(100_000)\n"
    )
    waiting = asyncio.create_task(run(Execution(command=[PYTHON, "-I", "{output}"], seconds=PATIENCE_S), code))
    async with all_ended(pid_file):
        await written(pid_file, words=1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not is_alive(int(pid_file.read_text()))
    assert [path.name for path in tmp_path.iterdir()] == ["pid"]


async def test_no_key_of_a_provider_reaches_what_a_model_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    reward = Execution(command=[PYTHON, "-I", "{output}"])
    assert await run(reward, "import os\nassert 'OPENAI_API_KEY' not in os.environ and os.listdir('.') == []") == (
        1.0,
        None,
    )


@pytest.mark.parametrize(
    ("output", "answer", "expected"),
    [
        ("24 in May, 72 in all\n#### 72", "24 + 48 = <<24+48=72>>72 clips altogether.\n#### 72", 1.0),
        ("#### 71", "24 + 48 = <<24+48=72>>72 clips altogether.\n#### 72", 0.0),
        ("#### 1,250", "so\n#### 1,250", 1.0),
        ("#### 72", "72", 1.0),
        ("#### 72", ["no", "so\n#### 72"], 1.0),
        ("#### 72", 72.0, 1.0),
        ("#### 72", r"It follows that $x = \boxed{72}$.", 1.0),
        ("#### 71", r"From \boxed{71} follows \boxed{72}.", 0.0),
    ],
)
def test_an_answer_is_extracted_as_the_output_is(output: str, answer: Any, expected: float) -> None:
    pattern = "#### (.*)"
    assert say(Exact(extract=pattern), output, answer) == expected
    assert say(F1(extract=pattern), output, answer) == expected
    if not isinstance(answer, list):
        assert say(Numeric(extract=pattern), output, answer) == expected


@pytest.mark.parametrize(
    ("output", "answer"),
    [
        ("72", "24 + 48 = <<24+48=72>>72 clips altogether.\n#### 72"),
        ("72", "clips altogether.\r\n#### 72\r\n"),
        ("72", 72.0),
        (r"\frac{1}{2}", r"Half of it is $\boxed{\frac{1}{2}}$."),
        ("it is <answer>72</answer>", "48 more.\n#### 72"),
    ],
)
async def test_a_solution_of_a_data_set_is_the_answer_that_ends_it(output: str, answer: Any) -> None:
    pattern = "<answer>(.*?)</answer>"
    assert say(Exact(extract=pattern), output, answer) == say(F1(extract=pattern), output, answer) == 1.0
    if "72" in output:
        assert say(Numeric(extract=pattern), output, answer) == 1.0
    prints = Execution(command=["cat", "{output}"], score="answer", extract=pattern)
    assert await run(prints, output, answer) == (1.0, None)
