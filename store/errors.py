"""Every error Rollbook raises on purpose, in one tree.

    RollbookError
    ├── StoreError               the log on disk
    │   ├── NotAStoreError       (also FileNotFoundError) the path holds no store
    │   ├── FormatError          written by a newer Rollbook, or not by Rollbook
    │   ├── LaneLockedError      another process writes this lane
    │   ├── CorruptionError      acknowledged bytes do not match their checksum
    │   ├── OutsideError         a store's folder, or what it names, leads out of it; nothing was opened
    │   ├── WriteFailedError     (also OSError) an append did not become durable
    │   │   └── FencedError      a lane was given up to another host; it takes nothing more
    │   ├── ShortageError        (also OSError) descriptors, memory or a disk's room ran out for a while
    │   ├── UnstorableError      (also ValueError) an append holds what has no stored form; refused alone
    │   ├── CutError             (also ValueError) a cut that cannot be read or is not held
    │   ├── CatalogError         the catalog's database; the log itself is well
    │   ├── RemoteError          object storage is not reached, or refuses; the log itself is well
    │   ├── MediumError          what carries the log to other hosts is not reached, or refuses
    │   ├── VersionError         weights that are not the version as which they are to count
    │   └── UpkeepError          (also ValueError) what to keep, retire or erase is not there or not clear
    ├── QueryError               (also ValueError) DuckDB refused a query, or it would leave the store
    ├── InterchangeError         (also ValueError) a file not to be imported, a place not to export to
    ├── RequestError             what a client sent; carries the HTTP status it is answered with
    │   ├── LimitError           it is more than is allowed, or comes too slowly; counted in /metrics
    │   └── EndingError          the process that it came to is ending, and another one is to be asked
    ├── EngineError              an engine failed, or was given what it cannot serve
    │   └── EngineLostError      an engine went away, or may not be believed: another may answer
    │       └── EngineHeldError  none takes requests now, and nothing was asked of any
    ├── ReplyError               (also ValueError) a reply that no model of this chat template samples
    ├── ModelError               a model directory, tokenizer or checkpoint that cannot be used
    ├── ConfigError              (also ValueError) a CONFIG with an unknown or ill-typed key
    ├── WorkerLostError          a worker of Ray was lost again and again: the same command goes on
    ├── RolloutError             rollouts that cannot begin or go on
    │   ├── ProxyLostError       their proxy does not answer: the same command goes on
    │   └── LaunchError          an agent that cannot be started, or not as isolated as is required
    ├── TrainError               a training run that cannot go on
    │   ├── IdleError            no samples came for a step in the time that is waited for them
    │   ├── RankError            a rank of the training failed, or did not come
    │   │   └── RankLostError    one that was at work ended, or hangs: the same command goes on
    │   ├── NotFiniteError       a step's numbers overflowed, or are none; nothing of it was committed
    │   └── AllRejectedError     a step's batch has no token left to train; nothing of it was committed
    └── ReplayError              a step that cannot be replayed at all

A message names the thing, the value, and the remedy. All of them survive pickling.
"""

from __future__ import annotations

import errno

SHORT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN})
"""`errno` of a temporary shortage of descriptors or memory."""


class RollbookError(Exception):
    """Base of all errors that Rollbook raises on purpose."""


class StoreError(RollbookError):
    """Something is wrong with the log on disk."""


class NotAStoreError(StoreError, FileNotFoundError):
    """The path holds no Rollbook store."""


class FormatError(StoreError):
    """The files were written in a format this version does not read."""


class LaneLockedError(StoreError):
    """Another process holds the lane's lock."""


class CorruptionError(StoreError):
    """Acknowledged bytes no longer match their checksum. Damaged events are never skipped silently."""


class OutsideError(StoreError):
    """A store's folder holds a link or a device, or names a file outside of itself. It was not opened."""


class WriteFailedError(StoreError, OSError):
    """An append did not become durable; the lane takes no further appends."""


class ShortageError(StoreError, OSError):
    """The process had no descriptor, memory or disk space left. No file is damaged."""


class UnstorableError(StoreError, ValueError):
    """An append holds a value that has no stored form, or more than a frame can hold. Only this append is
    refused."""


class CutError(StoreError, ValueError):
    """A cut that cannot be parsed, or that names more of a lane than the store holds."""


class CatalogError(StoreError):
    """The catalog's database cannot be reached or used. Nothing in the log depends on it."""


class RemoteError(StoreError):
    """Object storage cannot be reached, or refuses the request. Neither remote nor local files were
    changed."""


class MediumError(StoreError):
    """What carries the log between hosts cannot be reached, or refuses. What is on this disk is well."""


class FencedError(WriteFailedError):
    """Another host has taken over what a process of this one held: its lanes take no further appends."""


class UpkeepError(StoreError, ValueError):
    """What retention or erasure is to keep, retire or erase cannot be read, or is not in the store."""


class QueryError(RollbookError, ValueError):
    """DuckDB refused a query, or the query reads files other than the store's own."""


class VersionError(StoreError):
    """Weights were claimed to be a policy version that the log has bound to other weights."""


class InterchangeError(RollbookError, ValueError):
    """A file cannot be imported, or an export cannot be made; nothing was written."""


class RequestError(RollbookError):
    """A request that cannot be served as sent, with the HTTP status and a machine-readable code."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(status, code, message)
        self.status = status
        self.code = code
        self.message = message

    def __str__(self) -> str:
        return self.message


class EndingError(RequestError):
    """A request that the process it came to does not answer any more, as that ends, or has given the name
    away: 503, to be sent again."""

    def __init__(
        self,
        status: int = 503,
        code: str = "proxy_ends",
        message: str = "this proxy is ending: try again, as another one takes its place",
    ) -> None:
        super().__init__(status, code, message)


class LimitError(RequestError):
    """A request beyond a limit: too large, too deeply nested, too slow, or too many at once."""


class EngineError(RollbookError):
    """An engine failed, or got a request that it cannot serve."""


class EngineLostError(EngineError):
    """An engine cannot be reached any more, or holds weights that were not verified. Another may answer."""


class EngineHeldError(EngineLostError):
    """No engine takes requests now; nothing was asked of any."""


class ReplyError(RollbookError, ValueError):
    """A reply made of text that a model of this chat template does not sample, with the parts that it cannot
    carry. It was not trained as something else."""

    def __init__(self, message: str, parts: tuple[str, ...] = ()) -> None:
        super().__init__(message, parts)
        self.message = message
        self.parts = parts

    def __str__(self) -> str:
        return self.message


class ModelError(RollbookError):
    """A model directory, tokenizer or checkpoint cannot be used."""


class ConfigError(RollbookError, ValueError):
    """A configuration file has an unknown, missing or ill-typed key."""


class WorkerLostError(RollbookError):
    """A worker of Ray was lost as often as Ray makes one anew; nothing is half done."""


class RolloutError(RollbookError):
    """Rollouts cannot begin or go on."""


class ProxyLostError(RolloutError):
    """The proxy of rollouts does not answer, or not as it should, for long: the same command goes on."""


class LaunchError(RolloutError):
    """An agent cannot be started, or not as isolated as is required."""


class TrainError(RollbookError):
    """A training run cannot go on."""


class IdleError(TrainError):
    """No samples that fill a step arrived within the idle timeout."""


class RankError(TrainError):
    """A rank of the training ended, hangs, or did not come; it is named, with its last words."""


class RankLostError(RankError):
    """A rank that was at work ended, or hangs: what is committed stays, and the same command goes on."""


class NotFiniteError(TrainError):
    """A step's numbers overflowed, or are none; nothing of it was committed.

    Attributes:
        stage: the stage of the step in which the first non-finite value appeared.
        sample: the leaf turn of the sample that it appeared in; None: it is of none.
    """

    def __init__(self, message: str, stage: str = "", sample: str | None = None) -> None:
        super().__init__(message, stage, sample)
        self.stage, self.sample = stage, sample

    def __str__(self) -> str:
        return str(self.args[0])


class AllRejectedError(TrainError):
    """Every token of a step's batch was rejected by its correction, or masked; nothing was committed."""


class ReplayError(RollbookError):
    """A step cannot be replayed at all (a step that replays differently is a result, not an error)."""
