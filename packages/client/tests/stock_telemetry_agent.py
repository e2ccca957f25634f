"""An agent that is a program of its own."""

from __future__ import annotations

import sys

from lightningrl import command_agent

answer = command_agent(sys.executable, "stock_telemetry_program.py")
