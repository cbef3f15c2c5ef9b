"""How checkpoints are written: the keys of `[checkpoint]`."""

from __future__ import annotations

from rollbook.train.table import Table


class CheckpointConfig(Table):
    """How checkpoints are written. `checkpoint_every` says how often; neither key changes a bit of what is
    trained, or of what is read back."""

    overlap: bool = False
    """Go on while a checkpoint is written: what it holds is copied to the host's memory first, and one is
    written at a time. The last one of a training is waited for, and so is one that engines load."""
    sharded: bool = False
    """Each rank writes its own part, and nothing is gathered. All hosts need the store's folder at the same
    path. Engines that load weights from disk get a directory of whole ones beside it."""
