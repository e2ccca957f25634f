"""An agent in JavaScript: one Node.js process for each rollout. AGENT is its file."""

import os

from lightningrl import command_agent

answer = command_agent("node", os.environ["AGENT"])
