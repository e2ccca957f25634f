"""The pages as a whole: the site builds, every link leads somewhere, the blocks of the pages that no package owns
run."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").glob("*/README.md"),
    ],
)
RUN_OTHERWISE = {
    "docs/how-to/task-sources.md": "tests/test_task_sources.py",
    "docs/index.md": "tests/test_docs.py",  # its lines are README's
    "docs/tutorials/first-agent.md": "tests/test_docs.py",  # likewise
    "docs/tutorials/small-model.md": "examples/calculator_smollm2/tests/test_calculator_smollm2.py",
    "docs/reference/dialects.md": "packages/server/tests/test_dialect_docs.py",
    "docs/how-to/agents/structured.md": "packages/trainer-torch/tests/test_torch_structured_output.py",
}
"""Pages whose blocks are run by a test that does not use `run_page`."""
NOT_RUN = {
    "docs/how-to/gpu-check.md": "makes a folder from a package registry, for another machine with a GPU",
    "docs/how-to/laptop.md": "measures this machine for many minutes, with 12 GiB of weights",
    "docs/how-to/postgresql.md": "installs a database server as root; tests/test_postgresql.py trains on one",
    "docs/tutorials/tool-calling.md": "lines of examples/shop/agent.py, as the test below sees; its run takes an hour",
    "docs/reference/results.md": "hours of training and measuring; that its `make` lines are targets is tested below",
}
"""Pages whose blocks no test can run, and why."""
OWN_PROJECTS = sorted((ROOT / "docs" / "how-to" / "plugins").glob("*.md"))


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def without_blocks(text: str) -> str:
    return re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.MULTILINE | re.DOTALL)


def headings(page: Path) -> set[str]:
    """A page's anchors, as GitHub and the site make them."""
    titles = re.findall(r"^#+ (.+)$", without_blocks(page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_and_picture_leads_to_a_file_and_its_heading(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", without_blocks(page.read_text(encoding="utf-8"))):
        if "://" in link:
            continue
        path, _, heading = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name_of(page)}: {link} leads nowhere"
        assert not heading or heading in headings(target), (
            f"{name_of(page)}: {name_of(target)} has no heading {heading}"
        )


def test_the_site_builds_without_a_warning_and_has_every_page(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").with_suffix(".html")
        assert (tmp_path / "site" / name).is_file(), name


def test_a_blocks_title_stands_in_the_site_and_links_stay_within_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path / "site")]
    subprocess.run(command, cwd=ROOT, check=True)
    page = (tmp_path / "site" / "how-to" / "agents" / "langchain.html").read_text(encoding="utf-8")
    assert '<span class="filename">my_graph.py</span>' in page
    assert '<span class="kn">import</span>' in page, "code is coloured"
    assert "title=my_graph.py" not in page
    assert "examples/text_to_sql/README.md</code> in the repository" in page
    numbered = (tmp_path / "site" / "how-to" / "cluster.html").read_text(encoding="utf-8")
    assert "```" not in numbered, "a block within a list is a block"
    drawn = (tmp_path / "site" / "explanation" / "how-it-works.html").read_text(encoding="utf-8")
    assert "\n   │ ▲" in drawn, "a drawing stays as it is"


def test_the_first_use_of_a_glossarys_word_is_linked_in_prose_alone() -> None:
    link_words = runpy.run_path(str(ROOT / "scripts" / "mkdocs_hook.py"))["link_words"]
    page = "# A policy\n\nA `policy`: [policy](a.md).\n\nPolicies and a policy, one policy.\n\n```text\nrollout\n```\n\nIts group size.\n"
    linked = link_words(page, "../glossary.md")
    assert re.findall(r"\[([^\]]+)\]\(\.\./glossary\.md#([^)]+)\)", linked) == [
        ("policy", "policy"),
        ("group size", "group-size"),
    ]
    assert "Policies and a [policy](../glossary.md#policy), one policy." in linked


@pytest.mark.parametrize("page", OWN_PROJECTS, ids=name_of)
def test_a_plugins_page_shows_a_whole_project_with_its_entry_point(page: Path) -> None:
    (block,) = re.findall(
        r"^```toml title=\S*pyproject\.toml\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    project = tomllib.loads(block)
    ((name, module),) = project["project"]["entry-points"]["lightningrl"].items()
    assert module == f"lightningrl_{name}.plugin"
    assert project["project"]["name"] == f"lightningrl-{name.replace('_', '-')}"
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == [f"src/lightningrl_{name}"]
    assert project["build-system"]["build-backend"] == "hatchling.build"


FIRST_PAGES = ("docs/how-to/install.md", "packages/core/README.md")
SHORT_PAGES = ("README.md", "docs/index.md", "docs/tutorials/first-agent.md")
ONE_LINE = "make install && source .venv/bin/activate"


@pytest.mark.parametrize("page", SHORT_PAGES)
def test_one_line_installs_from_a_clone_before_any_other_command_of_ours(page: str) -> None:
    lines = [line for block in blocks_of(ROOT / page, "bash") for line in block.splitlines()]
    assert lines[lines.index(ONE_LINE) + 1] == "lightningrl init first"
    assert not any(line.startswith("lightningrl") for line in lines[: lines.index(ONE_LINE)])
    if page != "docs/index.md":
        assert "PyTorch's CPU build](" in (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", FIRST_PAGES)
def test_whoever_types_a_first_page_word_for_word_has_an_environment_before_uv_asks_for_one(page: str) -> None:
    lines = [line.strip() for line in (ROOT / page).read_text(encoding="utf-8").splitlines()]
    assert lines[lines.index("pip install uv") - 2 :][:2] == ["python -m venv .venv", "source .venv/bin/activate"]


@pytest.mark.parametrize("page", FIRST_PAGES)
def test_the_first_line_that_installs_torch_brings_no_cuda_and_is_one_that_uv_obeys(page: str) -> None:
    """The index of its builds is asked for nothing: here it is all installed, and uv says so."""
    installing = re.compile(r"^ *((?:uv )?pip install [^#\n]*lightningrl\[[^#\n]*?)(?: +#.*)?$", re.MULTILINE)
    lines = installing.findall((ROOT / page).read_text(encoding="utf-8"))
    assert lines[0] == 'uv pip install --torch-backend cpu "lightningrl[torch]"'
    words = [sys.executable, "-m", *shlex.split(lines[0]), "--python", sys.executable, "--dry-run", "--offline"]
    ran = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (ran.returncode, "Would make no changes" in ran.stderr) == (0, True), ran.stderr


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "lightningrl[torch," in page.read_text(encoding="utf-8")], ids=name_of
)
def test_a_page_that_asks_pip_for_torch_says_how_it_comes_without_cuda(page: Path) -> None:
    assert "--torch-backend cpu" in page.read_text(encoding="utf-8")


def blocks_of(page: Path, *languages: str) -> list[str]:
    found = re.findall(r"^( *)```(\w+)[^\n]*\n(.*?)^\1```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(body) for _, language, body in found if language in languages]


def pages_that_tests_run() -> set[str]:
    """By `run_page("…")`, or as a row of the table below."""
    tests = [
        *ROOT.glob("tests/test_*.py"),
        *ROOT.glob("packages/*/tests/test_*.py"),
        *ROOT.glob("examples/*/tests/test_*.py"),
    ]
    return {
        page
        for test in tests
        for page in re.findall(r"""(?:run_page\(|^        \()"([\w/-]+\.md)\"""", test.read_text(), re.MULTILINE)
    }


def test_the_blocks_of_every_page_are_run_or_it_is_said_why_not() -> None:
    with_blocks = {name_of(page) for page in PAGES if blocks_of(page, "bash", "python")}
    assert with_blocks == pages_that_tests_run() | set(RUN_OTHERWISE) | set(NOT_RUN)
    assert not set(NOT_RUN) & (pages_that_tests_run() | set(RUN_OTHERWISE))
    for page, test in RUN_OTHERWISE.items():
        assert Path(page).name in (ROOT / test).read_text(encoding="utf-8"), f"{test} does not name {page}"


def test_the_tool_calling_tutorial_shows_the_example_as_it_is() -> None:
    shop, page = ROOT / "examples" / "shop", ROOT / "docs" / "tutorials" / "tool-calling.md"
    agent, recipe = ((shop / name).read_text(encoding="utf-8").splitlines() for name in ("agent.py", "recipe.toml"))
    assert [line for block in blocks_of(page, "python") for line in block.splitlines() if line not in agent] == []
    assert [line for block in blocks_of(page, "toml") for line in block.splitlines() if line not in recipe] == []


def test_the_first_pages_lines_are_those_of_the_readme() -> None:
    """Which runs them."""
    index, tutorial, readme = (
        "".join(blocks_of(ROOT / page, "bash")).splitlines() for page in ("docs/index.md", SHORT_PAGES[-1], "README.md")
    )
    assert len(index) == 4 and set(index) <= set(readme)
    assert set(tutorial) - set(readme) == {"lightningrl rollouts list --run runs/first --limit 4"}  # looking.md's


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if re.search(r"^make ", page.read_text(encoding="utf-8"), re.MULTILINE)],
    ids=name_of,
)
def test_what_a_page_makes_is_a_target(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"^make ([\w-]+)", "\n".join(blocks_of(page, "bash")), re.MULTILINE)) <= targets


CITED = re.compile(r"\b((?:benchmarks|scripts)/[\w/]+\.(?:py|sh)|examples/[\w/]+/curves\.py)\b([^`\n#]*)")
"""A script of ours in a page, with the words behind it."""


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_script_that_a_page_cites_is_in_this_tree_and_knows_the_words_it_is_given(page: Path) -> None:
    """Whoever doubts a figure can make it again: also with what no fence holds, `python benchmarks/x.py --forced`."""
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"\bof\s+commit\s+[0-9a-f]{7}", text), f"{name_of(page)} has a figure of another commit"
    code = [*re.findall(r"`([^`\n]+)`", without_blocks(text)), *blocks_of(page, "bash", "text", "console")]
    for script, words in (cited for part in code for cited in CITED.findall(part)):
        assert (ROOT / script).is_file(), f"{name_of(page)}: {script} is gone"
        source = (ROOT / script).read_text(encoding="utf-8")
        for word in shlex.split(words.partition("  ")[0]):
            is_value = re.fullmatch(r"[\d.,e-]+|[0-9a-f]{7,40}|[A-Z_.]+|.*[=/].*", word) is not None
            parts = [word] if word.startswith("--") else re.split("[-_]", word)
            known = is_value or word in source or all(part in source for part in parts)
            assert known, f"{name_of(page)}: {script} knows no {word!r}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("docs/how-to/install.md", "langchain"),
        ("docs/tutorials/coming-from.md", "0.0 1.0"),
        ("docs/how-to/collection.md", "done: 3 steps"),
        ("docs/how-to/plugins.md", "made lightningrl-exact-date"),
        ("docs/how-to/looking.md", "assistant ▸"),
        ("docs/how-to/evaluation.md", "of 10 tasks (above 0: the first is better)"),
        ("docs/how-to/viewing.md", "with everything in it"),
        ("docs/how-to/loggers.md", "(3, 0.6"),
        ("docs/how-to/python.md", "weights of step 4"),
        ("docs/how-to/tasks.md", "17 + 25"),
        ("docs/how-to/is-my-reward-hackable.md", "no attack earned what it should not"),
        ("docs/how-to/rewards.md", "groups that teach"),
        ("docs/how-to/no-answers.md", "pairs  0.00 0.00  0.33 0.00  0.67 0.00  1.00 0.00"),
        ("docs/how-to/it-does-not-learn.md", "groups"),
        ("docs/reference/rewards.md", "F1 0.67"),
        ("docs/reference/losses.md", "[True, True]"),
        ("docs/how-to/doctor.md", "recipe credit assigner 'grpo' needs 'group'"),
        ("docs/explanation/credit/turns.md", "[-0.25, 0.5]\n[0.25, -0.5]"),
        ("docs/explanation/credit/states.md", "{'anchor_hit_rate': 0.3333333333333333, 'zero_step_credit': 0.66"),
        ("docs/how-to/plugins/adapter.md", "made lightningrl-haystack"),
        ("docs/how-to/plugins/backend.md", "made lightningrl-bigram"),
        ("docs/how-to/plugins/credit.md", "succeeded"),
        ("docs/how-to/plugins/intermediate-reward.md", "[-0.1, None]"),
        ("docs/how-to/plugins/dialect.md", "4 passed"),
        ("docs/how-to/plugins/launcher.md", "True"),
        ("docs/how-to/plugins/reward.md", "brief"),
        ("docs/how-to/plugins/command.md", "0 runs"),
        ("docs/how-to/plugins/pages.md", '{"running": 2, "succeeded": 5}'),
        ("docs/how-to/plugins/watchers.md", "1 0.5"),
    ],
)
def test_the_blocks_of_a_page_run_from_top_to_bottom(page: str, said: str, run_page: Callable[..., str]) -> None:
    assert said in run_page(page)
