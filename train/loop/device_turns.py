"""Who has the devices that a training shares with the engines that it gives weights to."""

from __future__ import annotations

from collections.abc import Sequence

from rollbook.train.loop.publish import Publisher
from rollbook.train.megatron.policy import Policy


class DeviceTurns:
    """Takes the devices for the training, and gives them to engines. Where none are shared, it does nothing.

    Attributes:
        policies: of the training, once they are made.
        away: whether engines have the devices, and the memory of the policies is given away.
    """

    def __init__(self, publisher: Publisher, *, shares: bool) -> None:
        self._publisher, self.shares = publisher, shares
        self.policies: Sequence[Policy] = ()
        self.away = False

    def take(self, version: int) -> None:
        """Have engines give the devices up, until the sync of a version.

        Raises:
            EngineError: one does not.
        """
        if self.shares:
            self._publisher.rest(version)
            self.onload()

    def offload(self) -> None:
        """Give the policies' memory away: engines take theirs next."""
        for policy in self.policies if self.shares else ():
            policy.offload()
        self.away = self.shares

    def onload(self) -> None:
        """Take it again."""
        for policy in self.policies if self.away else ():
            policy.onload()
        self.away = False
