"""The table of checks. A new one is a function of an `Observation`, and a row here."""

from __future__ import annotations

from lightningrl_training.doctor import of_agent, of_recipe, of_signal
from lightningrl_training.doctor.findings import Check

__all__ = ["CHECKS"]

CHECKS: tuple[Check, ...] = (
    Check(name="calls", asks="does the agent call the policy", look=of_agent.calls_made),
    Check(name="errors", asks="does the agent end without raising", look=of_agent.errors),
    Check(name="time", asks="do rollouts have time enough", look=of_agent.time_limit),
    Check(name="captured", asks="is each sampled call recorded once", look=of_agent.calls_captured),
    Check(name="retries", asks="is a retry one call", look=of_agent.retries_counted_once),
    Check(name="roles", asks="are the recipe's roles those of the calls", look=of_agent.roles_named),
    Check(name="histories", asks="do calls keep the tokens of earlier ones", look=of_agent.histories_kept),
    Check(name="context", asks="do prompts leave room for answers", look=of_agent.context_used),
    Check(name="cut off", asks="do answers end by themselves", look=of_agent.calls_cut_off),
    Check(name="tools", asks="do tools work", look=of_agent.tools_work),
    Check(name="repeats", asks="does the agent do the same again", look=of_agent.repeats_itself),
    Check(name="sampling", asks="is each member of a group sampled for itself", look=of_signal.sampling_free),
    Check(name="rewards", asks="does every rollout get a proper reward", look=of_signal.rewards_given),
    Check(name="variety", asks="do rewards differ within groups", look=of_signal.reward_varies),
    Check(name="learning", asks="does reward reach the sampled tokens", look=of_signal.reward_reaches_tokens),
    Check(name="settings", asks="is every setting read", look=of_recipe.settings_read),
    Check(name="tasks", asks="are tasks different, and held-out ones held out", look=of_recipe.tasks_differ),
    Check(name="memory", asks="does it fit into memory", look=of_recipe.memory_enough),
    Check(name="disk", asks="does the run fit on the disk", look=of_recipe.disk_enough),
)
