"""What tests of several packages share: sizes, plain modules that never meet, a warm command line, pages, verl's
algorithms."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import types
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from attribution import Crowd
from hypothesis import settings
from installed import install_as_the_pages_say
from jumping_clock import NO_CLOCK_JUMPED
from once import made_once
from postgresql import NOT_TESTED, PostgreSQL, serving_postgresql
from sizes import LONG, PATIENCE_S, sized
from warm import WarmCommand, fresh_starts, warm_starts

if TYPE_CHECKING:
    from recorded import RecordedRun

ROOT = Path(__file__).resolve().parent
EXAMPLES = ROOT / "examples"

settings.register_profile(
    "lightningrl", deadline=None
)  # a first call of torch, on a busy machine, takes longer than any deadline
settings.load_profile("lightningrl")
os.environ.setdefault("OPENAI_API_KEY", "test")  # examples make their clients when they are imported
os.environ.setdefault("OMP_NUM_THREADS", "1")  # pytest's processes and theirs share the cores


def refuse_stale_entry_points() -> None:
    """Refuse an environment that was made before the packages' entry points changed: plugins and commands would be
    missing."""
    for project in ROOT.glob("packages/*/pyproject.toml"):
        declared = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # verl's are installed elsewhere
            ours = importlib.metadata.distribution(declared["name"]).entry_points.select(group="lightningrl")
            if {point.name: point.value for point in ours} != declared.get("entry-points", {}).get("lightningrl", {}):
                raise pytest.UsageError(
                    f"{declared['name']} has other entry points than it was installed with: make .venv/.installed"
                )


# ------------------------------------------------------------------ sizes


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--long",
        action="store_true",
        help="run the tests marked `long`, and every test at its full size (make test-long)",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files of many slow tests first, so that no process is left with one at the end; `long` tests only where they are
    asked for."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])
    if LONG not in os.environ:
        long = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if not item.get_closest_marker("long")]


def pytest_collection_finish() -> None:
    """What was imported and collected stays to the end: no later collection of garbage walks through it."""
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    refuse_stale_entry_points()
    if config.getoption("--long"):
        os.environ[LONG] = "1"


@pytest.fixture(scope="session")
def crowd() -> Crowd:
    """How many rollouts of an adapter's agents run at once."""
    return sized(
        Crowd(rollouts=40, shared_workers=1, exclusive_workers=2),
        Crowd(rollouts=200, shared_workers=2, exclusive_workers=4),
    )


# ------------------------------------------------------------------ certificates


@pytest.fixture(scope="session", autouse=True)
def certificates() -> Iterator[Mapping[str, str]]:
    """Where this machine's certificates are, in environment variables, for whoever installs from the network.

    Everybody else speaks plain HTTP to this machine, and finds a folder without certificates: to read hundreds of them
    takes each client of each test, agent and judge tens of milliseconds. With `--long` they are read, as users' clients
    do.
    """
    found = {name: os.environ[name] for name in ("SSL_CERT_FILE", "SSL_CERT_DIR") if name in os.environ}
    if LONG in os.environ:
        yield found
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SSL_CERT_FILE", raising=False)
        patch.setenv("SSL_CERT_DIR", str(ROOT / "tests" / "support"))
        yield found


# ------------------------------------------------------------------ databases


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgreSQL]:
    """A real server, one for all tests of this process. Skips where the machine has none."""
    with serving_postgresql() as server:
        yield server


# ------------------------------------------------------------------ reports


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """What hostile text left in a test's log may not end the process that would send the report."""
    return sendable((yield))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What tests measured: `record_property("figure", "…")`."""
    figures = [
        value
        for report in terminalreporter.stats.get("passed", [])
        for name, value in report.user_properties
        if name == "figure"
    ]
    if figures:
        terminalreporter.section("figures")
        terminalreporter.write("\n".join(sorted(figures, reverse=True)) + "\n")

    for title, why in (("POSTGRESQL WAS NOT TESTED", NOT_TESTED), ("NO CLOCK THAT JUMPS WAS TESTED", NO_CLOCK_JUMPED)):
        skipped = [report for report in terminalreporter.stats.get("skipped", []) if why in str(report.longrepr)]
        if skipped:
            terminalreporter.section(title, red=True, bold=True)
            terminalreporter.write(f"{len(skipped)} tests were skipped: {why}\n")


def sendable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {key: sendable(item) for key, item in value.items()}
    return type(value)(sendable(item) for item in value) if isinstance(value, list | tuple) else value


# ------------------------------------------------------------------ plain modules


class PlainModules:
    """Folders of plain files have files of the same names (`agent`, `data`), as users' folders do. Each file of tests
    sees what it imported itself, the tests of one example share theirs, and what a test imports while it runs is gone
    after it."""

    def __init__(self) -> None:
        self._path = list(sys.path)
        self._home: Path | None = None
        self._kept: dict[Path, tuple[list[str], dict[str, types.ModuleType]]] = {}
        self._gone: list[types.ModuleType] = []
        """Never collected: an agent's clients hold connections, and whichever test ran then would be told of them."""

    def enter(self, path: Path) -> None:
        """Before a file of tests is read, or a test below it is run."""
        home = find_home(path)
        if home == self._home:
            return
        self.leave()
        search, modules = self._kept.get(
            home, ([str(home), str(home / "generator"), *self._path] if home.is_dir() else self._path, {})
        )
        sys.path[:] = search
        sys.modules.update(modules)
        self._home = home

    def leave(self) -> None:
        if self._home is not None:
            self._kept[self._home] = (list(sys.path), plain_modules(sys.modules))
            self.drop(sys.modules)

    def drop(self, names: Iterable[str]) -> None:
        for name in plain_modules(names):
            self._gone.append(sys.modules.pop(name))


def find_home(path: Path) -> Path:
    """Whose modules a path's tests see: the example's, or those of the file alone."""
    return (
        EXAMPLES / path.relative_to(EXAMPLES).parts[0] if path.is_relative_to(EXAMPLES) and path != EXAMPLES else path
    )


def plain_modules(names: Iterable[str]) -> dict[str, types.ModuleType]:
    """Of imported modules those that stand in no package and were installed by nobody, tests aside."""
    return {
        name: sys.modules[name] for name in list(names) if is_plain(name, getattr(sys.modules[name], "__file__", None))
    }


def is_plain(name: str, file: str | None) -> bool:
    if "." in name or file is None or name == "__main__" or file.startswith((sys.prefix, sys.base_prefix)):
        return False
    return Path(file).name not in {"__init__.py", "conftest.py"} and not Path(file).name.startswith("test_")


plain = PlainModules()


@pytest.hookimpl(tryfirst=True)
def pytest_make_collect_report(collector: pytest.Collector) -> None:
    if isinstance(collector, pytest.File):
        plain.enter(collector.path)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    plain.enter(item.path)


@pytest.fixture(autouse=True)
def _plain_modules_go() -> Iterator[None]:
    known, path = set(sys.modules), list(sys.path)
    yield
    plain.drop(sys.modules.keys() - known)
    sys.path[:] = path


# ------------------------------------------------------------------ commands and pages


@pytest.fixture(scope="session", autouse=True)
def _warm_starts() -> Iterator[None]:
    """Servers, workers and commands start without their imports, but for `--long`; see tests/support/warm.py."""
    with contextlib.nullcontext() if LONG in os.environ else warm_starts():
        yield


@pytest.fixture
def fresh_processes() -> Iterator[None]:
    """Each process that the test starts is a fresh interpreter, as users' are."""
    with fresh_starts():
        yield


@pytest.fixture(scope="session")
def warm(_warm_starts: None) -> WarmCommand:
    """`warm.run("lightningrl", "train", …, cwd=folder)`."""
    return WarmCommand()


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all test processes of this run; see tests/support/once.py."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def first_agent(warm: WarmCommand, shared: Path) -> Path:
    """What `lightningrl init first` writes, its policy included; made once, to be copied."""

    def init(folder: Path) -> None:
        made = warm.run("lightningrl", "init", "first", cwd=folder, environment={"HF_HUB_OFFLINE": "1"})
        assert made.returncode == 0, made.stderr

    return made_once(shared / "init", init) / "first"


@pytest.fixture(scope="session")
def played_run(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    """A finished run's folder, for whoever only looks at it; made once."""
    from recorded import record_run

    return asyncio.run(record_run(tmp_path_factory.mktemp("recorded")))


@pytest.fixture(scope="session")
def recorded_run(first_agent: Path, warm: WarmCommand, shared: Path) -> Path:
    """The folder of a run of three steps that has ended, validated before and after; made once, to be read."""

    def train(folder: Path) -> None:
        shutil.copytree(first_agent, folder / "first")
        settings = ("--set", "validation.every=3", "--set", "loop.tasks_per_step=4")
        made = warm.run("lightningrl", "train", "first", "--run", "runs/first", "--steps", "3", *settings, cwd=folder)
        assert made.returncode == 0, made.stderr
        (folder / "said.txt").write_text(made.stdout, encoding="utf-8")

    return made_once(shared / "recorded", train) / "runs" / "first"


@pytest.fixture(scope="session")
def installed_commands(shared: Path) -> Path:
    """The commands of one environment for all pages; see tests/support/installed.py."""
    return install_as_the_pages_say(shared / "installed")


@pytest.fixture
def run_page(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., str]:
    """Run every fenced block of a page in an empty folder, top to bottom: titled ones are files, bash is run, but for
    `make` and the lines of an environment and its packages. Returns what was said. With `--long` each command is a
    fresh process of an environment that was made as the pages say, with our packages from built wheels, as a reader's
    is; without it, `init first` is a copy of `first_agent`."""
    fence = re.compile(r"^```(\w+)(?: title=(\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    is_fresh = sized(False, True)

    def run_line(line: str, environment: dict[str, str]) -> str:
        words = shlex.split(line)
        if words[0] in {"make", "pip", "source", "uv"} or words[:3] == ["python", "-m", "venv"]:
            return ""
        if words == ["lightningrl", "init", "first"] and not is_fresh:
            shutil.copytree(request.getfixturevalue("first_agent"), tmp_path / "first")
            return ""
        if words[0] in {"lightningrl", "python"} and not is_fresh:
            warm: WarmCommand = request.getfixturevalue("warm")
            ran = warm.run(*(words[1:] if words[0] == "python" else words), cwd=tmp_path, environment=environment)
        else:
            whole = {**os.environ, **environment}
            ran = subprocess.run(
                words, cwd=tmp_path, capture_output=True, text=True, check=False, env=whole, timeout=PATIENCE_S
            )
        assert ran.returncode == 0, f"{line}\n{ran.stdout}\n{ran.stderr}"
        return ran.stdout

    def run(page: str, **environment: str) -> str:
        commands = request.getfixturevalue("installed_commands") if is_fresh else Path(sys.executable).parent
        path = f"{commands}:{os.environ['PATH']}"
        said = ""
        for language, title, body in (
            match.groups() for match in fence.finditer((ROOT / page).read_text(encoding="utf-8"))
        ):
            assert title or language in {"bash", "text"}, (
                f"a block of {page} in {language} has no title, so nothing runs it"
            )
            if title:
                (tmp_path / title).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / title).write_text(body, encoding="utf-8")
            elif language == "bash":
                for line in body.strip().splitlines():
                    said += run_line(line, {"COLUMNS": "160", "PATH": path, **environment})
        return said

    return run


# ------------------------------------------------------------------ verl


@pytest.fixture(scope="session")
def core_algos() -> Iterator[Any]:
    """verl's own algorithm module. The package around it imports Ray and the workers' configuration, which the
    algorithms do not use."""
    found = importlib.util.find_spec("verl")
    assert found is not None and found.submodule_search_locations is not None, (
        "verl is a development dependency; run `make test`"
    )
    before = set(sys.modules)
    verl, workers, config = (types.ModuleType(name) for name in ("verl", "verl.workers", "verl.workers.config"))
    verl.__path__ = list(found.submodule_search_locations)
    workers.__path__ = []
    config.ActorConfig = type("ActorConfig", (), {})  # type: ignore[attr-defined]
    sys.modules.update({module.__name__: module for module in (verl, workers, config)})
    try:
        yield importlib.import_module("verl.trainer.ppo.core_algos")
    finally:
        for name in [name for name in sys.modules if name not in before and name.partition(".")[0] == "verl"]:
            del sys.modules[name]
