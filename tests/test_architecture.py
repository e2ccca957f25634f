"""The house rules that no single package owns: what an import pulls in, and what is public."""

import ast
import importlib
import json
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

from lightningrl.commands import EXTRAS
from lightningrl.lazy import read_homes
from lightningrl.plugins import HookSpecs

ROOT = Path(__file__).resolve().parents[1]
TEMPLATES = ROOT / "packages" / "core" / "src" / "lightningrl" / "templates"
PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *ROOT.glob("packages/*/README.md"),
    *ROOT.glob("examples/*/README.md"),
    *TEMPLATES.rglob("README.md.template"),
]
BUDGET = {
    ("packages/*/src/**/*.py",): 89_700,
    ("benchmarks/**/*.py",): 6_400,
    ("scripts/**/*.py",): 5_010,
    ("tests/**/*.py", "packages/*/tests/**/*.py", "examples/*/tests/**/*.py"): 80_800,
}
"""Lines, which may only be lowered; what comes new pays by what it removes, or a commit that raises them says why."""
MOST_HOOKS, MOST_COMMANDS = 20, 25
HEAVY = (
    "torch",
    "transformers",
    "langchain_core",
    "langgraph",
    "sqlalchemy",
    "starlette",
    "uvicorn",
    "httpx",
    "matplotlib",
    "verl",
    "vllm",
    "ray",
)


def modules_after(statement: str) -> set[str]:
    code = f"import json, sys; {statement}; print(json.dumps(sorted(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(ran.stdout.splitlines()[-1]))


def test_importing_lightningrl_and_listing_plugins_stays_light() -> None:
    loaded = modules_after(
        "import lightningrl; from lightningrl.plugins import load_plugins; m = load_plugins(); m.trainers; m.adapters"
    )
    assert not loaded.intersection(HEAVY)


def test_the_process_that_imports_an_agent_imports_little_of_ours() -> None:
    """It starts with every run, and everybody waits for it."""
    assert not modules_after("import lightningrl_training.agent_check").intersection({*HEAVY, "pydantic", "rich"})


@pytest.mark.parametrize(
    "module", ["lightningrl_server.app", "lightningrl_server.gateway.app", "lightningrl_server.rendering.renderer"]
)
def test_the_server_has_no_torch(module: str) -> None:
    assert "torch" not in modules_after(f"import {module}")


def test_the_verl_backend_takes_losses_settings_and_how_weights_are_written_from_the_torch_one_and_nothing_else() -> (
    None
):
    sources = (Path(__file__).parents[1] / "packages" / "trainer-verl" / "src").rglob("*.py")
    taken = {
        name
        for file in sources
        for name in re.findall(r"from lightningrl_torch\.(\w+) import", file.read_text(encoding="utf-8"))
    }
    assert taken == {"chosen_loss", "exported", "learner_settings", "losses"}


def test_public_names_are_sorted_and_there() -> None:
    package = importlib.import_module("lightningrl")
    assert package.__all__ == sorted(set(package.__all__))
    for name in package.__all__:
        assert getattr(package, name) is not None


def test_a_stub_is_read_as_python_reads_it() -> None:
    stubs = sorted(ROOT.glob("packages/*/src/**/__init__.pyi"))
    assert len(stubs) > 1
    for stub in stubs:
        imports = [node for node in ast.parse(stub.read_text("utf-8")).body if isinstance(node, ast.ImportFrom)]
        assert read_homes(str(stub.with_suffix(".py"))) == {
            alias.name: node.module for node in imports for alias in node.names
        }


def python_of_strangers() -> dict[str, str]:
    """What we give others to build upon: the templates of `lightningrl new` and `init`, and every Python block of a
    page."""
    code = {
        str(file.relative_to(ROOT)): file.read_text(encoding="utf-8")
        for file in sorted(TEMPLATES.rglob("*.py.template"))
    }
    for page in sorted(PAGES):
        blocks = re.findall(
            r"^( *)```python[^\n]*\n(.*?)^\1```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
        )
        for number, (_, block) in enumerate(blocks):
            code[f"{page.relative_to(ROOT)}, python block {number + 1}"] = block
    return code


def imported_names(code: str) -> list[tuple[str, str]]:
    """`(module, name)` of what is imported of `lightningrl`, wherever in the code; a module alone has no name."""
    found: list[tuple[str, str]] = []
    for node in ast.walk(ast.parse(textwrap.dedent(code))):
        if isinstance(node, ast.ImportFrom):
            found += [(node.module or "", alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
    return [(module, name) for module, name in found if module.partition(".")[0] == "lightningrl"]


def test_templates_and_pages_import_public_names_from_the_places_that_the_page_of_plugins_names() -> None:
    page = (ROOT / "docs" / "how-to" / "plugins.md").read_text(encoding="utf-8")
    table = page.partition("What is imported from where")[2].partition("\n\n")[2].partition("\n\n")[0]
    places = {
        place
        for line in table.splitlines()
        for place in re.findall(r"`(lightningrl[\w.]*)(?:\.…)?`", line.split("|")[1])
    }
    assert {"lightningrl", "lightningrl_testing", "lightningrl_credit"} <= places
    elsewhere = []
    for where, code in python_of_strangers().items():
        for module, name in imported_names(code):
            is_public = module in places and (not name or name in importlib.import_module(module).__all__)
            if not is_public and not module.startswith("lightningrl_testing."):
                elsewhere.append(f"{where}: {module} {name}")
    assert elsewhere == [], "import it from `lightningrl`, or name its place in docs/how-to/plugins.md"


def first_party_sources() -> dict[str, Path]:
    """Source folder of each package of ours, by its folder's name below `packages/`."""
    return {path.parents[1].name: path for path in sorted(ROOT.glob("packages/*/src/lightningrl*"))}


def test_the_map_of_the_house_has_every_package_in_the_order_of_imports_and_leads_to_files() -> None:
    house = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## The house")[2]
    packages = re.findall(r"^\| `(\w+)` \|", house.partition("**One call**")[0], re.MULTILINE)
    sources = first_party_sources()
    assert sorted(packages) == sorted(name for name in sources if "-" not in name)
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    layers = next(contract["layers"] for contract in contracts if contract["name"].startswith("The packages"))
    floor = {
        name or "core": number
        for number, layer in enumerate(reversed(layers))
        for name in re.findall(r"lightningrl(?:_(\w+))?", layer)
    }
    assert [floor[name] for name in packages] == sorted(floor[name] for name in packages)
    for path in re.findall(r"`([\w/-]+(?:\.py|/))`", house):
        assert any((source / path).exists() for source in [ROOT, *sources.values()]), path


@pytest.mark.parametrize("patterns", BUDGET)
def test_the_house_keeps_its_budget(patterns: tuple[str, ...]) -> None:
    files = [file for pattern in patterns for file in ROOT.glob(pattern)]
    assert sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files) <= BUDGET[patterns]


def test_hooks_and_commands_do_not_grow_in_number() -> None:
    assert sum(name.startswith("lightningrl_") for name in vars(HookSpecs)) <= MOST_HOOKS
    assert len(EXTRAS) <= MOST_COMMANDS


def test_a_benchmark_that_a_page_quotes_is_there_or_is_of_a_commit_that_the_page_names() -> None:
    """Name it within the 120 characters that follow."""
    missing = [
        f"{page.relative_to(ROOT)}: {quote[1]}"
        for page in PAGES
        for quote in re.finditer(r"(benchmarks/[\w/]+\.py)(?=(.{0,120}))", page.read_text(encoding="utf-8"), re.DOTALL)
        if not (ROOT / quote[1]).is_file() and not re.search(r"of (that )?commit", quote[2])
    ]
    assert not missing
