"""A PostgreSQL server for the tests of one process, where this machine has its programs: no port, gone afterwards."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from lightningrl.machine import cpu_seconds

_OPTIONS = "-c listen_addresses='' -c max_connections=200 -k"
WHERE = os.pathsep.join(
    [os.environ.get("PATH", ""), *map(str, sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True))]
)
"""Debian's package keeps its programs off the PATH."""
NOT_TESTED = "no PostgreSQL on this machine; `apt-get install postgresql`"


class PostgreSQL:
    """A running server."""

    def __init__(self, folder: Path, *, syncs: bool) -> None:
        self._folder = folder
        self._options = f"-c fsync={'on' if syncs else 'off'} {_OPTIONS} {folder}"
        self.database = f"postgresql://postgres@/postgres?host={folder}"
        """As a recipe names it."""
        self.guarded = f"postgresql://guarded@/postgres?host={folder}"
        """Of a user with a password, who may make no schema."""
        self._url = self.database.replace("postgresql:", "postgresql+psycopg:")
        self._numbers = itertools.count()

    def start(self) -> None:
        self._control("-w", "-l", f"{self._folder}/log", "-o", self._options, "start")

    def kill(self) -> None:
        """As `kill -9` of all of it would: no checkpoint is made, clients lose their connections."""
        self._control("-m", "immediate", "stop")

    def restart(self) -> None:
        self.kill()
        self.start()

    def cpu_s(self) -> float:
        """That all its processes have used, those that ended among them."""
        return cpu_seconds(int((self._folder / "data" / "postmaster.pid").read_text().split()[0])) or 0.0

    def _control(self, *command: str) -> None:
        _run(self._folder, "pg_ctl", "-D", f"{self._folder}/data", *command)

    def ask(self, statement: str) -> list[Any]:
        """Of the database itself."""
        engine = create_engine(self._url, isolation_level="AUTOCOMMIT")
        try:
            with engine.connect() as db:
                found = db.execute(text(statement))
                return list(found.all()) if found.returns_rows else []
        finally:
            engine.dispose()

    def new_url(self) -> str:
        """Of a schema that nothing is in."""
        name = f"store_{next(self._numbers)}"
        engine = create_engine(self._url)
        with engine.begin() as db:
            db.execute(text(f"CREATE SCHEMA {name}"))
        engine.dispose()
        return f"{self._url}&options=-csearch_path%3D{name}"


def _run(folder: Path, program: str, *arguments: str) -> None:
    """It refuses to run as root: then it runs as `nobody`."""
    other: dict[str, Any] = {"user": "nobody"} if os.getuid() == 0 else {}
    found = shutil.which(program, path=WHERE)
    assert found is not None
    done = subprocess.run([found, *arguments], cwd=folder, capture_output=True, text=True, check=False, **other)
    assert done.returncode == 0, done.stdout + done.stderr


@contextmanager
def serving_postgresql(*, syncs: bool = False) -> Iterator[PostgreSQL]:
    """Skips where there is none. `syncs`: what is committed outlives a fall of the machine, as outside of tests."""
    pytest.importorskip("psycopg", reason="no psycopg; pip install 'lightningrl[postgres]'")
    if not (shutil.which("initdb", path=WHERE) and shutil.which("pg_ctl", path=WHERE)):
        pytest.skip(NOT_TESTED)
    folder = Path(tempfile.mkdtemp(prefix="pg-"))
    try:
        if os.getuid() == 0:
            shutil.chown(folder, "nobody")
        _run(folder, "initdb", "-D", f"{folder}/data", "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-sync")
        rules = folder / "data" / "pg_hba.conf"
        rules.write_text("local all guarded scram-sha-256\n" + rules.read_text())
        server = PostgreSQL(folder, syncs=syncs)
        server.start()
        try:
            server.ask("CREATE ROLE guarded LOGIN PASSWORD 'open sesame'")
            yield server
        finally:
            server.kill()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
