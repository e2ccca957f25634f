"""Bad input at the command line: one sentence that says what, which and what next; a non-zero exit; nothing lost."""

import asyncio
import json
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

import pytest
from warm import WarmCommand

from lightningrl_server.store import SqlStore

pytestmark = pytest.mark.slow

STARTER = Path(__file__).resolve().parents[1] / "examples" / "text_to_sql" / "starter"

AGENT = """
import time
from openai import OpenAI
client = OpenAI(max_retries=0)


def ask(text):
    reply = client.chat.completions.create(model="gpt-4o-mini", messages=[{"role": "user", "content": text}])
    return reply.choices[0].message.content or "-"


def answer(question): return ask(question)
def raises(question): raise RuntimeError("the database is on fire")
def hangs(question): time.sleep(60)
def returns_nothing(question): ask(question)
def returns_an_object(question): return object()
def overflows(question): return ask("select " * 5000)
def goes_past_us(question):
    try: OpenAI(base_url="http://127.0.0.1:9/v1", max_retries=0).chat.completions.create(model="m", messages=[])
    except Exception: return "nothing"
"""

DATA = """
def tasks():
    return [{"id": "one", "input": "count the rows"}]
def no_tasks(): return []
def twice(): return tasks() * 2
def one(task, output, trajectory): return 1.0
def is_nan(task, output, trajectory): return float("nan")
def is_slow(task, output, trajectory):
    import time
    time.sleep(30)
def is_text(task, output, trajectory): return "good"
"""

RECIPE = """
agent = "agent.py:answer"
[tasks]
train = "data.py:tasks"
[policy]
model = "starter"
[rewards.score]
use = "data.py:one"
timeout_s = 1.0
[runtime]
workers = 1
timeout_s = 900.0
[loop]
steps = 1
tasks_per_step = 1
group_size = 2
[sampling]
max_tokens = 4
"""


@dataclass(frozen=True, slots=True)
class Here:
    """A user's folder with a shell in it."""

    folder: Path
    warm: WarmCommand

    def run(self, *arguments: str) -> tuple[int, str]:
        """Exit status and what was said, on one line."""
        ran = self.warm.run("lightningrl", *arguments, cwd=self.folder, environment={"COLUMNS": "400"})
        assert "Traceback" not in ran.stderr + ran.stdout, ran.stderr + ran.stdout
        return ran.returncode, ran.stdout + ran.stderr

    def refused(self, *arguments: str) -> str:
        """The one sentence after `error:`."""
        status, said = self.run(*arguments)
        assert status != 0, said
        assert said.count("error: ") == 1, said
        return said.split("error: ")[1].strip()

    def train(self, *settings: str) -> str:
        """The sentence with which a training run is refused or ends."""
        return self.refused(
            "train", "recipe.toml", "--run", "run", *(word for setting in settings for word in ("--set", setting))
        )


@pytest.fixture
def here(tmp_path: Path, warm: WarmCommand) -> Here:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "data.py").write_text(DATA)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "starter").symlink_to(STARTER)
    return Here(tmp_path, warm)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("credit.use=grop", "no credit assigner named 'grop'; installed: branches, clip, "),
        ("backend=troch", "no trainer backend named 'troch'; installed: torch; did you mean 'torch'?"),
        ('adapters=["langgraph"]', "no adapter named 'langgraph'; installed: autogen, langchain, openai-agents"),
        ("loop.stps=3", "unknown key 'loop.stps'; did you mean 'steps'?"),
        (
            "learner.learning_rte=1",
            "trainer backend 'torch' has no setting 'learning_rte'; did you mean 'learning_rate'?",
        ),
        ("learner.schedule=cosin", "schedule is 'cosin'; choose 'constant', 'linear' or 'cosine'"),
        ("backends.toch.threads=1", "no trainer backend named 'toch'"),
        ("credit.options.gamma=1", "'grpo' has no setting 'gamma'"),
        ("credit.use=turns", "needs 'turn_rewards'; add an [intermediate_rewards.NAME] table"),
        ("loop.group_size=1", "needs 'group'; set loop.group_size above 1"),
        ("tasks.train=data.py:no_tasks", "returned no tasks"),
        ("tasks.train=data.py:twice", "two tasks have the id 'one'"),
        ("tasks.validation=data.py:tasks", "task 'one' is in the training and the validation set"),
        ("tasks.train=data.py:missing", "'data.py' has no 'missing'"),
        ("rewards.score.use=nowhere.py:score", "no file"),
        ("agent=nowhere.py:answer", "no file"),
        ("policy.model=./nowhere", "no folder './nowhere'"),
        ("samples.aggregation=constant", "needs samples.constant_length"),
        (
            'loggers=["tensorbord"]',
            "no logger named 'tensorbord'; installed: mlflow, swanlab, tensorboard, trackio, wandb; did you mean 'tensorboard'?",
        ),
    ],
)
def test_a_recipe_that_cannot_run_is_refused_before_anything_starts(here: Here, setting: str, says: str) -> None:
    assert says in here.train(setting)
    assert not (here.folder / "run").exists()


def test_no_recipe_and_nothing_to_resume(here: Here) -> None:
    assert "no recipe given" in here.refused("train")
    assert "no run below 'runs'" in here.refused("train", "--resume")
    assert "no recipe at 'none.toml'" in here.refused("train", "none.toml")


def test_a_model_without_a_chat_template_is_refused(here: Here) -> None:
    folder = here.folder / "bare"
    shutil.copytree(STARTER, folder)
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    said = here.train("policy.model=bare")
    assert "chat template" in said
    assert "bare" in said


def rollouts(folder: Path) -> dict[str, str]:
    """Every rollout in the run's store with its state."""

    async def read() -> dict[str, str]:
        store = await SqlStore.open(f"sqlite:///{folder / 'run' / 'store.sqlite'}", read_only=True)
        try:
            return {record.spec.id: record.state.value for record in await store.list_rollouts()}
        finally:
            await store.close()

    return asyncio.run(read())


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("is_nan", "score: returned nan"),
        ("is_slow", "score: no answer within 1 s; raise rewards.score.timeout_s"),
        ("is_text", "reward 'score' returned"),
    ],
)
def test_a_bad_reward_stops_the_run_and_loses_nothing(here: Here, function: str, says: str) -> None:
    said = here.train(f"rewards.score.use=data.py:{function}")
    assert says in said
    assert "g000000-00" in said
    assert set(rollouts(here.folder).values()) == {"succeeded"}


def test_a_reward_that_raises_stops_the_run_and_a_mended_one_goes_on_where_it_stopped(here: Here) -> None:
    source = DATA.replace(
        "def one(task, output, trajectory): return 1.0", "def one(task, output, trajectory): raise KeyError('gold')"
    )
    (here.folder / "data.py").write_text(source)
    said = here.train()
    assert "score: KeyError: 'gold' (data.py, line" in said
    assert "g000000-00" in said
    assert set(rollouts(here.folder).values()) == {"succeeded"}
    (here.folder / "data.py").write_text(DATA)
    status, said = here.run("train", "--resume", "--run", "run")
    assert status == 1, said
    assert "groups without signal 1/1" in said, "a group whose rewards are all equal is counted and shown"
    assert "nothing was learned in 1 steps: all 2 rewards are 1" in said, "and a run of such groups alone is no success"
    assert set(rollouts(here.folder).values()) == {"succeeded"}
    assert len(rollouts(here.folder)) == 2


@pytest.mark.parametrize(
    ("function", "outcome", "says"),
    [
        ("hangs", "timeout", "longer than its time limit of 2 s"),
        ("returns_nothing", "agent_error", "returned nothing"),
        ("returns_an_object", "agent_error", "JSON"),
        ("overflows", "context_overflow", "context"),
    ],
)
def test_an_agent_that_fails_is_typed_and_the_run_says_so(here: Here, function: str, outcome: str, says: str) -> None:
    said = here.train(f"agent=agent.py:{function}", *(["runtime.timeout_s=2.0"] if function == "hangs" else []))
    assert f"every rollout failed (2 {outcome})" in said
    assert says in said
    assert "--resume" in said
    assert set(rollouts(here.folder).values()) == {"failed"}


def test_an_agent_that_raises_is_mended_and_its_rollouts_are_made_anew(here: Here) -> None:
    said = here.train("agent=agent.py:raises")
    assert "every rollout failed (2 agent_error)" in said
    assert "RuntimeError: the database is on fire" in said
    assert "mend the agent; then go on with `lightningrl train --resume --run run`" in said
    assert set(rollouts(here.folder).values()) == {"failed"}
    (here.folder / "agent.py").write_text(
        AGENT.replace('raise RuntimeError("the database is on fire")', "return ask(question)")
    )
    status, said = here.run("train", "--resume", "--run", "run")
    assert status == 1, said
    assert "nothing was learned in 1 steps: all 2 rewards are 1" in said, (
        "they came to their end, and the reward finds all alike"
    )
    assert list(rollouts(here.folder).values()) == ["succeeded"] * 2


def test_a_run_whose_agent_calls_models_elsewhere_fails_and_names_their_host(here: Here) -> None:
    status, said = here.run("train", "recipe.toml", "--run", "run", "--set", "agent=agent.py:goes_past_us")
    assert status == 1, said
    assert "nothing was learned in 1 steps: none of 2 rollouts made a model call that came here" in said
    assert "the agent called models at '127.0.0.1' (2 rollouts)" in said
    assert "name them in runtime.base_urls" in said
    assert set(rollouts(here.folder).values()) == {"succeeded"}


def test_an_agent_that_cannot_be_imported_is_named(here: Here) -> None:
    (here.folder / "agent.py").write_text("import no_such_package\n")
    said = here.train()
    assert "agent.py" in said
    assert "no_such_package" in said


def test_a_port_in_use_is_named(here: Here) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = here.refused("serve", "recipe.toml", "--port", str(port))
    assert f"127.0.0.1:{port}" in said
    assert "already in use" in said
    assert "choose another" in said


def test_a_run_folder_that_is_taken_is_refused(here: Here) -> None:
    status, said = here.run("train", "recipe.toml", "--run", "run", "--steps", "0")
    assert status == 0, said
    assert "already holds a run" in here.train()


def test_looking_at_what_is_not_there(here: Here) -> None:
    assert "no run below" in here.refused("rollouts", "list")
    assert "no store in" in here.refused("rollouts", "list", "--run", "nowhere")
    assert "no run in" in here.refused("export", "weights", "--run", "nowhere")
    assert "adapter" in here.refused("new", "adapter", "not a name")
