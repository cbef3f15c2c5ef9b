"""An agent with only the standard library: `python3 -S rollout_program.py`. It notes the time of
its first request.

In its task, `prompt` is what it says, `turns` how often, and `do` what it does besides: what a
program should not. Everything it leaves behind sleeps for `word` seconds, by which it is found.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from urllib.parse import urlsplit


def converse(prompt: str, turns: int) -> None:
    """Send the prompt repeatedly, each time with the whole conversation so far."""
    url = urlsplit(os.environ["OPENAI_BASE_URL"])
    with open("asked", "w") as file:
        file.write(str(time.monotonic()))
    connection = http.client.HTTPConnection(url.netloc)
    headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    messages: list[dict[str, str]] = []
    for _ in range(turns):
        messages.append({"role": "user", "content": prompt})
        body = json.dumps({"model": "policy", "messages": messages})
        connection.request("POST", url.path + "/chat/completions", body, headers)
        answer = connection.getresponse()
        reply = json.loads(answer.read())
        if answer.status != 200:
            sys.exit(f"{answer.status}: {reply}")
        messages.append(reply["choices"][0]["message"])


def leave(word: str) -> None:
    """Leave processes behind: a child, one in its own session, and a daemon with nothing of this
    environment."""
    sleep = ["sleep", word]
    subprocess.Popen(sleep)
    subprocess.Popen(sleep, start_new_session=True)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execve("/usr/bin/env", ["env", "-i", "sleep", word], {})
        os._exit(0)
    os.wait()


def main() -> None:
    """Do what the task says."""
    with open(os.environ["ROLLBOOK_TASK_FILE"]) as file:
        task = json.load(file)
    what = task.get("do")
    if what == "mute":
        leave(task["word"])
        return
    converse(task["prompt"], task["turns"])
    if what is None:
        return
    leave(task["word"])
    if what == "print":
        for _ in range(64):
            sys.stdout.write("x" * 65536)
    elif what == "crash":
        os.abort()
    elif what == "fail":
        sys.exit(3)
    elif what == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)


if __name__ == "__main__":
    main()
