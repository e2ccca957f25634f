"""`lightningrl serve` and the folder it works in."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from pathlib import Path
from typing import Any

import pytest

from lightningrl.errors import ConfigError, ServerError
from lightningrl_client import recipe_file
from lightningrl_training.commands import serve


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(recipe_file, "load_recipe", lambda source, settings: None)
    return tmp_path


def serve_by(monkeypatch: pytest.MonkeyPatch, error: BaseException, *, writes_log: bool) -> None:
    async def fail(recipe: Any, checkpoint: Any, scratch: Path, *more: Any) -> None:
        if writes_log:
            (scratch / "server.log").write_text("what went wrong")
        raise (
            error
            if not isinstance(error, ServerError)
            else ServerError(f"{error}; see {str(scratch / 'server.log')!r}")
        )

    monkeypatch.setattr(serve, "_serve", fail)
    serve.serve(Path("recipe.toml"), port=0)


def test_the_log_that_an_error_names_is_there_to_read(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ServerError):
        serve_by(monkeypatch, ServerError("the server was not ready"), writes_log=True)
    (log,) = here.rglob("server.log")
    assert log.read_text() == "what went wrong"


@pytest.mark.parametrize(
    ("error", "writes_log"), [(asyncio.CancelledError(), True), (ConfigError("no such model"), False)]
)
def test_nothing_is_left_of_a_server_that_was_stopped_or_never_started(
    here: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, writes_log: bool
) -> None:
    with contextlib.suppress(ConfigError):
        serve_by(monkeypatch, error, writes_log=writes_log)
    assert list(here.iterdir()) == []
