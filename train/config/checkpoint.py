"""How checkpoints are written, and which are kept: the keys of `[checkpoint]`."""

from __future__ import annotations

from rollbook.store.upkeep.checkpoint_rule import Keep, keep_of
from rollbook.train.table import Positive, Table


class CheckpointConfig(Table):
    """How checkpoints are written, and which are kept. `checkpoint_every` says how often; none of these keys
    changes a bit of what is trained, or of what is read back."""

    overlap: bool = False
    """Go on while a checkpoint is written: what it holds is copied to the host's memory first, and one is
    written at a time. The last one of a training is waited for, and so is one that engines load."""
    sharded: bool = False
    """Each rank writes its own part, and nothing is gathered. All hosts need the store's folder at the same
    path. Engines that load weights from disk get a directory of whole ones beside it."""
    keep_last: Positive | None = None
    """Keep the newest so many checkpoints that training can resume from, and remove the others, but for those
    that something needs; absent: keep all, or with `keep_every` the newest 2. Steps of removed versions are
    replayed from the nearest one that is kept."""
    keep_every: Positive | None = None
    """Of so many versions in a row keep the first checkpoint, too, as a replay starts from it; absent: with
    `keep_last` no others."""

    @property
    def keep(self) -> Keep | None:
        """What is kept; None: all."""
        return keep_of(self.keep_last, self.keep_every)
