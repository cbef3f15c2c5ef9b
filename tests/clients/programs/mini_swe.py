"""mini-swe-agent's default agent with a shell of its own, over litellm."""

from typing import Any

import yaml
from conversation import MODEL, QUESTION, called, report
from minisweagent.agents.default import DefaultAgent
from minisweagent.config import builtin_config_dir
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel


def shown(message: dict[str, Any]) -> dict[str, Any]:
    """What is shown of a reply."""
    calls = message.get("tool_calls") or []
    return {
        "content": message.get("content") or "",
        "reasoning": message.get("reasoning_content") or "",
        "calls": [called(c["function"]["name"], c["function"]["arguments"], c["id"]) for c in calls],
    }


def main() -> None:
    """Run the agent."""
    config = yaml.safe_load((builtin_config_dir / "mini.yaml").read_text())
    config["model"] |= {"model_name": f"openai/{MODEL}", "cost_tracking": "ignore_errors"}
    known = {k: v for k, v in config["agent"].items() if k not in ("mode", "confirm_exit")}
    agent = DefaultAgent(LitellmModel(**config["model"]), LocalEnvironment(**config["environment"]), **known)
    ended = agent.run(QUESTION)
    replies = [m for m in agent.messages if m["role"] == "assistant"]
    report(ended["submission"].strip(), [shown(message) for message in replies])


main()
