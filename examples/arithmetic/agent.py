"""An agent that answers sums with a calculator, of Python's own library: `python agent.py QUESTION`."""

import json
import os
import sys
import urllib.request

TOOL = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "Exact integer arithmetic.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer"},
                "op": {"type": "string", "enum": ["+", "-", "*"]},
                "b": {"type": "integer"},
            },
            "required": ["a", "op", "b"],
        },
    },
}


def chat(messages):
    """The policy's message after these."""
    body = {"model": "policy", "messages": messages, "tools": [TOOL], "max_tokens": 24}
    headers = {"content-type": "application/json", "authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as reply:
        return json.load(reply)["choices"][0]["message"]


def calc(arguments):
    """Run the tool; whatever is wrong with the call is what the policy is told."""
    try:
        call = json.loads(arguments)
        a, b = int(call["a"]), int(call["b"])
        return str({"+": a + b, "-": a - b, "*": a * b}[call["op"]])
    except (ValueError, KeyError, TypeError) as error:
        return f"error: {error}"


messages = [{"role": "user", "content": sys.argv[1]}]
for _ in range(3):
    said = chat(messages)
    if not said.get("tool_calls"):
        break
    messages.append(said)
    for call in said["tool_calls"]:
        result = calc(call["function"]["arguments"])
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
print(said.get("content") or "")
