"""The lines that `rollbook serve` prints once it listens."""

from __future__ import annotations

import logging

from rollbook.cli.terminal import Console, LogFormatter
from rollbook.ingest.serve.serve import Started


def announce(started: Started) -> None:
    """Print the address for agents, and the detected settings, on standard error."""
    if logging.lastResort is not None:  # a line is one line, without the secrets that a message may repeat
        logging.lastResort.setFormatter(LogFormatter())
    console = Console(stderr=True)
    console.tell("recording run ", (started.run, "bold"), f" into {started.store} (lane {started.lane})")
    console.tell("point an agent here: base_url = ", (f"{started.url}/t/ANY-ID/v1", "bold"))
    for lane, count in started.adopted.items():
        console.print(f"adopted {count} open trajectories of lane {lane}, whose process is gone")
    if started.truncated_bytes:
        console.print(f"recovered: cut off {started.truncated_bytes} bytes of a write that never finished")
    if started.exposed:
        text = "listening beyond this host, and everybody may come in: set --keys or --api-key"
        console.tell((text, "yellow"))
    if started.upstream is not None:
        console.tell("passing on to ", (started.upstream, "bold"), ", token ids kept where it returns them")
    if started.reply_format is not None:
        console.print(f"replies are read as {started.reply_format}")
    if started.refused:
        console.tell((f"turns are never extended, each is a root: {started.refused}", "yellow"))
    for note in started.notes:
        console.tell((note, "yellow"))
