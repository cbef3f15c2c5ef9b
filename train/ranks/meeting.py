"""Where the ranks of a training meet: torch's store, of which each reads only what another rank
signed.

Whoever reaches the store can write into it, and messages between ranks are unpickled. So each
message carries an HMAC-SHA256, whose key is made of the secret that the training's ranks share
and of a nonce of every rank.
"""

from __future__ import annotations

import functools
import hmac
import os
import pickle
import secrets
import socket
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from rollbook.store.errors import RankError

SECRET = "ROLLBOOK_RANKS_SECRET"
"""The environment variable by which a rank is given the secret of its training."""
NONCE_BYTES, SIGNATURE_BYTES = 32, 32
FOREVER = timedelta(days=3650)
AGREED, OBJECT = "agreed", "object"
_SAME = (
    "ranks that a launcher starts have one secret, that of the store where all of them see it, or the text "
    f"that {SECRET} has, the same on every host"
)


def new_secret() -> str:
    """A secret for one training whose ranks one process starts."""
    return secrets.token_hex(32)


def take_secret() -> str:
    """The secret that this process was given; it is removed, so that its own child processes do not
    get it."""
    return os.environ.pop(SECRET)


@dataclass(frozen=True, slots=True)
class MeetingPoint:
    """Where ranks meet, and by which secret."""

    host: str
    port: int
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Signer:
    """Signs the messages between the ranks of a training.

    Args:
        where: they meet, for error messages.
    """

    key: bytes = field(repr=False)
    where: str

    def signed(self, name: str, words: bytes) -> bytes:
        """A message with its signature, which is valid under this name alone."""
        return self.signature(name, words) + words

    def opened(self, name: str, signed: bytes) -> bytes:
        """The message in what was signed under a name.

        Raises:
            RankError: no rank of this training signed it.
        """
        signature, words = signed[:SIGNATURE_BYTES], signed[SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, self.signature(name, words)):
            raise RankError(
                f"{name!r}, as ranks were told it at {self.where}, is not signed by a rank of this training, "
                f"and was not read: {_SAME}; or a stranger reaches that port (docs/security.md says what to "
                "close)"
            )
        return words

    def signature(self, name: str, words: bytes) -> bytes:
        """The HMAC-SHA256 of a name and a message."""
        return hmac.digest(self.key, len(name).to_bytes(8, "big") + name.encode() + words, "sha256")

    def among(self, nonces: bytes) -> Signer:
        """The signer for the ranks that have these nonces, and for no others with the same secret."""
        return Signer(self.signature("ranks", nonces), self.where)


class Meeting:
    """The store at which ranks meet, with signed messages.

    Args:
        store: torch's, which rank 0 serves, or a launcher.
    """

    def __init__(self, store: Any, point: MeetingPoint) -> None:
        self.store, self.point = store, point
        self.signer = Signer(point.secret.encode(), f"{point.host} port {point.port}")

    def say(self, key: str, words: bytes) -> None:
        """Put a message under a key."""
        self.store.set(key, self.signer.signed(key, words))

    def heard(self, key: str) -> bytes:
        """The message under a key, which is there.

        Raises:
            RankError: no rank of this training signed it.
        """
        return self.signer.opened(key, self.store.get(key))

    def come(self, rank: int) -> None:
        """Announce this rank, and wait until rank 0 has heard of all.

        Raises:
            RankError: whoever answered has another secret, or did not answer this rank.
        """
        nonce = secrets.token_bytes(NONCE_BYTES)
        self.say(presence_key(rank), nonce)
        self.store.wait([AGREED], FOREVER)
        nonces = self.heard(AGREED)
        if nonces[rank * NONCE_BYTES :][:NONCE_BYTES] != nonce:
            raise RankError(f"rank {rank} was not answered, but another one: two processes have its number")
        self.signer = self.signer.among(nonces)

    def agree(self, count: int) -> None:
        """As rank 0, once all ranks are there, have them sign as those of this meeting.

        Raises:
            RankError: one of them has another secret.
        """
        nonces = secrets.token_bytes(NONCE_BYTES) + b"".join(
            self.heard(presence_key(rank)) for rank in range(1, count)
        )
        self.say(AGREED, nonces)
        self.signer = self.signer.among(nonces)

    def within(self, name: str) -> Meeting:
        """The part of the meeting with this name."""
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        return Meeting(PrefixStore(name, self.store), self.point)

    @property
    def of_group(self) -> Any:
        """The store for a process group: under a name that only the ranks know."""
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        return PrefixStore(self.signer.signature("group", b"").hex(), self.store)


def presence_key(rank: int) -> str:
    """The key under which a rank announces itself."""
    return f"here/{rank}"


def meet(point: MeetingPoint, *, leads: bool) -> Meeting:
    """The meeting at a point; rank 0 serves its store, at that address alone.

    Args:
        point: its port may be 0 where rank 0 serves: then one is chosen that nobody knew before.

    Raises:
        RankError: the address is not one of this host, or the port is taken.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    try:
        listener = listening_at(point.host, point.port) if leads else None
    except OSError as error:
        where = f"{point.host} port {point.port}"
        raise RankError(f"ranks cannot meet at {where}, which this host is to serve: {error}") from error
    port = point.port if listener is None else listener.getsockname()[1]
    store = TCPStore(
        point.host,
        port,
        is_master=leads,
        wait_for_workers=False,
        timeout=timedelta(minutes=5),
        master_listen_fd=None if listener is None else listener.detach(),  # the store closes it
    )
    return Meeting(store, MeetingPoint(point.host, port, point.secret))


def listening_at(host: str, port: int = 0) -> socket.socket:
    """A socket that listens at one address of this host only.

    Raises:
        OSError: it is not one of this host, or the port is taken.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server((str(address[0]), port), family=family, backlog=4096)


# Objects ------------------------------------------------------------------------------------------


def sign_objects(signer: Signer) -> None:
    """Have torch's collectives sign the objects that ranks send each other, which they pickle, and
    refuse to unpickle what no rank signed.

    Megatron sends some, too, so this is patched in where torch serializes all of them.
    """
    from torch.distributed import distributed_c10d as c10d

    c10d._object_to_tensor = functools.partial(_packed, signer)
    c10d._tensor_to_object = functools.partial(_unpacked, signer)


def _packed(signer: Signer, what: object, device: Any, group: Any) -> tuple[Any, Any]:
    import torch

    signed = bytearray(signer.signed(OBJECT, pickle.dumps(what)))
    packed = torch.frombuffer(signed, dtype=torch.uint8).clone().to(device)  # which torch resizes
    return packed, torch.tensor([len(signed)], dtype=torch.int64, device=device)


def _unpacked(signer: Signer, packed: Any, size: Any, group: Any) -> Any:
    return pickle.loads(signer.opened(OBJECT, packed.cpu().numpy().tobytes()[: int(size)]))
