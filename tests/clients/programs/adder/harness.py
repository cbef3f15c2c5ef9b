"""Runs a program of this folder against the address that verifiers gives it."""

from __future__ import annotations

import sys
from pathlib import Path

import verifiers.v1 as vf

PROGRAM = Path(__file__).parents[1] / "openai_chat.py"


class AdderHarnessConfig(vf.HarnessConfig):
    """How the program asks."""

    streams: bool = False
    """Whether it asks for streams."""


class AdderHarness(vf.Harness[AdderHarnessConfig]):
    """The program, as a process on this host."""

    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Run it."""
        words = ["stream"] if self.config.streams else []
        environment = {"OPENAI_BASE_URL": endpoint, "OPENAI_API_KEY": secret}
        return await runtime.run_program([sys.executable, str(PROGRAM), *words], environment)
