"""An agent of Python's own library (`python3 -S`) that does what its task says, mostly what none should.

What it is answered is in `seen.json` of its folder. What it leaves behind sleeps for `word` seconds.
"""

import glob
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

with open(os.environ["ROLLBOOK_TASK_FILE"]) as file:
    TASK = json.load(file)
KEY, BASE = os.environ["OPENAI_API_KEY"], os.environ["OPENAI_BASE_URL"]
FINISH = os.environ["ROLLBOOK_FINISH_URL"]
OWN = os.environ["ROLLBOOK_TRAJECTORY_ID"]


def post(url, body):
    """The status of an answer, and what it says."""
    headers = {"content-type": "application/json", "authorization": "Bearer " + KEY}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def ask(text, base=BASE):
    """The status of a question, and what it is answered."""
    return post(base + "/chat/completions", {"model": "m", "messages": [{"role": "user", "content": text}]})


def saw(what):
    """Note what it saw."""
    with open("seen.json", "w") as file:
        json.dump(what, file)


def honest():
    """Ask three times, and leave the answer."""
    for number in range(3):
        status, reply = ask(f"question {number}")
        assert status == 200, reply
        time.sleep(0.3)
    with open("answer.txt", "w") as file:
        file.write(reply["choices"][0]["message"]["content"])


def crash():
    """End by a signal, with a child."""
    subprocess.Popen(["sleep", TASK["word"]])
    os.abort()


def hang():
    """Do nothing more."""
    time.sleep(600)


def deaf():
    """Do nothing more, and hear nothing."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen(["sleep", TASK["word"]], start_new_session=True)
    time.sleep(600)


def daemons():
    """Leave daemons that have nothing of its environment, some of which do not heed SIGTERM."""
    for number in range(3):
        if os.fork() == 0:
            os.setsid()
            if number == 0:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if os.fork() == 0:
                os.execve("/usr/bin/env", ["env", "-i", "sleep", TASK["word"]], {})
            os._exit(0)
        os.wait()


def gigabyte():
    """Print it."""
    for _ in range(1024):
        os.write(1, b"x" * (1 << 20))


def disk():
    """Write a file larger than it may, until that fails."""
    with open("large", "wb", buffering=0) as file:
        for _ in range(64):
            file.write(b"x" * (1 << 20))


def late():
    """Ask and reward itself after its end."""
    first = post(FINISH, {"reward": 0.25})[0]
    again = [ask("more")[0], post(FINISH, {"reward": 9.0})[0]]
    saw([first, *again, post(FINISH.replace("/finish", "/rewards"), {"reward": 9.0, "source": "agent"})[0]])


def thief():
    """Use another's trajectory."""
    there = FINISH.replace(OWN, TASK["victim"])
    answers = [ask("mine", BASE.replace(OWN, TASK["victim"]))[0], post(there, {"reward": 9.0})[0]]
    answers.append(post(there.replace("/finish", "/rewards"), {"reward": 9.0, "source": "correct"})[0])
    saw(answers)


def spy():
    """Note all variables that there are, its own and others'."""
    variables = [f"{name}={value}" for name, value in os.environ.items()]
    for path in glob.glob("/proc/[0-9]*/environ"):
        try:
            with open(path, "rb") as file:
                variables += file.read().decode(errors="replace").split("\0")
        except OSError:
            continue
    saw(sorted(set(variables)))


def prowl():
    """Note the files of others that it can see, and write beside its own."""
    beside = os.path.dirname(os.getcwd())
    paths = [path for path in glob.glob(beside + "/*/*") if not path.startswith(os.getcwd())]
    try:
        with open(os.path.join(beside, "was-here"), "w"):
            pass  # in a file system of its own, if at all
    except OSError:
        pass
    saw(paths)


def main():
    """Do it; all but one ask first."""
    what = TASK["do"]
    if what == "mute":
        daemons()
        return
    if what != "honest":
        status, reply = ask("hello")
        if status != 200:
            sys.exit(f"{status}: {reply}")
    globals()[what]()


main()
