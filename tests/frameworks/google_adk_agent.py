# /// script
# dependencies = ["google-adk==2.13.0", "litellm==1.106.2", "mcp==2.3.0"]
# ///
"""Google ADK through LiteLLM: an agent with a tool and a sub-agent that it hands over to. ADK makes spans itself."""

from google.adk.agents import Agent
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types


def get_weather(city: str) -> dict:
    """The weather of a city.

    Args:
        city: its name
    """
    return {"status": "success", "report": f"It is sunny in {city}."}


def book_table(city: str) -> dict:
    """Books a table outside.

    Args:
        city: its name
    """
    raise ValueError(f"no table in {city}")


host = Agent(
    name="host",
    model=LiteLlm(model="openai/gpt-4o-mini"),
    description="Books tables.",
    instruction="You book tables.",
    tools=[book_table],
)
root_agent = Agent(
    name="planner",
    model=LiteLlm(model="openai/gpt-4o-mini"),
    instruction="You plan evenings. Tables are the host's.",
    tools=[get_weather],
    sub_agents=[host],
)


async def answer(question: str) -> dict:
    runner = InMemoryRunner(agent=root_agent, app_name="evenings")
    session = await runner.session_service.create_session(app_name="evenings", user_id="user")
    texts = []
    message = types.Content(role="user", parts=[types.Part(text=question)])
    async for event in runner.run_async(user_id="user", session_id=session.id, new_message=message):
        if event.is_final_response() and event.content:
            texts += [part.text for part in event.content.parts if part.text]
    return {"text": "\n".join(texts)}
