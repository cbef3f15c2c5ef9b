"""An agent of browser-use in a headless Chromium: `python agent.py TASK` prints its answer."""

import asyncio
import sys

from browser_use import Agent, BrowserProfile, ChatOpenAI

PROFILE = BrowserProfile(headless=True, chromium_sandbox=False, enable_default_extensions=False)


async def main(task):
    """Work on it for six steps at most."""
    model = ChatOpenAI(model="gpt-5-mini")
    agent = Agent(
        task, llm=model, browser_profile=PROFILE, flash_mode=True, use_vision=False, use_judge=False
    )
    history = await agent.run(max_steps=6)
    print(history.final_result())


asyncio.run(main(sys.argv[1]))
