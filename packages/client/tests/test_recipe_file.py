"""The recipe: read once, frozen, and refused with a sentence that says what, which and what next."""

from pathlib import Path
from typing import Any

import pytest

from lightningrl.errors import ConfigError
from lightningrl.recipe import Recipe
from lightningrl.recipe_keys import check_options
from lightningrl.recipe_tables import RewardConfig, TasksConfig
from lightningrl_client.recipe_file import load_recipe, parse_setting, with_settings

MINIMAL = """
agent = "agent.py:answer"
[tasks]
train = "data.py:train"
[policy]
model = "starter"
[rewards.exact]
use = "reward.py:exact"
"""


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(MINIMAL)
    return path


def test_a_minimal_recipe_has_defaults(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file)
    assert recipe.loop.group_size == 8
    assert recipe.folder == recipe_file.parent
    assert recipe.validation.sampling.temperature == 0.0


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_recipe_with_a_byte_order_mark_is_read(recipe_file: Path, encoding: str) -> None:
    recipe_file.write_text(MINIMAL.replace("\n", "\r\n"), encoding=encoding, newline="")
    assert load_recipe(recipe_file).agent == "agent.py:answer"


def test_settings_override_keys_and_keep_the_rest(recipe_file: Path) -> None:
    recipe = load_recipe(
        recipe_file, dict([parse_setting("loop.steps=3"), parse_setting("policy.model=Qwen/Qwen2.5-0.5B")])
    )
    assert (recipe.loop.steps, recipe.policy.model, recipe.agent) == (3, "Qwen/Qwen2.5-0.5B", "agent.py:answer")
    assert recipe.folder == recipe_file.parent


def test_a_recipe_that_settings_are_made_from_stays_as_it_was(recipe_file: Path) -> None:
    told = {"learner.critic.coefficient": 0.5, "backends.torch.lora": 8, "rewards.exact.options.schema.type": "object"}
    recipe = load_recipe(recipe_file, told)
    changed = with_settings(recipe, dict.fromkeys(told, "other"))
    assert changed.rewards["exact"].options["schema"] == {"type": "other"}
    assert (recipe.learner, recipe.backends) == ({"critic": {"coefficient": 0.5}}, {"torch": {"lora": 8}})
    assert recipe.rewards["exact"].options["schema"] == {"type": "object"}


def test_a_setting_written_as_python_writes_true_and_false_is_one(recipe_file: Path) -> None:
    recipe = load_recipe(
        recipe_file, dict([parse_setting("rewards.exact.options.normalized=False"), parse_setting("learner.lora=True")])
    )
    assert recipe.rewards["exact"].options == {"normalized": False}, "a text 'False' would count as true"
    assert recipe.learner == {"lora": True}
    assert parse_setting("policy.model='False'") == ("policy.model", "False")


def test_a_part_of_a_key_that_holds_a_dot_stands_in_quotes(recipe_file: Path) -> None:
    told = {'policies."qwen2.5".model': "small", 'upstream.models."gpt-4.1*".model': "large"}
    recipe = load_recipe(recipe_file, told)
    assert recipe.policies["qwen2.5"].model == "small"
    assert recipe.upstream is not None and recipe.upstream.models["gpt-4.1*"].model == "large"
    with pytest.raises(ConfigError, match="is no dotted key"):
        load_recipe(recipe_file, {'policies."qwen2.5.model': "small"})


def test_a_python_recipe_may_hold_objects(tmp_path: Path) -> None:
    path = tmp_path / "recipe.py"
    path.write_text(
        "from lightningrl.recipe import *\n"
        "from lightningrl.recipe_tables import *\n"
        "def exact(task, output, trajectory): return 1.0\n"
        "recipe = Recipe(agent='agent.py:answer', tasks=TasksConfig(train='data.py:train'), policy=PolicyConfig(model='m'),\n"
        "                rewards={'exact': RewardConfig(use=exact)})\n"
    )
    recipe = load_recipe(path, {"loop.steps": 2})
    reward: Any = recipe.rewards["exact"].use
    assert reward("task", None, None) == 1.0
    assert "exact" in recipe.frozen_text()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (MINIMAL + "[loop]\nstps = 4\n", "unknown key 'loop.stps'; did you mean 'steps'?"),
        (MINIMAL + "wieght = 2\n", "unknown key 'rewards.exact.wieght'; did you mean 'weight'?"),
        (MINIMAL + "[loop]\nsteps = -1\n", "'loop.steps'"),
        (MINIMAL + "[credit]\nwhiten = 3\n", "'credit.whiten': write true or false, got 3"),
        (MINIMAL.replace('[rewards.exact]\nuse = "reward.py:exact"', ""), "'rewards'"),
        ("agent = ", "not valid TOML"),
    ],
)
def test_a_bad_recipe_is_refused_with_file_key_and_remedy(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.toml") as refused:
        load_recipe(path)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_missing_recipe_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no recipe at"):
        load_recipe(tmp_path / "none.toml")


def test_an_option_nobody_consumes_is_an_error() -> None:
    def factory(*, policy: str, learning_rate: float = 1e-5) -> None: ...

    check_options(factory, {"learning_rate": 1.0}, what="backend 'x'", reserved=("policy",))
    with pytest.raises(ConfigError, match="backend 'x' has no setting 'learning_rte'; did you mean 'learning_rate'"):
        check_options(factory, {"learning_rte": 1.0}, what="backend 'x'", reserved=("policy",))
    with pytest.raises(ConfigError, match="no setting 'policy'"):
        check_options(factory, {"policy": "x"}, what="backend 'x'", reserved=("policy",))


def test_a_setting_without_a_value_is_refused() -> None:
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        parse_setting("loop.steps")


def test_a_recipe_is_frozen() -> None:
    policy: Any = {"model": "m"}
    rewards = {"r": RewardConfig(use="r:r")}
    recipe = Recipe(agent="a:b", tasks=TasksConfig(train="d:t"), policy=policy, rewards=rewards)
    with pytest.raises(Exception, match="frozen"):
        recipe.name = "other"


def test_a_critics_model_beside_the_recipe_is_found_from_any_folder(recipe_file: Path) -> None:
    (recipe_file.parent / "small").mkdir()

    def model_of(name: str) -> str:
        recipe = load_recipe(recipe_file, {"learner.critic.model": name, "learner.critic.clip": 0.2})
        critic: dict[str, Any] = recipe.options_of(recipe.policy)["critic"]
        assert critic["clip"] == 0.2
        return str(critic["model"])

    assert model_of("small") == str(recipe_file.parent / "small")
    assert model_of("trunk") == "trunk"
    assert model_of("org/small") == "org/small"


@pytest.mark.parametrize(
    "text",
    [
        "learner.deep = " + "[" * 3000 + "]" * 3000,
        "learner.deep = " + "{a = " * 3000 + "1" + "}" * 3000,
        "learner.deep = " + "[" * 150 + "]" * 150,
        "learner" + ".a" * 3000 + " = 1",
        "learner" + ' . "a b"' * 3000 + " = 1",
        "[learner" + ".a" * 3000 + "]\nb = 1",
        "[[learner" + ".a" * 150 + "]]\nb = 1",
        "learner = {deep" + ".a" * 3000 + " = 1}",
    ],
)
def test_what_is_nested_without_end_is_no_toml(recipe_file: Path, text: str) -> None:
    minimal = recipe_file.with_name("minimal.toml")
    minimal.write_text(MINIMAL)
    recipe_file.write_text(text + "\n" if text.startswith("learner") else MINIMAL + text + "\n")
    with pytest.raises(ConfigError, match=r"is not valid TOML: it is nested deeper than 100 levels"):
        load_recipe(recipe_file)
    with pytest.raises(ConfigError, match=r"has 3001 parts; no key of a recipe is nested deeper than 100 levels"):
        load_recipe(minimal, {"a" + ".b" * 3000: 1})


def test_a_text_may_hold_dots_and_brackets_without_end(recipe_file: Path) -> None:
    recipe_file.write_text('judge.instructions = "' + "and so on . . . [[[ " * 300 + 'a.b.c"\n' + MINIMAL)
    with pytest.raises(ConfigError, match="judge"):
        load_recipe(recipe_file)
