"""A process that runs queries which a model wrote: one JSON line `[script, query]` for each, answered by the rows or
the error as a text.

It reads its in-memory table and does nothing else. A query that takes too much time or memory ends the process.
"""

import json
import resource
import signal
import sqlite3
import sys

ALLOWED = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
SECONDS, MEMORY, LONGEST_VALUE, MOST_ROWS = 2.0, 500_000_000, 100_000, 1000


def run(script: str, query: str) -> str:
    database = sqlite3.connect(":memory:")
    try:
        database.executescript(script)
        database.execute("PRAGMA temp_store = memory")
        database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_VALUE)
        database.set_authorizer(lambda action, *names: sqlite3.SQLITE_OK if action in ALLOWED else sqlite3.SQLITE_DENY)
        rows = database.execute(query).fetchmany(MOST_ROWS + 1)
        return str(rows) if len(rows) <= MOST_ROWS else f"error: more than {MOST_ROWS} rows"
    except (sqlite3.Error, sqlite3.Warning, ValueError, MemoryError) as error:
        return f"error: {error}"
    finally:
        database.close()


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        answer = run(*json.loads(line))
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(answer), flush=True)
