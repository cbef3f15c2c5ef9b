"""Runs `agent.py` against the address that verifiers gives it."""

from __future__ import annotations

import sys
from pathlib import Path

import verifiers.v1 as vf

AGENT = Path(__file__).resolve().parents[1] / "agent.py"


class SumsHarness(vf.Harness[vf.HarnessConfig]):
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
        environment = {"OPENAI_BASE_URL": endpoint, "OPENAI_API_KEY": secret}
        return await runtime.run_program([sys.executable, str(AGENT), str(data.prompt)], environment)
