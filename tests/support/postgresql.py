"""A PostgreSQL server of a test's own, where this machine has its programs: no port, no disk sync, gone afterwards."""

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
from sqlalchemy import MetaData, create_engine, insert, text

_OPTIONS = "-c listen_addresses='' -c fsync=off -c max_connections=40 -k"


class PostgreSQL:
    """A running server."""

    def __init__(self, folder: Path) -> None:
        self._url = f"postgresql+psycopg://postgres@/postgres?host={folder}"
        self._numbers = itertools.count()

    def new_url(self) -> str:
        """Of a schema that nothing is in."""
        name = f"store_{next(self._numbers)}"
        engine = create_engine(self._url)
        with engine.begin() as db:
            db.execute(text(f"CREATE SCHEMA {name}"))
        engine.dispose()
        return f"{self._url}&options=-csearch_path%3D{name}"

    def copy(self, url: str) -> str:
        """All tables of another database in a new schema; returns its URL."""
        copied, tables = self.new_url(), MetaData()
        source, target = create_engine(url), create_engine(copied)
        with source.connect() as old, target.begin() as new:
            tables.reflect(old)
            for table in tables.sorted_tables:
                for column in table.columns:
                    column.type, column.server_default = column.type.as_generic(), None
                table.indexes.clear()
            tables.create_all(new)
            for table in tables.sorted_tables:
                if rows := [dict(row) for row in old.execute(table.select()).mappings()]:
                    new.execute(insert(table), rows)
                if list(table.primary_key.columns.keys()) == ["pk"]:
                    sequence = f"pg_get_serial_sequence('{table.name}', 'pk')"
                    new.execute(text(f"SELECT setval({sequence}, coalesce(max(pk), 1)) FROM {table.name}"))
        source.dispose()
        target.dispose()
        return copied


@contextmanager
def serving_postgresql() -> Iterator[PostgreSQL]:
    """Skips where there is none. It refuses to run as root: then it runs as `nobody`."""
    pytest.importorskip("psycopg", reason="no psycopg; pip install 'lightningrl[postgres]'")
    if not (shutil.which("initdb") and shutil.which("pg_ctl")):
        pytest.skip("no PostgreSQL on this machine; apt-get install postgresql, and its programs on the PATH")
    other: dict[str, Any] = {"user": "nobody"} if os.getuid() == 0 else {}
    folder = Path(tempfile.mkdtemp(prefix="pg-"))

    def run(*command: str) -> None:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, **other)
        assert done.returncode == 0, done.stdout + done.stderr

    try:
        if other:
            shutil.chown(folder, "nobody")
        run("initdb", "-D", f"{folder}/data", "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-sync")
        run("pg_ctl", "-D", f"{folder}/data", "-w", "-l", f"{folder}/log", "-o", f"{_OPTIONS} {folder}", "start")
        try:
            yield PostgreSQL(folder)
        finally:
            run("pg_ctl", "-D", f"{folder}/data", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
