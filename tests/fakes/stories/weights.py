"""Names of weights that are versions by themselves: for tests of all that comes after a name is bound."""

from __future__ import annotations

from rollbook.engines.sglang.http import SglangServer
from rollbook.engines.weights.name import version_in
from rollbook.store.errors import EngineError

STARTED_WITH = "default"


class ToldWeights:
    """Believes an engine: what it was started with is version 0, and a number or a name says its own."""

    changes = 0

    def version_of(self, name: str) -> int | None:
        """The version that a name says."""
        return 0 if name == STARTED_WITH else version_in(name)

    def gave(self, name: str) -> bool:
        """No: nothing is named here."""
        return False

    async def refresh(self) -> None:
        """Nothing is bound later."""

    async def identify(self, server: SglangServer) -> int:
        """No: whatever is known here says so in its name."""
        raise EngineError(f"{server.url} serves weights that nobody has named")
