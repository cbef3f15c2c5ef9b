"""langchain's create_agent over langchain-openai. Words: stream; responses; prebuilt, langgraph's own."""

import sys
from typing import Any

from conversation import MODEL, QUESTION, SYSTEM, called, report
from conversation import add as plus
from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent


@tool
def add(a: float, b: float) -> str:
    """Add two numbers."""
    return plus(a, b)


def main(words: list[str]) -> None:
    """Run the graph."""
    model = ChatOpenAI(model=MODEL, streaming="stream" in words, use_responses_api="responses" in words)
    if "prebuilt" in words:
        agent = create_react_agent(model, [add], prompt=SYSTEM)
    else:
        agent = create_agent(model, [add], system_prompt=SYSTEM)
    state = agent.invoke({"messages": [{"role": "user", "content": QUESTION}]})
    turns: list[dict[str, Any]] = []
    for message in state["messages"]:
        if message.type != "ai":
            continue
        shown: dict[str, Any] = {"content": message.text}
        shown["calls"] = [called(c["name"], c["args"], c["id"]) for c in message.tool_calls]
        if message.usage_metadata:
            usage = message.usage_metadata
            shown["usage"] = [usage["input_tokens"], usage["output_tokens"]]
        if "finish_reason" in message.response_metadata:
            shown["finish"] = message.response_metadata["finish_reason"]
        turns.append(shown)
    report(state["messages"][-1].text, turns)


main(sys.argv[1:])
