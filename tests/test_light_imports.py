"""Reading the log, the proxy and `--help` start without torch, which takes seconds to import."""

from __future__ import annotations

from typing import Any

import pytest

HELP = "import sys; sys.argv = ['rollbook', '--help']\nfrom rollbook.cli.app import main\ntry:\n    main()\n"
HELP += "except SystemExit as stop:\n    assert not stop.code, stop.code\n"


@pytest.mark.parametrize("code", ["import rollbook.store\n", "import rollbook.ingest.serve.proxy\n", HELP])
def test_torch_is_not_imported(run_python: Any, code: str) -> None:
    """A fresh process that does this has neither torch nor transformers in sys.modules."""
    check = "import sys\nprint('HEAVY', sorted({'torch', 'transformers', 'megatron'} & set(sys.modules)))\n"
    status, out, err = run_python(code + check)
    assert (status, err) == (0, "")
    assert out.splitlines()[-1] == "HEAVY []"
