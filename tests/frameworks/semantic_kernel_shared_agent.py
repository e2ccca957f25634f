# /// script
# dependencies = ["semantic-kernel==1.45.0"]
# ///
"""Semantic Kernel: all rollouts send their messages over one runtime, which the first of them started and nobody ends."""

import asyncio
import os

os.environ["SEMANTICKERNEL_EXPERIMENTAL_GENAI_ENABLE_OTEL_DIAGNOSTICS_SENSITIVE"] = "true"

from semantic_kernel.agents import ChatCompletionAgent, SequentialOrchestration
from semantic_kernel.agents.runtime import InProcessRuntime
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion

runtime = InProcessRuntime()
together = asyncio.Barrier(4)


async def answer(question: str) -> dict:
    if runtime._run_context is None:
        runtime.start()
    service = OpenAIChatCompletion(ai_model_id="gpt-4o-mini")
    planner = ChatCompletionAgent(
        service=service, name="Planner", description="Plans", instructions="You plan evenings."
    )
    reviewer = ChatCompletionAgent(
        service=service, name="Reviewer", description="Reviews", instructions="You review plans."
    )
    await together.wait()
    result = await SequentialOrchestration(members=[planner, reviewer]).invoke(task=question, runtime=runtime)
    text = str((await result.get(timeout=100)).content)
    await together.wait()
    return {"text": text}
