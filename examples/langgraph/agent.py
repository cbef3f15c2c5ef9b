"""A ReAct agent of LangGraph that keeps a shop: `python agent.py QUESTION` prints the answer."""

import sys

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

PRICES = {"lamp": 40, "chair": 75, "table": 210}
STOCK = {"lamp": 12, "chair": 0, "table": 3}


@tool
def price(item: str) -> str:
    """The price of an item."""
    return str(PRICES.get(item, "There is no such item."))


@tool
def stock(item: str) -> str:
    """How many of an item there are."""
    return str(STOCK.get(item, "There is no such item."))


agent = create_agent(ChatOpenAI(model="gpt-5-mini"), [price, stock], system_prompt="You keep a shop.")
state = agent.invoke({"messages": [("user", sys.argv[1])]})
print(state["messages"][-1].text)
