"""An agent from scratch on the plain `openai` client: it writes a query, and rewrites it once if SQLite refuses it."""

import functools
import json
import random
import subprocess
import sys
import threading
from pathlib import Path

from openai import OpenAI

client = functools.cache(OpenAI)  # made when first called: the trainer reads tasks and reward from this file, too
lock = threading.Lock()
BELOW = "SELECT name FROM {t} WHERE {n} < ( SELECT avg( {n} ) FROM {t} )"
KINDS = (
    ("how many {t} are there whose {n} is above {v}?", "SELECT count(*) FROM {t} WHERE {n} > {v}"),
    ("how many different name do the {t} have?", "SELECT count( DISTINCT name ) FROM {t}"),
    ("list the name of the {t} whose {n} is below the average.", BELOW),
    ("show the name of the 3 {t} with the highest {n}.", "SELECT name FROM {t} ORDER BY {n} DESC LIMIT 3"),
    ("which name have more than 2 {t}?", "SELECT name FROM {t} GROUP BY name HAVING count(*) > 2"),
)
NAMES = ("anna", "ben", "anna", "david", "emma", "ben", "anna")


def ask(prompt: str) -> str:
    reply = client().chat.completions.create(model="gpt-4o-mini", messages=[{"role": "user", "content": prompt}])
    return (reply.choices[0].message.content or "").strip()


@functools.cache  # what a model wrote runs in a process of its own: the reward below is computed in the trainer's
def queries() -> subprocess.Popen:
    program = [sys.executable, "-I", Path(__file__).with_name("query.py")]
    return subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def run(script: str, query: str) -> str:
    with lock:
        process = queries()
        process.stdin.write(json.dumps([script, query]).encode() + b"\n")
        process.stdin.flush()
        said = process.stdout.readline()
        if not said:
            queries.cache_clear()
            process.communicate()
    return json.loads(said) if said else "error: the query took too much time or memory"


def answer(task: dict[str, str]) -> str:
    asked = f"{task['schema']}\nQuestion: {task['question']}"
    query = ask(f"Write one SQLite query that answers the question.\n{asked}\nAnswer with SQL only.")
    result = run(task["script"], query)
    if not result.startswith("error"):
        return query
    words = f"{asked}\nQuery: {query}\nResult: {result}"
    return ask(f"This SQLite query is wrong. Rewrite it.\n{words}\nRewrite the query, answer with SQL only.")


def make_tasks(tables: str, columns: str, count: int):
    rng = random.Random(tables)
    for number in range(count):
        limit, table, column = rng.randrange(30, 50), rng.choice(tables.split()), rng.choice(columns.split())
        question, gold = (text.format(t=table, n=column, v=limit) for text in rng.choice(KINDS))
        rows = ", ".join(f"({one}, '{name}', {rng.randrange(20, 60)})" for one, name in enumerate(NAMES))
        script = f"CREATE TABLE {table} (id, name, {column}); INSERT INTO {table} VALUES {rows};"
        inputs = {"schema": f"- {table} : {table[:-1]}_id name {column}", "question": question, "script": script}
        yield {"id": f"{tables.split()[0]}-{number}", "input": inputs, "answer": gold}


def train_tasks():
    return make_tasks("singers pilots players hotels museums schools", "age salary height capacity area", 400)


def held_out_tasks():
    return make_tasks("teachers stadiums customers", "weight experience rating stock", 100)


def right_rows(task, output, trajectory) -> float:
    return float(run(task.input["script"], output) == run(task.input["script"], task.answer))
