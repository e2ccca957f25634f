"""Recipes for GPUs and the pages about them hold what they say: keys exist, layouts are valid, sums add up. Nothing
here needs a GPU."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import re
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightningrl.errors import ConfigError, RunFolderError
from lightningrl.loading import resolve
from lightningrl.plugins import load_plugins
from lightningrl.recipe import Recipe
from lightningrl.recipe_keys import check_options
from lightningrl_client.recipe_file import load_recipe, parse_setting, with_settings
from lightningrl_client.runtime.agent_loader import check_agent_file
from lightningrl_training.checkpoints import LoopState
from lightningrl_training.run_folder import RunFolder

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted((ROOT / "examples").glob("*/gpu/*.toml"))
PAGES = {name: (ROOT / "docs" / "how-to" / name).read_text(encoding="utf-8") for name in ("verl.md", "cluster.md")}
TOML_BLOCKS = [
    pytest.param(textwrap.dedent(match[2]), id=f"{name}-{number}")
    for name, page in PAGES.items()
    for number, match in enumerate(re.finditer(r"^( *)```toml\n(.*?)^\1```$", page, re.MULTILINE | re.DOTALL))
]
BASE: dict[str, Any] = {
    "agent": "agent.py:answer",
    "backend": "verl",
    "tasks": {"train": "data.py:tasks"},
    "policy": {"model": "Qwen/Qwen2.5-7B-Instruct"},
    "rewards": {"right": {"use": "data.py:right"}},
}
Table = list[dict[str, str]]


@pytest.fixture(scope="module")
def verl_backend() -> Iterator[Any]:
    """`lightningrl_verl`, installed or not: what is used of it here imports neither torch, Ray nor verl."""
    source = str(ROOT / "packages" / "trainer-verl" / "src")
    is_installed = importlib.util.find_spec("lightningrl_verl") is not None
    if not is_installed:
        sys.path.insert(0, source)
    try:
        yield importlib.import_module("lightningrl_verl.recipe_check")
    finally:
        if not is_installed:
            sys.path.remove(source)
            for name in [name for name in sys.modules if name.partition(".")[0] == "lightningrl_verl"]:
                del sys.modules[name]


@pytest.fixture
def settings_of(verl_backend: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """From a recipe to checked settings of the verl backend, on whatever machine this is."""
    monkeypatch.setattr(verl_backend, "check_machine", lambda settings: None)

    def read(recipe: Recipe) -> Any:
        verl_backend.check_recipe(recipe)
        launcher = importlib.import_module("lightningrl_verl.plugin").create_ray_launcher
        check_options(launcher, recipe.runtime.launchers.get("ray", {}), what="launcher 'ray'")
        options = {"seed": recipe.loop.seed, **recipe.learner, **recipe.backends.get("verl", {})}
        return verl_backend.Settings(policy=recipe.policy.model, name=recipe.policy.name, **options)

    return read


@pytest.fixture(scope="module")
def verl_keys() -> dict[str, Any]:
    """verl's own settings, as its wheel lists them; reading them imports no verl."""
    omegaconf = pytest.importorskip("omegaconf")
    try:
        wheel = importlib.metadata.distribution(
            "verl"
        )  # not find_spec: other tests have put a part of verl in its place
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("verl is not installed")
    path = Path(str(wheel.locate_file("verl"))) / "trainer" / "config" / "_generated_ppo_trainer.yaml"
    keys: dict[str, Any] = omegaconf.OmegaConf.to_container(omegaconf.OmegaConf.load(path), resolve=False)
    return keys


@pytest.fixture
def own_modules() -> Iterator[None]:
    """Folders of plain files have files of the same names (`data`, `agent`): what other tests imported of theirs is
    away meanwhile, and what this one imports is gone afterwards."""
    names, path = {file.stem for file in (ROOT / "examples").glob("*/*.py")}, list(sys.path)
    others = {name: sys.modules.pop(name) for name in names & sys.modules.keys()}
    yield
    sys.path[:] = path
    for name in names & sys.modules.keys():
        del sys.modules[name]
    sys.modules.update(others)


def flatten(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{prefix}.{key}" if prefix else key
        flat |= flatten(value, name) if isinstance(value, dict) and value else {name: value}
    return flat


def check_verl_table(table: dict[str, Any], known: dict[str, Any]) -> None:
    for key in flatten(table):
        node: Any = known
        for part in key.split("."):
            if node == {}:  # a table of verl's that takes any key
                break
            assert isinstance(node, dict), f"verl has no setting {key!r}"
            assert part in node, f"verl has no setting {key!r}"
            node = node[part]


def read_tables(page: str) -> list[Table]:
    """Markdown tables as rows by column name."""
    tables: list[Table] = []
    for match in re.finditer(r"(?:^\|.*\n)+", page, re.MULTILINE):
        lines = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in match[0].splitlines()]
        tables.append([dict(zip(lines[0], cells, strict=True)) for cells in lines[2:]])
    return tables


def find_table(*columns: str) -> Table:
    return next(
        table for table in read_tables(PAGES["verl.md"]) if table and list(table[0])[: len(columns)] == list(columns)
    )


def test_there_is_a_recipe_for_one_gpu_eight_gpus_and_several_nodes() -> None:
    assert {"one_gpu.toml", "eight_gpus.toml", "nodes.toml"} <= {path.name for path in RECIPES}
    for path in (ROOT / "examples" / "text_to_sql" / "gpu").glob("*.toml"):
        assert str(path.relative_to(ROOT)) in PAGES["verl.md"]


@pytest.mark.usefixtures("own_modules")
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parts[-3]}-{path.stem}")
def test_a_gpu_recipe_is_complete_and_verl_can_honour_it(
    path: Path, settings_of: Any, verl_keys: dict[str, Any]
) -> None:
    recipe = load_recipe(path)
    assert recipe.backend == "verl"
    check_agent_file(recipe)
    for reference in (recipe.tasks.train, recipe.tasks.validation, *(reward.use for reward in recipe.rewards.values())):
        assert callable(resolve(reference, recipe.folder))
    settings = settings_of(recipe)
    assert settings.context_length is not None, "without it a microbatch is made for the model's longest context"
    assert settings.context_length <= settings.max_tokens_per_microbatch
    assert recipe.sampling.max_tokens < settings.context_length
    check_verl_table(settings.verl, verl_keys)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parts[-3]}-{path.stem}")
def test_the_sums_in_a_recipes_comments_add_up(path: Path) -> None:
    sums = re.findall(r"((?:\d[\d.,]*[^+=:#\n]*\+ )+\d[^=\n]*) = (\d[\d.]*) GB of 80", path.read_text(encoding="utf-8"))
    assert sums, "learning's memory is written down"
    for terms, total in sums:
        assert sum(float(term.split()[0]) for term in terms.split(" + ")) == pytest.approx(float(total), abs=0.15)
        assert float(total) < 80 - 6


@pytest.mark.parametrize("block", TOML_BLOCKS)
def test_a_block_of_the_pages_is_part_of_a_recipe(block: str, settings_of: Any, verl_keys: dict[str, Any]) -> None:
    recipe = Recipe.model_validate({**BASE, **tomllib.loads(block)})
    check_verl_table(settings_of(recipe).verl, verl_keys)


def test_a_misspelt_verl_setting_is_seen_by_these_tests(verl_keys: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match=r"verl has no setting 'actor_rollout_ref\.rollout\.gpu_memory'"):
        check_verl_table({"actor_rollout_ref": {"rollout": {"gpu_memory": 0.5}}}, verl_keys)


@pytest.mark.parametrize("row", find_table("algorithm", "in the recipe"), ids=lambda row: row["algorithm"])
def test_an_algorithm_is_written_as_the_page_says(row: dict[str, str], settings_of: Any) -> None:
    lines = re.findall(r"`([^`]+)`", row["in the recipe"])
    assert tomllib.loads("\n".join(lines)), "the lines are TOML"
    recipe = with_settings(
        Recipe.model_validate(BASE), dict(parse_setting(line.replace(" = ", "=", 1)) for line in lines)
    )
    is_of_torch = recipe.learner.get("kl_estimator") == "k1"  # as the page says below the table
    with pytest.raises(ConfigError, match="puts the KL into the reward") if is_of_torch else contextlib.nullcontext():
        settings_of(recipe)
    plugins = load_plugins()
    assert plugins.find("lightningrl_credit_assigners", recipe.credit.use)
    for name in recipe.rewards.keys() - BASE["rewards"].keys():
        assert plugins.find("lightningrl_reward_functions", recipe.rewards[name].use)
    for reward in recipe.intermediate_rewards.values():
        assert plugins.find("lightningrl_intermediate_rewards", reward.use)


def test_the_memory_of_learning_is_what_its_formulas_give() -> None:
    models = {row["model (Qwen2.5)"]: row for row in find_table("model (Qwen2.5)", "P")}
    rows = find_table("model", "N", "T")
    assert len(rows) >= 4
    for row in rows:
        model = models[row["model"]]
        parameters, layer, root = (1e6 * float(model[name].removesuffix(" M")) for name in ("P", "P_layer", "P_root"))
        layers, width, inner, vocabulary = (int(model[name]) for name in ("L", "h", "f", "V"))
        gpus, tokens = int(row["N"]), int(row["T"])
        expected = {
            "state": 16 * parameters / gpus,
            "gathered": 8 * root + 10 * layer,
            "kept": 2 * layers * tokens * width,
            "layer": 4 * tokens * (8 * width + 4 * inner),
            "logits": 4 * tokens * vocabulary,
        }
        for name, size in expected.items():
            assert float(row[name]) == pytest.approx(size / 1e9, abs=0.06), (row["model"], name)
        assert float(row["sum"]) == pytest.approx(sum(expected.values()) / 1e9, abs=0.06)


def test_the_models_have_the_parameters_that_the_page_counts() -> None:
    for row in find_table("model (Qwen2.5)", "P"):
        layers, width, inner, keys, vocabulary = (int(row[name]) for name in ("L", "h", "f", "h_kv", "V"))
        layer = (
            2 * width * width + width + 2 * (width * keys + keys) + 3 * width * inner + 2 * width
        )  # q, k and v have biases
        root = (
            vocabulary * width * (1 if row["model (Qwen2.5)"] == "1.5B" else 2) + width
        )  # the smallest shares embeddings and head
        assert [float(row[name].removesuffix(" M")) for name in ("P", "P_layer", "P_root")] == pytest.approx(
            [(root + layers * layer) / 1e6, layer / 1e6, root / 1e6], abs=0.06
        )


def test_the_memory_of_sampling_is_what_its_formulas_give() -> None:
    models = {row["model (Qwen2.5)"]: row for row in find_table("model (Qwen2.5)", "P")}
    for row in find_table("model", "tensor_parallel"):
        name, _, gpus = row["model"].partition(", N = ")
        model = models[name.partition(",")[0]]
        parameters, layers, keys = 1e6 * float(model["P"].removesuffix(" M")), int(model["L"]), int(model["h_kv"])
        width = int(row["tensor_parallel"])
        budget = width * float(row["gpu_memory_utilization"]) * 80
        cache = budget - 2 * parameters / 1e9 - 4 * width
        token = 4 * layers * keys
        assert float(row["learner stays"]) == pytest.approx(
            12 * parameters / int(gpus) / 1e9 if gpus else 0.0, abs=0.06
        )
        assert [float(row[column]) for column in ("vLLM", "its weights", "cache of a replica")] == pytest.approx(
            [budget, 2 * parameters / 1e9, cache], abs=0.06
        )
        assert int(row["bytes a token"]) == token
        assert int(row["tokens"].removesuffix(" k")) == pytest.approx(cache * 1e9 / token / 1e3, rel=2e-3)


def test_checkpoints_may_lie_behind_a_link_to_shared_storage(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "shared")
    folder = RunFolder.create(tmp_path / "run", Recipe.model_validate(BASE), "recipe.toml", {}, models={"policy": "m"})
    scratch = folder.new_checkpoint(3)
    (scratch / "policies").mkdir()
    folder.commit_checkpoint(scratch, LoopState(step=3, seconds=1.0, rollouts=8), keep=2)
    folder.close()
    assert (tmp_path / "shared" / "step-000003" / "loop.json").is_file()
    (tmp_path / "other").mkdir()
    link = tmp_path / "other" / "checkpoints"
    link.symlink_to(tmp_path / "shared")
    with pytest.raises(RunFolderError, match="holds 'checkpoints' and no run"):  # they are another run's
        RunFolder.create(link.parent, Recipe.model_validate(BASE), "recipe.toml", {}, models={"policy": "m"})
    RunFolder.create(
        tmp_path / "run", Recipe.model_validate(BASE), "recipe.toml", {}, models={"policy": "m"}, overwrite=True
    ).close()
    assert (tmp_path / "run" / "checkpoints").is_symlink() and list((tmp_path / "shared").iterdir()) == []
