"""Checks of a recipe's parts against each other (potentials, judge, critic, samples, backend), and digests of them: a
value that was kept is taken again only where the part that computed it is the same."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from lightningrl.backends import Capabilities
from lightningrl.errors import ConfigError, PluginError
from lightningrl.loading import describe, is_reference, resolve
from lightningrl.protocols import CreditAssigner
from lightningrl.recipe import Recipe
from lightningrl_credit.baselines import DIVIDING
from lightningrl_credit.combinators import Combination
from lightningrl_credit.log_ratios import TeacherCredit
from lightningrl_credit.rewards import NamedReward, TurnReward
from lightningrl_credit.rewards.lineages import discount_of, lambda_of
from lightningrl_credit.turns import TurnReturns
from lightningrl_server.rendering.tokenizer import load_tokenizer

__all__ = [
    "check_capabilities",
    "check_critic",
    "check_judge",
    "check_potentials",
    "check_reward",
    "check_samples",
    "check_teacher",
    "check_turn_sizes",
    "digest_parts",
    "gather",
    "required_settings",
]

_PAY: Final = ("ok", "error", "charge", "scale")
"""Options of our intermediate rewards that say what is paid."""


_POSITIONAL: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_TAKEN: Final = ("task", "output", "trajectory")
_MEANINGS: Final = {
    **dict.fromkeys(("prompt", "prompt_str", "query", "queries", "question", "problem", "input"), "task.input"),
    **dict.fromkeys(("data_source", "extra_info", "reward_model", "info"), "task.metadata"),
    **dict.fromkeys(("solution_str", "outputs", "candidate"), "output"),
    **dict.fromkeys(("answer", "solution"), "task.answer"),
    **dict.fromkeys(("completion_id", "completions_id", "prompt_id"), "in trajectory.transitions"),
    "completions": "output, of one rollout and not of a list of them",
    "reward_input": "task, output and trajectory",
}
"""Arguments of rewards of verl, TRL, verifiers, OpenRLHF and EasyR1, in our terms (docs/tutorials/coming-from.md), with
or without the "s" of several."""
_WORDS: Final = {
    **dict.fromkeys(("completion", "response", "predict", "pred", "prediction", "generated", "generation"), "output"),
    **dict.fromkeys(("truth", "true", "gt", "gold", "label", "target", "expected", "reference", "ref"), "task.answer"),
}
"""Words within such names, also those of evaluators: `expected_output`, `y_true`."""


def _meaning(argument: str) -> str | None:
    """An argument of another trainer's in our terms; None for one that may be the user's own."""
    if meaning := _MEANINGS.get(argument, _MEANINGS.get(argument.removesuffix("s"))):
        return meaning
    words = {_WORDS.get(word.removesuffix("s")) for word in argument.split("_")}
    return next((meaning for meaning in ("task.answer", "output") if meaning in words), None)


def gather(*calls: Callable[[], Any], problems: Sequence[str] = ()) -> list[Any]:
    """Call each and return their results. ConfigError with all sentences, of those refused and `problems`."""
    results: list[Any] = []
    sentences: list[Any] = [*problems]
    for call in calls:
        try:
            results.append(call())
        except (ConfigError, PluginError) as error:
            sentences += error.args
    if sentences:
        raise ConfigError(*dict.fromkeys(sentences))
    return results


def required_settings(factory: Callable[..., Any]) -> list[str]:
    """Names of the keyword parameters that have no default."""
    parameters = inspect.signature(factory).parameters.values()
    return [each.name for each in parameters if each.kind is each.KEYWORD_ONLY and each.default is each.empty]


def check_reward(name: str, use: Any, reward: Any) -> None:
    """Raise ConfigError for a function that takes anything but (task, output, trajectory): what names another trainer's
    arguments would compare other things than its author meant, and pay 0."""
    try:
        signature = inspect.signature(reward)
        positional = [each.name for each in signature.parameters.values() if each.kind in _POSITIONAL]
        names = [parameter.strip("_").lower() for parameter in positional]
        foreign = {
            argument: meaning
            for place, argument in enumerate(names[: len(_TAKEN)])
            if (meaning := _meaning(argument)) is not None
            and not (place == 1 and argument in ("answer", "solution"))  # the agent's own
        }
        is_moved = any(own in names and names.index(own) != place for place, own in enumerate(_TAKEN))
        if is_moved or any(meaning != "output" or names.index(argument) != 1 for argument, meaning in foreign.items()):
            mapping = (
                ", ".join(f"{argument!r} is {meaning}" for argument, meaning in foreign.items()) or "in this order"
            )
            raise ConfigError(
                f"reward {name!r} ({use!r}) takes ({', '.join(signature.parameters)}); a reward is called with (task, "
                f"output, trajectory): {mapping}"
            )
        signature.bind("task", "output", "trajectory")
    except ValueError:  # a builtin says nothing of what it takes
        return
    except TypeError:
        if not callable(reward):
            return  # said by NamedReward
        raise ConfigError(
            f"reward {name!r} ({use!r}) takes ({', '.join(signature.parameters)}); a reward is called with (task, "
            "output, trajectory)"
        ) from None


def check_potentials(recipe: Recipe, names: Sequence[str], assigner: CreditAssigner) -> None:
    """Raise ConfigError for those that would pay, because they cannot be discounted as returns are, and for those that
    are noise: of what calls earn to the end a potential leaves -Φ(s_t), which call t cannot change."""
    if not names:
        return
    discount = discount_of(assigner)
    potential = (
        f"intermediate reward {names[0]!r} is a potential, which is discounted call by call as returns are, and "
        f"credit.use {recipe.credit.use!r}"
    )
    if discount is None:
        raise ConfigError(
            f"{potential} has no `gamma` per call; take 'turn_gae', 'states' with `lam` below 1, or a plain reward"
        )
    if lambda_of(assigner) >= 1.0:
        raise ConfigError(
            f"intermediate reward {names[0]!r} is a potential, which is noise where credit.use {recipe.credit.use!r} "
            "adds up what calls earn to the end: no call changes its sum; pay it plainly (form = 'plain', "
            "'tool_status'), or take credit that goes by a value ahead: 'turn_gae' or 'states' with `lam` below 1"
        )
    gamma, joins = discount
    is_trained = all(
        policy.trainable and policy.trained_agents is None and all(rule.train for rule in policy.calls)
        for policy in recipe.all_policies.values()
    )
    if gamma != 1.0 and joins == "mean" and not is_trained:  # its returns pass over calls that are not trained
        raise ConfigError(
            f"{potential} discounts nothing at calls that are not trained; set its gamma to 1, train every role, or "
            "take a plain reward"
        )


def check_turn_sizes(recipe: Recipe, turns: Sequence[TurnReward], assigner: CreditAssigner) -> None:
    """Raise ConfigError for sizes of turn rewards that cancel, as the baseline of the turns divides by what they scale:
    a weight that all of them have, or options that pay another multiple of one reward's default."""
    active = [turn for turn in turns if turn.weight != 0.0]
    for part in (assigner, *_list_nested(assigner)):
        if not active or not isinstance(part, TurnReturns) or part.turn_baseline not in DIVIDING:
            continue
        weights = {turn.weight * part.weights.get(turn.name, 1.0) for turn in active}
        sizes = []
        if len(weights) == 1 and abs(weights.pop()) != 1.0:
            sizes += [f"the weight of {' and '.join(repr(turn.name) for turn in active)}"]
        if len(active) == 1:
            name = active[0].name
            options = recipe.intermediate_rewards[name].options
            sizes += [f"{key!r} of {name!r}" for key in _scaling_options(active[0].function, options)]
        if sizes:
            raise ConfigError(
                f"turn_baseline {part.turn_baseline!r} divides turn rewards by their own size, and "
                f"{' and '.join(sizes)} would change nothing; set turn_weight in its place, or leave turn_baseline out"
            )


def _scaling_options(function: Any, options: Mapping[str, Any]) -> list[str]:
    """Names of given options that together pay a multiple of what is paid without them: `ok = 0.5, error = -0.5`."""
    parameters = inspect.signature(type(function).__init__).parameters
    defaults = {name: float(parameters[name].default) for name in _PAY if name in parameters}
    given = {name: float(options.get(name, default)) for name, default in defaults.items()}
    ratio = next((given[name] / default for name, default in defaults.items() if default), 1.0)
    is_multiple = all(math.isclose(given[name], ratio * default) for name, default in defaults.items())
    return [name for name in given if name in options] if is_multiple and ratio > 0.0 and ratio != 1.0 else []


def check_judge(recipe: Recipe, assigner: CreditAssigner) -> None:
    if recipe.judge is not None and not assigner.has("score", "score_group"):
        raise ConfigError(
            f"[judge] is set, and credit.use {recipe.credit.use!r} asks none: it has no `score`; remove the table"
        )


def check_critic(
    recipe: Recipe, assigner: CreditAssigner, capabilities: Capabilities | None, *, is_paid_by_role: bool
) -> None:
    """Raise ConfigError for a critic that nobody teaches, and for one that would expect several returns at a time."""
    if assigner.has("value_targets"):
        if is_paid_by_role:
            raise ConfigError(
                f"credit.use {recipe.credit.use!r} teaches a critic the rollout's return, and rewards with `agents` "
                "pay each role another; remove `agents` from them, or take another credit assigner"
            )
        return
    has_critic = any(recipe.options_of(policy).get("critic") is not None for policy in recipe.all_policies.values())
    if has_critic and capabilities is not None and "values" in capabilities.services:
        raise ConfigError(
            f"[learner.critic] is set, and credit.use {recipe.credit.use!r} teaches it nothing; set credit.use = "
            "'turn_gae', or remove the table"
        )


def check_teacher(recipe: Recipe, assigner: CreditAssigner, models: Mapping[str, str]) -> None:
    """Raise ConfigError for a teacher that is no frozen policy of the run, or that reads other tokens than those it is
    asked about."""
    for part in (assigner, *_list_nested(assigner)):
        if not isinstance(part, TeacherCredit):
            continue
        name, policies = part.teacher, recipe.all_policies
        if name not in policies or policies[name].trainable:
            problem = "is trained itself" if name in policies else f"is none of {', '.join(map(repr, policies))}"
            raise ConfigError(
                f"credit assigner 'teacher' asks policy {name!r}, which {problem}; add a table [policies.{name}] with "
                "its model and trainable = false"
            )
        for student in (other for other, policy in policies.items() if policy.trainable):
            if not _read_same_tokens(models.get(name, ""), models.get(student, "")):
                raise ConfigError(
                    f"teacher {name!r} has another tokenizer than policy {student!r}, so it cannot judge its tokens; "
                    "take a teacher of the same model family"
                )


def _read_same_tokens(model: str, other: str) -> bool:
    """False for two models whose vocabularies are known to differ."""
    if not model or not other or model == other:
        return True
    try:
        ours, others = (load_tokenizer(name, is_there=True) for name in (model, other))
    except ConfigError:  # a hub model that was not fetched yet, or none: said elsewhere
        return True
    return bool(ours.get_vocab() == others.get_vocab())


def check_samples(recipe: Recipe) -> None:
    if recipe.samples.aggregation == "constant" and recipe.samples.constant_length is None:
        raise ConfigError(
            "samples.aggregation 'constant' needs samples.constant_length, the tokens per rollout to divide by"
        )


def check_capabilities(backend: str, can: Capabilities, options: Mapping[str, Any]) -> None:
    """Raise ConfigError for what a recipe asks of a trainer backend that does not declare it."""
    loss, device = options.get("loss"), options.get("device", "auto")
    refused = {
        "loss": isinstance(loss, str) and (not can.own_losses if is_reference(loss) else loss not in can.losses),
        "device": device != "auto" and device not in can.devices,
        "lora": options.get("lora") not in (None, False) and not can.lora,
        "kl_coef": bool(options.get("kl_coef")) and not can.reference_kl,
        "critic": options.get("critic") is not None and not can.critic,
    }
    if any(refused.values()):
        asked = {name: options[name] for name in refused if refused[name]}
        lacking = (
            f"learner.{name} is {value!r}, which trainer backend {backend!r} does not have"
            for name, value in asked.items()
        )
        raise ConfigError(*(f"{sentence}; it has: {can}" for sentence in lacking))


def digest_parts(
    recipe: Recipe, rewards: Sequence[NamedReward], intermediate: Mapping[str, TurnReward], assigner: CreditAssigner
) -> dict[str, str]:
    """Digests of rewards, intermediate rewards and credit, by the recipe's key."""
    made_by = recipe.tasks.model_dump(mode="json", include={"use", "options", "sources"}, fallback=describe)
    digests = {
        f"rewards.{reward.name}": _digest(
            reward.function,
            {**recipe.rewards[reward.name].options, **(made_by if recipe.rewards[reward.name].use == "tasks" else {})},
        )
        for reward in rewards
    }
    for name, part in recipe.intermediate_rewards.items():
        settings = part.model_dump(exclude_unset=True, exclude={"use", "options"})
        if intermediate[name].is_potential:
            settings |= {"gamma": intermediate[name].gamma, "joins": intermediate[name].joins}
        digests[f"intermediate_rewards.{name}"] = _digest(intermediate[name].function, {**part.options, **settings})
    judge = None if recipe.judge is None else f"{recipe.judge.model} at {recipe.judge.base_url}"
    nested = (
        {"nested": [_digest(part, {}) for part in _list_nested(assigner)]} if isinstance(assigner, Combination) else {}
    )
    files = [_digest(resolve(reference, recipe.folder), {}) for reference in _list_files(recipe.credit.options)]
    digests["credit"] = _digest(
        assigner, {**recipe.credit.options, "judge": judge, **nested, **({"files": files} if files else {})}
    )
    return digests


def _digest(part: Any, options: Mapping[str, Any]) -> str:
    """Digest of a part built from `options`: it changes with them and with the part's file, not with its imports."""
    while isinstance(part, partial):
        part = part.func
    target = part if inspect.isroutine(part) or inspect.isclass(part) else type(part)
    settings = json.dumps(options, sort_keys=True, default=lambda value: type(value).__qualname__)
    text = f"{target.__module__}:{target.__qualname__} {settings} {_source(target)}"
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _source(target: Any) -> str:
    """The text of its file, or its own where there is none (a notebook's cell); empty where there is neither."""
    with contextlib.suppress(OSError, TypeError):
        return Path(inspect.getsourcefile(target) or "").read_text(encoding="utf-8")
    with contextlib.suppress(OSError, TypeError):
        return inspect.getsource(target)
    return ""


def _list_files(options: Any) -> Iterator[str]:
    """The references into files, `"file.py:name"`, among options and those within them."""
    if isinstance(options, str) and re.fullmatch(r"[^\s:]*\.py:[\w.]+", options):
        yield options
    elif isinstance(options, Mapping):
        for value in options.values():
            yield from _list_files(value)
    elif isinstance(options, list | tuple):
        for value in options:
            yield from _list_files(value)


def _list_nested(assigner: CreditAssigner) -> Iterator[CreditAssigner]:
    for part in assigner.parts if isinstance(assigner, Combination) else ():
        yield part
        yield from _list_nested(part)
