"""An agent that answers arithmetic questions with a calculator. It knows the `openai` SDK, and nothing
of Rollbook: recording its runs took a `base_url`, and its rewards one POST at the end of each.

Reads batches of jobs from standard input, one JSON list a line, and answers each with one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from typing import Any

from openai import AsyncOpenAI

MAX_TURNS, MAX_TOKENS = 3, 24
TOOLS: list[Any] = [
    {
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
]


def calculator(arguments: str) -> str:
    """Run the tool; an invalid call gives its error as the result that the model sees."""
    try:
        call = json.loads(arguments)
        a, b = int(call["a"]), int(call["b"])
        return str({"+": a + b, "-": a - b, "*": a * b}[call["op"]])
    except (ValueError, KeyError, TypeError) as error:
        return f"error: {error}"


async def solve(client: AsyncOpenAI, url: str, job: dict[str, Any]) -> float:
    """Work on one job in a trajectory of its own; its reward, 1 for the right number and else 0."""
    headers = {"X-Rollbook-Group": job["group"], "X-Rollbook-Task": job["task"]}
    headers["X-Rollbook-Split"] = job["split"]
    mine = client.with_options(base_url=f"{url}/t/{job['id']}/v1", default_headers=headers)
    messages: list[Any] = [{"role": "user", "content": job["question"]}]
    answer: str | None = None
    for turn in range(MAX_TURNS):
        reply = await mine.chat.completions.create(
            model="demo",
            messages=messages,
            tools=TOOLS,
            temperature=1.0,
            max_tokens=MAX_TOKENS,
            seed=job["seed"] * MAX_TURNS + turn,
        )
        choice = reply.choices[0]
        messages.append(choice.message.model_dump(exclude_none=True))
        if not choice.message.tool_calls:
            answer = choice.message.content if choice.finish_reason == "stop" else None
            break
        for call in choice.message.tool_calls:
            assert call.type == "function"
            result = calculator(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    reward = float(answer is not None and answer.strip() == job["answer"])
    finish = f"{url}/v1/trajectories/{job['id']}/finish"
    await client.post(finish, body={"reward": reward, "success": reward == 1}, cast_to=object)
    return reward


async def main() -> None:
    """Serve batches until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True, help="where the model is served")
    parser.add_argument("--concurrency", type=int, default=128)
    options = parser.parse_args()
    client = AsyncOpenAI(base_url=f"{options.url}/v1", api_key="none", timeout=120)
    slots = asyncio.Semaphore(options.concurrency)

    async def one(job: dict[str, Any]) -> float:
        async with slots:
            return await solve(client, options.url, job)

    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        rewards = await asyncio.gather(*(one(job) for job in json.loads(line)))
        print(json.dumps(rewards), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
