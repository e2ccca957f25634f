"""An agent of two calls and a tool, well or with one fault: each task says which. Tasks and rewards for
`test_doctor.py`."""

from __future__ import annotations

import functools
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import openai

from lightningrl import Trajectory, report_reward, role, tool

client = functools.cache(openai.OpenAI)
numbers = itertools.count()
SCHEMA = "- singers : singer_id name age"
QUESTION = "how many singers are there whose age is above 40?"
PROMPT = f"Write one SQLite query that answers the question.\n{SCHEMA}\nQuestion: {QUESTION}\nAnswer with SQL only."

IMPORT_S = 8.0
NO_END_IN_SIGHT = "1 2 3 4 5 6 7 8 9 " * 30
"""The policy of the tests goes on from here for hundreds of tokens, so that no stream ends before it is left."""


def ask(*messages: str, **settings: Any) -> str:
    """The answer to a conversation: ours and the policy's messages in turn."""
    roles = itertools.cycle(("user", "assistant"))
    said: Any = [{"role": who, "content": text} for who, text in zip(roles, messages, strict=False)]
    reply = client().chat.completions.create(model="gpt-4o-mini", messages=said, **settings)
    return reply.choices[0].message.content or ""


def converse(more: str = "", **settings: Any) -> str:
    """Two calls, the second of which goes on from the first; a tool between them."""
    with role("writer"):
        first = ask(PROMPT, **settings)
        with tool("execute", {"query": "SELECT 1"}) as seen:
            seen.result = "1"
        return ask(PROMPT, first, f"The result is 1. {more}Say it again.", **settings)


# ------------------------------------------------------------------ faults


def is_slow_at_first() -> str:
    """Its first rollout in a process takes long, as if it imported much."""
    imports_much()
    return converse()


@functools.cache
def imports_much() -> None:
    time.sleep(IMPORT_S)


def makes_no_call() -> str:
    return "42"


def calls_another_endpoint() -> str:
    elsewhere = openai.OpenAI(base_url="http://127.0.0.1:9/v1", max_retries=0)
    try:
        elsewhere.chat.completions.create(model="m", messages=[{"role": "user", "content": "hello"}])
    except openai.APIConnectionError:
        return "nobody answers"
    raise AssertionError("somebody listens at the discard port")


def raises() -> str:
    converse()
    raise ValueError("no \x1b[2J table \u202e named singers")


def asks_in_vain() -> str:
    return ask(PROMPT, tools=[{"type": "function"}])


def retries_by_hand() -> str:
    with role("writer"):
        ask(PROMPT)
        return ask(PROMPT)


def rewrites_history() -> str:
    with role("writer"):
        said = ask(PROMPT)
        return ask(PROMPT, f"I said: {said}", "Say it again.")


def outgrows_the_context() -> str:
    return ask(f"{PROMPT} " + "how many singers are there? " * 400)


def cuts_answers_off() -> str:
    return converse(max_tokens=1)


def breaks_its_tool() -> str:
    said = converse()
    try:
        with tool("lookup", {"of": "age"}) as seen:
            seen.result = "no such column \x1b[31m"
            raise LookupError("age")
    except LookupError:
        return said


def has_an_unsteady_tool() -> str:
    said = converse()
    with tool("clock", {}) as seen:
        seen.result = f"{time.time_ns()} {next(numbers)}"
    return said


def tells_the_time() -> str:
    return converse(f"It is {time.time_ns()}. ")


def fixes_its_seed() -> str:
    return converse(seed=7)


def stops_at_once() -> str:
    with role("writer"):
        return ask(PROMPT, stop=["SELECT", " ", "("])


def asks_for_no_chance() -> str:
    return converse(temperature=0, top_p=0.5)


def leaves_its_streams() -> str:
    said = converse()
    messages: Any = [{"role": "user", "content": NO_END_IN_SIGHT}]
    with client().chat.completions.create(model="m", messages=messages, stream=True) as stream:
        next(iter(stream))
    return said


def never_ends() -> str:
    said = converse()
    threading.Event().wait()
    return said


def names_no_role() -> str:
    return ask(PROMPT)


FAULTS: Mapping[str, Callable[[], str]] = {
    function.__name__: function
    for function in (
        converse,
        is_slow_at_first,
        makes_no_call,
        calls_another_endpoint,
        raises,
        asks_in_vain,
        retries_by_hand,
        rewrites_history,
        outgrows_the_context,
        cuts_answers_off,
        breaks_its_tool,
        has_an_unsteady_tool,
        tells_the_time,
        fixes_its_seed,
        stops_at_once,
        asks_for_no_chance,
        leaves_its_streams,
        never_ends,
        names_no_role,
    )
}


def answer(task: dict[str, str]) -> str:
    said = FAULTS[task["fault"]]()
    report_reward("words", len(said.split()))
    return said or "-"


# ------------------------------------------------------------------ tasks


def tasks(faults: tuple[str, ...] = ("converse",), each: int = 1) -> Iterator[dict[str, Any]]:
    for number, fault in itertools.product(range(each), faults):
        yield {"id": f"{fault}-{number}", "input": {"fault": fault, "number": number}}


def held_out(**_: Any) -> Iterator[dict[str, Any]]:
    yield {"id": "held-out", "input": {"fault": "converse", "number": -1}}


def all_alike(**_: Any) -> Iterator[dict[str, Any]]:
    for number in range(4):
        yield {"id": f"same-{number}", "input": {"fault": "converse", "number": 0}, "answer": number}


# ------------------------------------------------------------------ rewards


def of_rollout(task: Any, output: Any, trajectory: Trajectory) -> float:
    """Each group teaches, whatever is sampled."""
    return float(int(trajectory.rollout_id.rpartition("-")[2]) % 2)


def same_for_all(task: Any, output: Any, trajectory: Trajectory) -> float:
    return 0.5


def no_number(task: Any, output: Any, trajectory: Trajectory) -> float:
    return math.nan


def too_much(task: Any, output: Any, trajectory: Trajectory) -> float:
    return 5.0


def nothing(task: Any, output: Any, trajectory: Trajectory) -> None:
    return None


def a_text(task: Any, output: Any, trajectory: Trajectory) -> str:
    return "very \x1b[2J good"


def raising(task: Any, output: Any, trajectory: Trajectory) -> float:
    raise RuntimeError("the grader \x1b[2J is away")


def of_calls(trajectory: Trajectory) -> list[float]:
    return [0.1 for _ in trajectory.transitions]


def upside_down(batch: Any) -> Any:
    """A loss with the wrong sign."""
    from lightningrl_torch.losses import TokenLosses

    return TokenLosses(losses=batch.advantages * batch.logprobs)


def broken(batch: Any) -> Any:
    """A loss that raises on real rows."""
    if not _is_tried(batch):
        raise ZeroDivisionError("no \x1b[2J tokens")
    return upside_down(batch)


def greedy(batch: Any) -> Any:
    """A loss that wants more memory on real rows than there is."""
    if not _is_tried(batch):
        batch.logprobs.new_empty(2**50)
    return upside_down(batch)


def fails_at_the_third(batch: Any) -> Any:
    """A loss that raises on the real rows of a third step, which are one batch each."""
    from lightningrl_torch.losses import TokenLosses

    if not _is_tried(batch):
        _batches.append(len(_batches))
    if len(_batches) > 2:
        raise ValueError("no third step")
    return TokenLosses(losses=-batch.advantages * batch.logprobs)


_batches: list[int] = []


def _is_tried(batch: Any) -> bool:
    """Whether the backend only tries the loss, before the run: no policy has computed these log-probabilities."""
    return bool(batch.logprobs.is_leaf)
