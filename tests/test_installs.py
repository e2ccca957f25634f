"""What each way of installing brings, in empty environments, from wheels that are built here: no more than it needs,
and it works.

    lightningrl                        lists plugins, and a command that is not there names what installs it
    lightningrl[view]                  opens a run's folder
    lightningrl[worker,langchain]      runs a worker of a server elsewhere
    lightningrl[torch]                 trains
    lightningrl, lightningrl-testing   write, install and test a plugin of each kind

Each prints its size and how long its imports take.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from importlib.metadata import requires, version
from pathlib import Path

import httpx
import pytest
from distributions import write_blocks
from installed import build_wheels
from recorded_runs import make_recipe, record_run
from sizes import PATIENCE_S

from lightningrl.commands import PACKAGES, missing_hint
from lightningrl_testing.scripted_engine import ScriptedEngine
from lightningrl_testing.tokenizers import tiny_tokenizer
from lightningrl_testing.whole_path import RUN_KEY, running_services

ROOT = Path(__file__).resolve().parents[1]
AGENT = """
from langchain_openai import ChatOpenAI
from lightningrl import report_reward, role, tool

model = ChatOpenAI(model="gpt-4o-mini", api_key="the-users-own")

def answer(task):
    with role("writer"):
        text = model.invoke(task).content
    with tool("count", {"text": text}) as seen:
        seen.result = len(text)
    report_reward("right", float(seen.result))
    return text
"""
RECIPE = """
agent = "agent.py:answer"
adapters = ["langchain"]
tasks.train = "agent.py:tasks"
policy.model = "anything/at-all"
rewards.right.use = "agent.py:right"
runtime = { workers = 1 }
"""
PLAIN_AGENT = """
from openai import OpenAI

def answer(task):
    messages = [{"role": "user", "content": task}]
    return OpenAI().chat.completions.create(model="gpt-4o-mini", messages=messages).choices[0].message.content
"""
ONCE = """
import asyncio
from pathlib import Path

from lightningrl_testing.whole_path import whole_path

async def main():
    folder = Path("run")
    folder.mkdir()
    async with whole_path(folder, "agent.py:answer", base_dir=Path.cwd()) as path:
        trajectory = await path.run_one("r", "say something")
        print(sum(len(call.prompt_ids) for call in trajectory.transitions))

if __name__ == "__main__":
    asyncio.run(main())
"""
IMPORTS = """
import sys, time
began = time.perf_counter()
for name in sys.argv[1:]:
    __import__(name)
print(time.perf_counter() - began)
"""
ALL_OF_RUNTIME = """
import importlib, pkgutil, lightningrl_client.client, lightningrl_client.control.client, lightningrl_client.runtime as runtime
for module in pkgutil.iter_modules(runtime.__path__):
    importlib.import_module(f"lightningrl_client.runtime.{module.name}")
"""
CORE = {"lightningrl"}
READING = CORE | {"lightningrl-credit", "lightningrl-runs", "lightningrl-server"}
VIEW = READING | {"lightningrl-viewer"}
WORKER = CORE | {"lightningrl-client", "lightningrl-langchain"}
TESTING = READING | {"lightningrl-client", "lightningrl-testing"}


class Environment:
    """An environment of its own, with our wheels and what they ask for."""

    def __init__(
        self, folder: Path, wheels: Path, certificates: Mapping[str, str], python: str = sys.executable
    ) -> None:
        """`certificates`: variables for uv, which installs from the network."""
        self._wheels = wheels
        self._certificates = certificates
        self.folder = folder
        self.python = folder / "bin" / "python"
        self._uv("venv", "--python", python, str(folder))

    def install(self, *packages: str) -> None:
        """Install packages; torch as the build that is installed here."""
        links = [str(self._wheels), *os.environ.get("PIP_FIND_LINKS", "").split()]
        places = [word for link in links for word in ("--find-links", link)]
        pin = self.folder / "constraints.txt"
        pin.write_text(f"torch=={version('torch')}\n")
        words = ("--python", str(self.python), "--constraints", str(pin), *places)
        self._uv("pip", "install", *words, *packages)

    def run(self, *words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        command = [str(self.python), *words]
        return subprocess.run(
            command, env=environment(), cwd=cwd, capture_output=True, text=True, check=False, timeout=PATIENCE_S
        )

    def names(self) -> set[str]:
        """Distributions that are installed."""
        code = "from importlib.metadata import distributions\nfor one in distributions(): print(one.name.lower())"
        return {re.sub(r"[-_.]+", "-", name) for name in self.run("-c", code).stdout.split()}

    def ours(self) -> set[str]:
        return {name for name in self.names() if re.fullmatch(r"lightningrl(-.*)?", name)}

    def describe(self, what: str, *modules: str) -> None:
        """Print its size, and how long it takes to import what it is for, when that has been imported before."""
        size = sum(path.stat().st_size for path in (self.folder / "lib").rglob("*") if path.is_file())
        seconds = min(float(self.run("-c", IMPORTS, *modules).stdout) for _ in range(2))
        print(
            f"\n{what}: {size / 1e6:.0f} MB, {len(self.names())} packages, import {', '.join(modules)}: {seconds:.2f} s"
        )

    def _uv(self, command: str, *words: str) -> None:
        variables = {**environment(), **self._certificates}
        words = (sys.executable, "-m", "uv", command, *words)
        ran = subprocess.run(words, env=variables, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr


def environment() -> dict[str, str]:
    """Variables of our processes, without those that name packages of ours."""
    ours = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST", "VIRTUAL_ENV"))
    }
    return {**ours, "COLUMNS": "200", "OPENAI_API_KEY": "none", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory, certificates: Mapping[str, str]) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in certificates.items():
            patch.setenv(name, value)
        build_wheels(folder)
    return folder


@pytest.fixture
def empty(tmp_path: Path, wheels: Path, certificates: Mapping[str, str]) -> Environment:
    return Environment(tmp_path / "venv", wheels, certificates)


# ---------------------------------------------------------------------- lightningrl


@pytest.mark.slow
def test_the_core_alone_lists_plugins_and_names_what_is_missing(empty: Environment, tmp_path: Path) -> None:
    empty.install("lightningrl")
    assert empty.ours() == CORE
    listed = empty.run("-m", "lightningrl", "plugins")
    assert listed.returncode == 0, listed.stderr
    for command, extra in (("view", "view"), ("train", "torch"), ("work", "worker")):
        ran = empty.run("-m", "lightningrl", command, str(tmp_path))
        assert ran.returncode == 2
        assert f"pip install 'lightningrl[{extra}]'" in ran.stderr
        assert "Traceback" not in ran.stderr
    empty.describe("lightningrl", "lightningrl")


@pytest.mark.parametrize(("extra", "distributions"), [("server", ("server", "viewer")), ("plot", ("viewer",))])
def test_a_package_that_is_missing_names_the_extra_that_brings_it(extra: str, distributions: Sequence[str]) -> None:
    brought = {name for part in distributions for name in requirements(f"lightningrl-{part}")} | {"transformers"}
    assert PACKAGES[extra] <= brought, "an extra that is named brings the package"
    for package in PACKAGES[extra]:
        hint = f"{package!r} is not installed; it comes with: pip install 'lightningrl[{extra}]'"
        assert missing_hint(f"{package}.inner") == hint
    assert missing_hint("langgraph") is None


def requirements(distribution: str) -> set[str]:
    """Import names of what a distribution needs, with its extras."""
    return {re.split(r"[^\w-]", line)[0].replace("-", "_") for line in requires(distribution) or ()}


# ---------------------------------------------------------------------- lightningrl[view]


@contextmanager
def looking_at(python: Path, folder: Path) -> Iterator[str]:
    """`lightningrl view` of that interpreter: the address that it prints."""
    command = [str(python), "-u", "-m", "lightningrl", "view", str(folder), "--no-browser"]
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as viewer:
        assert viewer.stdout is not None
        printed: list[str] = []
        for line in viewer.stdout:
            printed.append(line)
            if address := re.search(r"http://\S+", line):
                break
        else:
            pytest.fail("".join(printed))
        yield address[0]
        viewer.terminate()


@pytest.mark.slow
async def test_a_viewer_opens_a_colleagues_run(empty: Environment, tmp_path: Path) -> None:
    folder = tmp_path / "their-run"
    await record_run(folder, make_recipe(folder))
    empty.install("lightningrl[view]")
    assert empty.ours() == VIEW
    assert not empty.names() & {"torch", "peft", "matplotlib"}
    with looking_at(empty.python, folder) as address:
        async with httpx.AsyncClient(follow_redirects=True, timeout=PATIENCE_S) as browser:
            page = await browser.get(address)
            rollouts = await browser.get(httpx.URL(address).copy_with(path="/rollouts", query=None))
    assert page.status_code == rollouts.status_code == 200
    assert "g000000-000" in rollouts.text
    empty.describe("lightningrl[view]", "lightningrl", "lightningrl_viewer.app")


# ---------------------------------------------------------------------- lightningrl[worker,langchain]


@asynccontextmanager
async def working(python: Path, folder: Path, url: str) -> AsyncIterator[asyncio.subprocess.Process]:
    command = [str(python), "-m", "lightningrl", "work", str(folder), "--server", url, "--key", RUN_KEY]
    with (folder / "worker.log").open("wb") as log:
        worker = await asyncio.create_subprocess_exec(*command, env=environment(), stdout=log, stderr=log)
    try:
        yield worker
    finally:
        if worker.returncode is None:
            worker.terminate()
        await worker.wait()


@pytest.mark.slow
async def test_a_worker_runs_a_langchain_agent_for_a_server_elsewhere(empty: Environment, tmp_path: Path) -> None:
    folder = tmp_path / "agent"
    folder.mkdir()
    (folder / "agent.py").write_text(AGENT)
    (folder / "recipe.toml").write_text(RECIPE)
    empty.install("lightningrl[worker,langchain]", "langchain-openai", "langgraph")
    assert empty.ours() == WORKER
    assert not empty.names() & {"torch", "transformers", "sqlalchemy", "starlette", "matplotlib"}
    ran = empty.run("-c", ALL_OF_RUNTIME)
    assert ran.returncode == 0, ran.stderr
    engine = ScriptedEngine(tiny_tokenizer())
    engine.enqueue("hello")
    async with running_services(folder, engine=engine) as path, working(empty.python, folder, path.url) as worker:
        trajectory, ended = asyncio.ensure_future(path.run_one("r0", "hi")), asyncio.ensure_future(worker.wait())
        await asyncio.wait({trajectory, ended}, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        assert trajectory.done(), (folder / "worker.log").read_text()
        rollout = await trajectory
    assert rollout.output == "hello"
    assert rollout.reported == {"right": 5.0}
    assert [(call.name, call.result) for call in rollout.tool_calls] == [("count", "5")]
    assert [call.agent for call in rollout.transitions] == ["writer"]
    empty.describe("lightningrl[worker,langchain]", "lightningrl", "lightningrl_client.runtime.worker")


# ---------------------------------------------------------------------- lightningrl[torch]


@pytest.mark.slow
def test_torch_trains_an_example(empty: Environment, tmp_path: Path) -> None:
    empty.install("lightningrl[torch]", "openai")
    settings = ("loop.steps=1", "loop.tasks_per_step=2", "loop.group_size=4", "validation.every=0", "runtime.workers=1")
    words = ("train", str(ROOT / "examples/from_scratch"), "--run", str(tmp_path / "run"))
    ran = empty.run("-m", "lightningrl", *words, *(f"--set={setting}" for setting in settings), cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert '"learn/loss"' in (tmp_path / "run" / "metrics.jsonl").read_text()
    empty.describe("lightningrl[torch]", "lightningrl", "lightningrl_torch.backend")


# ---------------------------------------------------------------------- plugins

NEW = ("adapter", "backend", "command", "credit", "dialect", "page", "reward", "tasks")
"""Kinds that `lightningrl new` writes."""
NEEDED = {"dialect": {"lightningrl-server"}}
"""Packages of ours that a kind needs beside the core: a dialect's format is the gateway's."""
PAGES = {"command": "count", "dialect": "ollama"}
"""Pages whose blocks are a package, and its name."""


def write_package(kind: str, folder: Path) -> Path:
    """The package of a page, its plugin's file in its place."""
    write_blocks(ROOT / "docs" / "how-to" / "plugins" / f"{kind}.md", folder)
    project = folder / f"lightningrl-{PAGES[kind]}"
    if not project.is_dir():
        source = project / "src" / f"lightningrl_{PAGES[kind]}"
        source.mkdir(parents=True)
        (folder / "pyproject.toml").rename(project / "pyproject.toml")
        (folder / "plugin.py").rename(source / "plugin.py")
        (source / "__init__.py").write_text("")
    return project


@pytest.mark.slow
def test_a_plugin_of_each_kind_needs_the_core_alone(empty: Environment, tmp_path: Path) -> None:
    """Written by the core's own command or copied from its page, it is installed and listed; its tests need
    lightningrl-testing."""
    empty.install("lightningrl")
    projects: list[tuple[str, Path]] = []
    for kind in NEW:
        ran = empty.run("-m", "lightningrl", "new", kind, f"my-{kind}", cwd=tmp_path)
        assert ran.returncode == 0, ran.stderr
        projects.append((kind, tmp_path / f"lightningrl-my-{kind}"))
    for kind in PAGES:
        (tmp_path / kind).mkdir()
        projects.append((kind, write_package(kind, tmp_path / kind)))
    plugins = set()
    for kind, project in projects:
        declared = tomllib.loads((project / "pyproject.toml").read_text())["project"]
        plugins.add(declared["name"])
        ours = {re.split(r"[^\w-]", line)[0] for line in declared["dependencies"] if line.startswith("lightningrl")}
        assert CORE <= ours <= CORE | NEEDED.get(kind, set()), kind
    empty.install(*(str(project) for _, project in projects))
    assert empty.ours() == CORE.union(plugins, *NEEDED.values())
    listed = empty.run("-m", "lightningrl", "plugins")
    assert listed.returncode == 0, listed.stderr
    for kind in NEW:
        assert re.search(f"my[-_]{kind}", listed.stdout), kind
    assert "ollama" in listed.stdout
    assert "runs" in empty.run("-m", "lightningrl", "count", "--runs", str(tmp_path)).stdout

    tested = [project for _, project in projects if (project / "tests").is_dir()]
    empty.install(*(f"{project}[test]" for project in tested))
    assert empty.ours() <= TESTING | plugins
    # all in one process, which imports the kit once; by itself, each is tested in test_new_packages.py
    places = [str(project / "tests") for project in tested]
    options = ("--import-mode=importlib", "-o", "asyncio_mode=auto", "-o", f"pythonpath={' '.join(places)}")
    ran = empty.run("-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *places, cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout[-3000:]
    assert " passed" in ran.stdout
    empty.describe("lightningrl, lightningrl-testing and nine plugins", "lightningrl", "lightningrl_testing")


@pytest.mark.slow
@pytest.mark.parametrize("minor", [12, 13])
def test_a_rollout_is_run_and_read_on_another_python(
    minor: int, wheels: Path, certificates: Mapping[str, str], tmp_path: Path
) -> None:
    """Newer Pythons take newer releases of what we need."""
    found = find_python(minor)
    if found is None or sys.version_info[1] == minor:
        pytest.skip(f"there is no other Python 3.{minor} here")
    other = Environment(tmp_path / "venv", wheels, certificates, found)
    other.install("lightningrl-testing", "openai")
    (tmp_path / "agent.py").write_text(PLAIN_AGENT)
    (tmp_path / "once.py").write_text(ONCE)
    ran = other.run("once.py", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert int(ran.stdout) > 0


def find_python(minor: int) -> str | None:
    """Path of an interpreter of Python 3.`minor`: one on PATH, or one that pyenv keeps."""
    kept = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [shutil.which(f"python3.{minor}"), *map(str, sorted(kept.glob(f"3.{minor}.*/bin/python")))]
    return next((path for path in candidates if path is not None and works(path)), None)


def works(python: str) -> bool:
    return subprocess.run([python, "-c", ""], env=environment(), capture_output=True, check=False).returncode == 0
