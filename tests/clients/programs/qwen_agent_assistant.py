"""qwen-agent's Assistant, which always streams. Word: native (tools as tools; its default is a prompt)."""

import json
import os
import sys
from typing import Any

from conversation import DESCRIPTION, MODEL, PARAMETERS, QUESTION, SYSTEM, called, report
from conversation import add as plus
from qwen_agent.agents import Assistant
from qwen_agent.tools.base import BaseTool, register_tool


@register_tool("add")
class Add(BaseTool):
    """The tool."""

    description = DESCRIPTION
    parameters = PARAMETERS

    def call(self, params: Any, **_: Any) -> str:
        """Add two numbers."""
        return plus(**json.loads(params))


def main(words: list[str]) -> None:
    """Run the agent."""
    llm = {"model": MODEL, "model_server": os.environ["OPENAI_BASE_URL"], "api_key": "none"}
    llm |= {"model_type": "oai", "generate_cfg": {"use_raw_api": "native" in words}}
    agent = Assistant(llm=llm, system_message=SYSTEM, function_list=["add"])
    messages: list[Any] = []
    for messages in agent.run([{"role": "user", "content": QUESTION}]):  # noqa: B007
        pass
    turns: list[dict[str, Any]] = []
    fresh = True
    for message in messages:
        if message["role"] == "function":
            fresh = True
            continue
        if fresh:
            turns.append({"content": "", "reasoning": "", "calls": []})
            fresh = False
        turns[-1]["content"] += message.get("content") or ""
        turns[-1]["reasoning"] += message.get("reasoning_content") or ""
        if message.get("function_call"):
            call = message["function_call"]
            turns[-1]["calls"].append(called(call["name"], call["arguments"]))
    report(messages[-1]["content"], turns)


main(sys.argv[1:])
