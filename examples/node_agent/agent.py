"""How a rollout runs: one Node.js process each."""

from lightningrl import command_agent

answer = command_agent("node", "agent.mjs")
