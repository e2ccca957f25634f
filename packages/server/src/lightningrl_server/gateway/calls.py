"""The way of one call: who asks, which tokens, which engine, recorded, answered.

request ─► routing ─► prompt (bridged from an earlier call, or rendered) ─► engine ─► choices ─► store (durable)
                                                                                                 └─► Answer
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import count
from typing import Any

from lightningrl.call_origin import is_role_among
from lightningrl.errors import BackendError, ContextOverflow, EngineUnavailable, StoreError
from lightningrl.recipe_tables import RoleConfig
from lightningrl.types import SamplingSettings
from lightningrl_server.engines.registry import EngineRegistry
from lightningrl_server.gateway.attempt_memory import AttemptMemories, PolicyCall
from lightningrl_server.gateway.choices import (
    ChoiceSampler,
    SampledChoice,
    answer_again,
    bind_answer,
    choose_sampling,
    note_unheeded,
    repeat_choices,
    sample_as_asked,
)
from lightningrl_server.gateway.prompt import Prompt, PromptBuilder, Threads
from lightningrl_server.gateway.refusals import refusal_of
from lightningrl_server.gateway.request import Answer, AnswerStart, CallContext, CallRequest, Delivery, Refusal
from lightningrl_server.gateway.settings import CallWatch, GatewaySettings
from lightningrl_server.records import AttemptInfo, CallRecord
from lightningrl_server.rendering.completion import TextDelta
from lightningrl_server.rendering.renderer import PolicyRenderer
from lightningrl_server.store.protocol import CallLog

__all__ = ["PolicyCalls", "Routing", "fitting_patterns"]

logger = logging.getLogger(__name__)

AnswerParts = AsyncGenerator[AnswerStart | TextDelta | Answer, None]


class Routing:
    """The run's policies and what leads to each.

    role      its own, if it says so  >  the first rule of the run that fits (model asked for, system prompt)
    policy    of that name  >  the one that the role is given to  >  the default  >  None: the upstream's, or refused
    """

    def __init__(
        self,
        policies: Collection[str],
        *,
        default: str | None = None,
        agents: Mapping[str, Collection[str]] | None = None,
        rules: Mapping[str, RoleConfig] | None = None,
    ) -> None:
        """`agents`: roles by the policy that answers them; `rules`: how calls of a role are told. `default` None = the
        only policy, where there is just one."""
        self.policies = tuple(policies)
        self._default = default if default is not None or len(self.policies) != 1 else self.policies[0]
        self._agents = {policy: frozenset(roles) for policy, roles in (agents or {}).items() if roles}
        self._rules = {
            role: rule for role, rule in (rules or {}).items() if rule.model is not None or rule.system is not None
        }

    def find(self, agent: str | None, model: str, messages: Sequence[Mapping[str, Any]]) -> tuple[str | None, str]:
        """The role of a call, and the policy that answers it. Raises Refusal where none does."""
        role = self.role(agent, model, messages)
        policy = self.policy(model, role)
        if policy is not None:
            return role, policy
        asked = f"no policy {model!r} in this run" + (f", none for the role {role!r}" if role is not None else "")
        raise Refusal(
            f"{asked}, and no default policy; it serves {', '.join(sorted(self.policies))}. To have other models "
            "answered by your provider, configure [upstream] base_url and api_key_env in the recipe",
            status=404,
            code="model_not_found",
            param="model",
        )

    def role(self, agent: str | None, model: str, messages: Sequence[Mapping[str, Any]]) -> str | None:
        """The role of a call: the one that it names itself, else the first rule that fits; None = nobody knows."""
        if agent is not None:
            return agent
        return next((role for role, rule in self._rules.items() if _fits(rule, model, messages)), None)

    def policy(self, model: str, role: str | None) -> str | None:
        """The policy that answers; None = none does."""
        if model in self.policies:
            return model
        if role is not None:
            for policy, roles in self._agents.items():
                if is_role_among(role, roles):
                    return policy
        return self._default if self._default in self.policies else None

    def may_serve(self, model: str, agent: str | None) -> bool:
        """True if a policy may answer, by what is known before the messages are read."""
        if self.policy(model, self.role(agent, model, ())) is not None:
            return True
        by_system = [role for role, rule in self._rules.items() if rule.system is not None and _fits_model(rule, model)]
        return agent is None and any(self.policy("", role) is not None for role in by_system)


class PolicyCalls:
    """Makes calls for attempts. One per server, inside its event loop."""

    def __init__(
        self,
        log: CallLog,
        engines: EngineRegistry,
        renderers: Mapping[str, PolicyRenderer],
        settings: GatewaySettings,
        threads: Threads,
        watch: CallWatch | None = None,
    ) -> None:
        self._log = log
        self._watch = watch
        self._threads = threads
        self._engines = engines
        self._renderers = dict(renderers)
        self._settings = settings
        self._memories = AttemptMemories(log, threads, self._renderers, most=settings.max_attempts_in_memory)
        self.routing = Routing(
            tuple(renderers), default=settings.default_policy, agents=settings.agents, rules=settings.roles
        )
        prefix = f"lr-{secrets.token_hex(5)}"  # ids of answers and their items: letters, digits, "-" and "_" alone
        self._ids = (f"{prefix}{number:x}" for number in count())
        """Unique in the run, also after a restart of the server."""
        self._left_out: set[str] = set()
        """Types of tools that were warned of."""
        self._nameless: set[str] = set()
        """Policies whose templates were looked at for names."""

    def renderer(self, policy: str) -> PolicyRenderer:
        return self._renderers[policy]

    def forget(self, rollout_id: str, attempt: int) -> None:
        """Free an ended attempt's memory."""
        self._memories.forget(rollout_id, attempt)

    async def run(
        self, info: AttemptInfo, request: CallRequest, context: CallContext, delivery: Delivery | None = None
    ) -> AnswerParts:
        """Text as it comes where `request.stream`, then the recorded answer. Raises Refusal before the first item.
        Where a stream is left early, what its `delivery` says was sent by then is recorded."""
        memory = await self._memories.find(info)
        request = await memory.resolve(request)
        context, policy, renderer = self._route(request, context)
        key, given = await memory.retries.begin(context)
        try:
            if given is not None:
                yield given if isinstance(given, Answer) else answer_again(renderer, request, given)
                return
            trainable, patterns = self._settings.trainable, self._settings.system_patterns.get(policy)
            call = PolicyCall(
                info=info,
                request=request,
                context=context,
                policy=policy,
                renderer=renderer,
                memory=memory,
                key=key,
                is_trainable=trainable is None or policy in trainable,
                fits=fitting_patterns(patterns, request.messages) if patterns else (),
            )
            async with aclosing(self._sample(call, delivery or Delivery())) as items:
                async for item in items:
                    if isinstance(item, Answer):
                        given = item
                    yield item
        except GeneratorExit:  # the client left before it was sent the answer
            if given is not None and not request.stream:
                memory.retries.keep(key, given)
            raise
        except (ContextOverflow, EngineUnavailable, BackendError) as error:
            await memory.keep_shown(request)
            raise refusal_of(error, request) from error
        except StoreError as error:
            raise refusal_of(error) from error
        finally:
            memory.retries.end(key, given, context.connection)

    async def count_tokens(self, info: AttemptInfo, request: CallRequest, context: CallContext) -> int:
        """Length of the call's prompt. Nothing is sampled or recorded."""
        memory = await self._memories.find(info)
        request = await memory.resolve(request)
        context, policy, renderer = self._route(request, context)
        try:
            length = self._engines.context_length(policy)
            prompt = await PromptBuilder(self._threads, memory.history, request, policy, renderer, length).build()
        except ContextOverflow as error:
            raise refusal_of(error) from error
        return len(prompt.ids)

    def _route(self, request: CallRequest, context: CallContext) -> tuple[CallContext, str, PolicyRenderer]:
        """The call's role, and the policy that answers it. Raises Refusal."""
        role, policy = self.routing.find(context.agent, request.model, request.messages)
        renderer = self._renderers[policy]
        if request.tools and not renderer.supports_tools:
            raise Refusal(renderer.without_tools, param="tools")
        kwargs = request.extras.template_kwargs
        for name in renderer.unlike(kwargs) if kwargs else ():
            raise Refusal.at(
                "chat_template_kwargs",
                f"asks for {name}={kwargs[name]!r}, and the prompts of policy {policy!r} are made "
                f"otherwise; set {name} under policy.chat_template_kwargs in the recipe, or leave it out",
            )
        return context if role == context.agent else replace(context, agent=role), policy, renderer

    async def _sample(self, call: PolicyCall, delivery: Delivery) -> AnswerParts:
        request, policy, renderer = call.request, call.policy, call.renderer
        engine = await self._engines.info(policy)
        length = engine.context_length
        prompt = await PromptBuilder(self._threads, call.memory.history, request, policy, renderer, length).build()
        replay = call.memory.replay
        recorded = () if replay is None else replay.take(policy, prompt.array, request, renderer)
        if recorded:
            yield await self._repeat(call, prompt, recorded)
            return
        transition_id = next(self._ids)
        base = self._base_sampling(call)
        sampling = choose_sampling(call.info, request, base, engine, renderer, len(prompt.ids))
        sampling = replace(sampling, grammar=bind_answer(self._engines, request, engine, renderer, prompt.ids))
        note_unheeded(self._engines, policy, request, base)
        self._warn_left_out(request)
        self._warn_of_names(request, renderer)
        session = f"{call.info.rollout_id}/{call.info.attempt}"
        sampler = ChoiceSampler(self._engines, policy, renderer, request, prompt.ids, sampling, transition_id, session)
        choices: list[SampledChoice] = []
        has_begun = False
        if request.stream:
            created = int(call.started)
            start = AnswerStart(
                id=transition_id, policy=policy, created=created, prompt_tokens=len(prompt.ids), sampling=sampling
            )
            has_started = not sampling.grammar  # which an engine may refuse before it samples
            if has_started:
                yield start
            try:
                async with aclosing(sampler.stream()) as items:
                    async for item in items:
                        if not has_started:
                            has_started = True
                            yield start
                        if isinstance(item, SampledChoice):
                            choices.append(item)
                        else:
                            has_begun = True
                            yield item
            except (GeneratorExit, asyncio.CancelledError):
                await self._keep_broken_off(call, prompt, sampler.broken_off(delivery.shown))
                raise
            choices.sort(key=lambda choice: choice.completion.index)
        else:
            choices = await sampler.whole()
        answer, is_replay = await self._commit(call, prompt, choices, was_shown=has_begun)
        if is_replay and has_begun:
            sentence = f"the call id {call.context.call_id!r} was answered before; send each call with its own"
            raise Refusal(sentence, status=409, code="replayed")
        if request.stream and not is_replay:
            for choice in choices:
                yield choice.last_delta
        yield answer

    async def _repeat(self, call: PolicyCall, prompt: Prompt, recorded: tuple[CallRecord, ...]) -> Answer:
        """Answer a call of a branch as it was answered in the recorded rollout."""
        transition_id = next(self._ids)
        choices = repeat_choices(call.renderer, call.request, recorded, transition_id)
        try:
            answer, _ = await self._commit(call, prompt, choices, was_shown=False)
        except StoreError:
            assert call.memory.replay is not None
            call.memory.replay.put_back(recorded)
            raise
        return answer

    def _base_sampling(self, call: PolicyCall) -> SamplingSettings:
        """The rollout's settings, or the policy's; what the client asks for where the call belongs to no rollout."""
        base = call.info.sampling or self._settings.sampling.get(call.policy) or SamplingSettings()
        is_plain = call.info.rollout_id == self._settings.plain_rollout
        return sample_as_asked(call.request, base) if is_plain else base

    def _warn_left_out(self, request: CallRequest) -> None:
        for kind in request.left_out:
            if kind not in self._left_out:
                self._left_out.add(kind)
                logger.warning(
                    "agents offer the provider's tool %r; the policy is not told of it, as the recipe says", kind
                )

    def _warn_of_names(self, request: CallRequest, renderer: PolicyRenderer) -> None:
        if renderer.name in self._nameless or all(
            "name" not in message or message["role"] == "tool" for message in request.messages
        ):
            return
        self._nameless.add(renderer.name)
        if not renderer.reads_names:
            logger.warning(
                "agents say by `name` who speaks, and the chat template of policy %r does not show it; write the names "
                "into the texts where they matter",
                renderer.name,
            )

    async def _commit(
        self, call: PolicyCall, prompt: Prompt, choices: Sequence[SampledChoice], *, was_shown: bool
    ) -> tuple[Answer, bool]:
        """Record the call: its answer, and True if it is an earlier call's. `was_shown`: the agent saw its text."""
        # From here on the call exists whether or not the client still listens: memory and store must agree.
        keeping = asyncio.ensure_future(self._keep(call, prompt, choices, call.key))
        try:
            stored = await asyncio.shield(keeping)
        except asyncio.CancelledError:  # the client left meanwhile: a retry of the call is given what nobody saw
            answer = _answer(call, prompt, choices, await keeping)
            call.memory.retries.keep(call.key, answer, was_shown=was_shown)
            raise
        return _answer(call, prompt, choices, stored), bool(stored)

    async def _keep(
        self, call: PolicyCall, prompt: Prompt, choices: Sequence[SampledChoice], key: str
    ) -> tuple[CallRecord, ...]:
        """Record the choices, then remember them; returns those in the store where this is a replay."""
        duration = time.perf_counter() - call.clock
        completion_tokens = sum(len(choice.completion.token_ids) for choice in choices)
        stored = await call.memory.keep(call, prompt, choices, key, duration)
        if not stored and self._watch is not None:
            self._watch.answered(call.policy, duration, len(prompt.ids), completion_tokens)
        return stored

    async def _keep_broken_off(self, call: PolicyCall, prompt: Prompt, choices: Sequence[SampledChoice]) -> None:
        """Record what an agent was shown before it left the stream, as a call of its own: a retry is a first try."""
        if not choices:
            return
        try:
            await self._keep(call, prompt, choices, f"broken:{choices[0].id}")
        except StoreError as error:  # the attempt has ended with the stream: its outcome is decided
            place = call.info.rollout_id, call.info.attempt
            logger.info("rollout %s, attempt %s: a broken-off stream is not recorded: %s", *place, error)


def _answer(call: PolicyCall, prompt: Prompt, choices: Sequence[SampledChoice], stored: Sequence[CallRecord]) -> Answer:
    """The answer as it was sampled, or (`stored`) as it was given before."""
    if stored:
        return answer_again(call.renderer, call.request, stored)
    return Answer(
        id=choices[0].id,
        model=call.request.model,
        policy=call.policy,
        policy_version=choices[0].version,
        prompt_tokens=len(prompt.ids),
        cached_tokens=prompt.suffix_start,
        choices=tuple(choice.completion for choice in choices),
        created=int(call.started),
        sampling=choices[0].sampling,
    )


def fitting_patterns(patterns: Sequence[str], messages: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The patterns that the first system message fits."""
    system = _system_prompt(messages) if patterns else ""
    return tuple(pattern for pattern in patterns if fnmatchcase(system, pattern))


def _fits_model(rule: RoleConfig, model: str) -> bool:
    return rule.model is None or fnmatchcase(model, rule.model)


def _fits(rule: RoleConfig, model: str, messages: Sequence[Mapping[str, Any]]) -> bool:
    return _fits_model(rule, model) and (rule.system is None or fnmatchcase(_system_prompt(messages), rule.system))


def _system_prompt(messages: Sequence[Mapping[str, Any]]) -> str:
    if not messages or messages[0].get("role") not in ("system", "developer"):
        return ""
    return str(messages[0].get("content") or "")
