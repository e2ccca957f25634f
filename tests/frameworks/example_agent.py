"""An example of a framework's authors, as it came: one process for each rollout. AGENT is how its users start it."""

import os

from lightningrl import command_agent

answer = command_agent("sh", "-c", os.environ["AGENT"])
