"""The calculator's agent with one example in its prompt: an untrained SmolLM2-135M hardly writes an action then."""

import agent

agent.SHOWN = agent.SHOWN[:4]  # the turns of the first example

answer = agent.answer
