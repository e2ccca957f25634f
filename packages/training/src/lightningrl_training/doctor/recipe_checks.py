"""Checks of the recipe: settings that nobody reads, tasks, and what the machine has."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from lightningrl.backends import Speed
from lightningrl.machine import gigabytes
from lightningrl.types import Task
from lightningrl_training.doctor.bill import make_bill
from lightningrl_training.doctor.findings import Finding, failed, passed, warned
from lightningrl_training.doctor.observation import Observation
from lightningrl_training.tasks import explain_few_tasks, input_key

__all__ = ["disk_enough", "memory_enough", "settings_read", "tasks_differ"]

MANY_TWICE = 0.1
"""Share of training tasks that repeat another, from which a warning is given."""
NEARLY_ALL = 0.85
"""Share of the memory."""
LESS_MEMORY = "lower learner.max_tokens_per_microbatch or runtime.workers, or train with [learner.lora]"


def settings_read(seen: Observation) -> Finding:
    """Check that every setting of the recipe is read."""
    unread = list(_unread(seen))
    if not unread:
        return passed("every setting was read")
    return warned("; ".join(unread), "remove them, or set what makes them count")


def _unread(seen: Observation) -> Iterator[str]:
    recipe = seen.recipe
    if seen.unread_rewards is not None:
        yield seen.unread_rewards
    yield from (f"{name} in {count} calls of the agent" for name, count in seen.ignored.items())
    called = {call.policy for call in seen.calls}
    if called:
        yield from (f"policies.{name}: no call asks for it" for name in recipe.policies if name not in called)
    if recipe.adapters and seen.calls and not any(call.span_id or call.agent for call in seen.calls):
        yield f"adapters = {list(recipe.adapters)}: they named no call, so the agent does not use that framework"
    roles = {role for call in seen.calls for role in (call.agent or "").split("/")}
    if seen.calls:
        yield from (f"roles.{name}: no call fits it" for name in recipe.roles if name not in roles)
    for name, policy in recipe.all_policies.items():
        options = recipe.options_of(policy)
        below = "learner" if len(recipe.all_policies) == 1 else f"policy {name!r}"
        yield from _unread_options(below, options, recipe.loop.steps)
    if recipe.tasks.validation is None and {"tasks", "sampling"} & recipe.validation.model_fields_set:
        yield "validation: there is no tasks.validation"
    if recipe.credit.per_reward and len(recipe.rewards) == 1:
        yield "credit.per_reward: there is one reward"


def _unread_options(below: str, options: dict[str, Any], steps: int) -> Iterator[str]:
    if options.get("schedule", "constant") == "constant":
        yield from (
            f"{below}.{name}: schedule is 'constant'" for name in ("total_steps", "minimum_factor") if options.get(name)
        )
    elif isinstance(options.get("total_steps"), int) and 2 * options["total_steps"] < steps:
        yield f"{below}.total_steps = {options['total_steps']}: the rest of {steps} steps learns at the least rate"
    if isinstance(options.get("warmup_steps"), int) and options["warmup_steps"] > steps > 0:
        yield f"{below}.learning_rate: {steps} steps end within {options['warmup_steps']} warm-up steps"


def tasks_differ(seen: Observation) -> Finding:
    """Check that held-out tasks are held out, training tasks are no copies, and a step has enough of them."""
    train, held_out = seen.tasks.train, seen.tasks.validation
    counts = Counter(map(input_key, train))
    twice = sum(count - 1 for count in counts.values())
    if twice > MANY_TWICE * len(train):
        evidence = f"{twice} of {len(train)} training tasks repeat another's input{_contradiction(train)}"
        return warned(evidence, "remove them, if they are not meant to count more")
    if few := explain_few_tasks(seen.recipe, train):
        evidence, _, remedy = few.partition("; ")
        return warned(evidence, remedy)
    return passed(
        f"{len(train)} training tasks, {twice} of them twice; {len(held_out)} held out, none of them trained"
        + "".join(f"; {note}" for note in seen.tasks.notes)
    )


def _contradiction(tasks: Sequence[Task]) -> str:
    answers: dict[str, str] = {}
    for task in tasks:
        answer = json.dumps(task.answer, sort_keys=True, default=repr)
        if answers.setdefault(input_key(task), answer) != answer:
            return f", and {task.id!r} has another answer than it"
    return ""


def memory_enough(seen: Observation) -> Finding:
    """Check that engine, learner, server and workers fit together in the machine's memory and in a GPU's."""
    lessons = seen.lessons.values()
    if ran_out := next((lesson.error for lesson in lessons if lesson.is_out_of_memory), None):
        return failed(f"a step of the learner ran out of memory: {ran_out}", LESS_MEMORY)
    gpus = [lesson.gpu for lesson in lessons if lesson.gpu is not None]
    parts, machine, billed = [], seen.machine, make_bill(seen).memory
    if machine is None or machine.memory is None or machine.memory_used is None:
        parts.append("this system does not say what memory it has")
    else:
        grown = max((lesson.grown for lesson in lessons if lesson.grown is not None), default=None)
        beyond = "" if grown is None else f", {gigabytes(grown)} of them by a step of the learner alone"
        parts.append(f"at most {gigabytes(machine.memory_used)} of {gigabytes(machine.memory)} were used{beyond}")
        if billed is not None:
            parts.append(
                f"the run is to use {gigabytes(billed.rollouts)} in rollouts and {gigabytes(billed.step)} in a step"
            )
        elif seen.speed is not None and not gpus:
            parts.append(_explain_memory(seen.speed, machine.memory_used))
    for gpu in gpus:
        beyond = f"{gigabytes(gpu.peak - gpu.before)} beyond what engine and weights have"
        parts.append(f"on the GPU a step of the learner had {gigabytes(gpu.peak)} of {gigabytes(gpu.total)}, {beyond}")
    evidence = "; ".join(parts)
    used = 0 if machine is None else max(machine.memory_used or 0, 0 if billed is None else billed.peak)
    is_full = machine is not None and used > NEARLY_ALL * (machine.memory or math.inf)
    if is_full or any(gpu.peak > NEARLY_ALL * gpu.total for gpu in gpus):
        return warned(evidence, f"longer answers need more: {LESS_MEMORY}")
    if machine is not None and machine.gpus and not gpus:
        return warned(
            f"{evidence}; there is a GPU, of whose memory the backend says nothing",
            "to train there, see that torch sees it and that learner.device is not 'cpu'; else watch `nvidia-smi` in "
            "the first steps",
        )
    return passed(evidence)


def _explain_memory(speed: Speed, used: int) -> str:
    """The parts of a large policy's memory on a CPU; AdamW has two moments of all that learns."""
    weights = 4 * speed.parameters if speed.weight_bytes is None else speed.weight_bytes
    gradient, moments = 4 * speed.trained, speed.moment_bytes * speed.trained
    rest = used - weights - gradient - moments
    sizes = (
        f"{gigabytes(weights)} are weights, {gigabytes(gradient)} their gradient, {gigabytes(moments)} Adam's moments"
    )
    return f"{sizes}, {gigabytes(rest)} activations, words, keys and values, and processes" if rest > 0 else sizes


def disk_enough(seen: Observation) -> Finding:
    """Check that the whole run fits where runs are written."""
    if seen.machine is None:
        return passed("not looked at")
    needed, free = make_bill(seen).disk_bytes, seen.machine.disk_free
    summary = f"the run needs {gigabytes(needed)}, and {gigabytes(free)} are free"
    if needed > free:
        return failed(
            summary, "make room, write to another disk (--run), or keep fewer checkpoints (loop.keep_checkpoints)"
        )
    if needed > 0.5 * free:
        return warned(summary, "other runs need room, too: loop.keep_checkpoints says how many checkpoints stay")
    return passed(summary)
