"""The schemas that runs make in a PostgreSQL database: each run one, whose comment says for which folder it was made.

A copy of that folder reads it, and neither writes nor drops it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from sqlalchemy import Connection, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import SQLAlchemyError

from lightningrl.errors import StoreError
from lightningrl_server.store.dialects import explain
from lightningrl_server.store.places import find_store
from lightningrl_server.store.postgresql import open_postgresql

__all__ = ["check_database", "create_schema", "drop_schema", "move_schema"]

_OPTION: Final = "-csearch_path="
_LONGEST_NAME: Final = 40
_COMMENT: Final = "LightningRL: "


def check_database(database: str) -> None:
    """Raises StoreError: no psycopg, not there, not ours to use."""
    with _writing(make_url(database)) as db:
        if not db.execute(text("SELECT has_database_privilege(current_database(), 'CREATE')")).scalar():
            user, name = db.execute(text("SELECT current_user, current_database()")).one()
            raise StoreError(f"user {user!r} may make no schema in the database {name!r}; GRANT CREATE ON DATABASE {name} TO {user}")


def create_schema(database: str, folder: Path) -> str:
    """A new schema for a run's store; its URL. Raises StoreError."""
    name = re.sub("[^a-z0-9]+", "_", folder.resolve().name.lower())[:_LONGEST_NAME].strip("_")
    schema = f"lightningrl_{name}_{secrets.token_hex(4)}"
    with _writing(make_url(database)) as db:
        db.execute(text(f'CREATE SCHEMA "{schema}"'))
        _sign(db, schema, folder)
    return _with_schema(make_url(database), schema)


def move_schema(store: str, database: str, folder: Path) -> str:
    """The store's URL where its database is now called `database`; the schema is `folder`'s from now on. Raises StoreError."""
    moved, schema = _with_schema(make_url(database), _schema_of(store)), _schema_of(store)
    with _writing(make_url(database)) as db:
        owner = _owner(db, schema)
        if owner is None:
            raise StoreError(
                f"the database {database!r} has no schema {schema!r}, which has the run's rollouts; restore it, or start a new run"
            )
        if owner != folder.resolve() and (owner / "run.json").is_file() and find_store(owner) in (store, moved):
            raise StoreError(
                f"the run's rollouts are those of {str(owner)!r}, of which this is a copy: look at it, and go on with that one"
            )
        _sign(db, schema, folder)
    return moved


def drop_schema(store: str, folder: Path) -> None:
    """Remove the schema that was made for `folder`, with all that is in it. Raises StoreError."""
    url, schema = make_url(store), _schema_of(store)
    with _writing(url.difference_update_query(["options"])) as db:
        if _owner(db, schema) == folder.resolve():
            db.execute(text(f'DROP SCHEMA "{schema}" CASCADE'))


@contextmanager
def _writing(url: URL) -> Iterator[Connection]:
    database = open_postgresql(url, read_only=True, pragmas={})
    try:
        with database.writing.begin() as db:
            yield db
    except SQLAlchemyError as error:
        raise explain(error, database) from error
    finally:
        database.close()


def _sign(db: Connection, schema: str, folder: Path) -> None:
    comment = db.execute(text("SELECT quote_literal(:comment)"), {"comment": f"{_COMMENT}{folder.resolve()}"}).scalar_one()
    db.exec_driver_sql(f'COMMENT ON SCHEMA "{schema}" IS {comment}'.replace("%", "%%"))


def _owner(db: Connection, schema: str) -> Path | None:
    """The folder that a schema was made for; None = there is no such schema."""
    comments = text("SELECT obj_description(oid, 'pg_namespace') FROM pg_namespace WHERE nspname = :schema")
    row = db.execute(comments, {"schema": schema}).one_or_none()
    return None if row is None else Path(str(row[0]).removeprefix(_COMMENT))


def _with_schema(url: URL, schema: str) -> str:
    return url.update_query_dict({"options": f"{_OPTION}{schema}"}).render_as_string(hide_password=False)


def _schema_of(store: str) -> str:
    return str(make_url(store).query["options"]).removeprefix(_OPTION)
