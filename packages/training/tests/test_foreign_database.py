"""A run folder of somebody else, whose database the user never named: nothing connects, and no password is sent."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightningrl.commands import main
from lightningrl.errors import LightningError, StoreError
from lightningrl_server.store.location import find_store, name_database
from lightningrl_server.store.sql import open_database
from lightningrl_viewer.runs import remove_run

PASSWORD = "sesame-of-mine"


class Listener:
    """A server that says it is PostgreSQL and asks for a password in the way that `kind` names."""

    def __init__(self, kind: int) -> None:
        self.heard = b""
        self.connections = 0
        self._kind = kind
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return
            self.connections += 1
            with peer:
                peer.settimeout(2)
                try:
                    start = peer.recv(4096)
                    if start[4:8] == b"\x04\xd2\x16\x2f":  # may we speak TLS?
                        peer.sendall(b"N")
                        start = peer.recv(4096)
                    salt = b"salt" if self._kind == 5 else b""
                    peer.sendall(b"R" + (8 + len(salt)).to_bytes(4, "big") + self._kind.to_bytes(4, "big") + salt)
                    self.heard += peer.recv(4096)
                except OSError:
                    pass

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=[3, 5], ids=["clear", "md5"])
def listener(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    for name in ("PGHOST", "PGPORT", "PGREQUIREAUTH", "LIGHTNINGRL_DATABASES"):
        monkeypatch.delenv(name, raising=False)
    listener = Listener(request.param)
    yield listener
    listener.close()


def make_folder(folder: Path, store: str) -> Path:
    folder.mkdir()
    origin: dict[str, Any] = {
        "source": None,
        "folder": ".",
        "run": str(folder),
        "models": {},
        "settings": {},
        "store": store,
    }
    (folder / "run.json").write_text(json.dumps(origin))
    (folder / "recipe.json").write_text(json.dumps({"agent": "agent.py:answer", "store_url": store.partition("?")[0]}))
    return folder


@pytest.mark.parametrize(
    "form", ["postgresql://me@127.0.0.1:{}/n", "postgresql+psycopg://me@h/n?hostaddr=127.0.0.1&port={}"]
)
def test_reading_a_foreign_run_connects_nowhere_and_says_what_to_give(
    listener: Listener,
    tmp_path: Path,
    form: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = make_folder(tmp_path / "run", form.format(listener.port))

    monkeypatch.setattr("sys.argv", ["lightningrl", "rollouts", "list", "--run", str(folder)])
    with pytest.raises(SystemExit):
        main()
    said = " ".join(capsys.readouterr().err.split())
    with pytest.raises(StoreError, match="no recipe has named on this machine"):
        remove_run(folder)

    assert "set LIGHTNINGRL_DATABASES to this address" in said
    assert "Traceback" not in said
    assert listener.connections == 0


@pytest.mark.parametrize("how", ["recipe", "variable", "host"])
def test_a_database_that_the_user_named_is_connected_to_and_gets_no_password_in_clear(
    listener: Listener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    database = f"postgresql://me@127.0.0.1:{listener.port}/rollouts"
    folder = make_folder(tmp_path / "run", f"{database}?options=-csearch_path%3Dlightningrl_a")
    if how == "recipe":
        name_database(database)
    elif how == "variable":
        monkeypatch.setenv("LIGHTNINGRL_DATABASES", database)
    else:
        monkeypatch.setenv("PGHOST", "127.0.0.1")
        monkeypatch.setenv("PGPORT", str(listener.port))

    with pytest.raises(LightningError, match="PGREQUIREAUTH"):
        open_database(find_store(folder), read_only=True)

    assert listener.connections > 0
    assert PASSWORD.encode() not in listener.heard
    assert b"md5" not in listener.heard


def test_another_host_behind_a_named_one_is_not_connected_to(listener: Listener, tmp_path: Path) -> None:
    name_database("postgresql://me@127.0.0.1:1/rollouts")
    folder = make_folder(
        tmp_path / "run", f"postgresql://me@127.0.0.1:1/rollouts?hostaddr=127.0.0.1&port={listener.port}"
    )

    with pytest.raises(StoreError, match="no recipe has named"):
        find_store(folder)


@pytest.mark.parametrize(
    "more", ["", "?options=-cwork_mem%3D1", "?options=-csearch_path%3Da&options=-csearch_path%3Db"]
)
def test_a_run_whose_file_names_a_database_without_a_schema_is_not_deleted_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: str
) -> None:
    monkeypatch.setenv("LIGHTNINGRL_DATABASES", "postgresql://me@127.0.0.1:1/rollouts")
    folder = make_folder(tmp_path / "run", f"postgresql://me@127.0.0.1:1/rollouts{more}")

    with pytest.raises(StoreError, match="has no schema; restore the file"):
        remove_run(folder)
    assert (folder / "run.json").is_file()
