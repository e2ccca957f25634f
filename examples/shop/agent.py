"""A ReAct agent of LangChain over a small shop's database, with two tools: the price of an item, and a calculator."""

import ast
import operator
import sqlite3
from pathlib import Path

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

DATABASE = Path(__file__).parent / "shop.sqlite"
OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


@tool
def price(item: str) -> str:
    """The price of an item in the shop, in dollars."""
    with sqlite3.connect(DATABASE) as connection:
        row = connection.execute("select price from items where name = ?", (item,)).fetchone()
    return str(row[0]) if row else "no such item"


@tool
def calculate(expression: str) -> str:
    """The value of an expression of whole numbers with + - *."""

    def value(node: ast.AST) -> int:
        if isinstance(node, ast.Constant):
            return node.value
        return OPERATIONS[type(node.op)](value(node.left), value(node.right))

    try:
        return str(value(ast.parse(expression, mode="eval").body))
    except Exception as error:  # noqa: BLE001  the model reads what was wrong
        return f"error: {error}"


SYSTEM = "You are a shop assistant. Use the tools to find prices and to calculate. Then answer with the number only."

model = ChatOpenAI(model="gpt-4o-mini", api_key="any")
agent = create_agent(model, [price, calculate], system_prompt=SYSTEM)


def answer(question: str) -> str:
    """Return the agent's last word. After twelve steps LangGraph raises GraphRecursionError: it runs in circles."""
    state = agent.invoke({"messages": [("user", question)]}, {"recursion_limit": 12})
    return state["messages"][-1].text
