"""A loss of one's own, with its check, in one file, and its row in another: nothing else is opened."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
LOSS = '''
"""Half of REINFORCE's loss, and its check."""


def halved(inputs, clips):
    """Half of minus advantage times logprob, [B, T - 1]."""
    return -inputs.advantages * inputs.logprobs / 2


def test_by_hand():
    """Tokens of 1 * 1 / 2 and -3 * 2 / 2, of which the mean is taken."""
    from parity import ours
    from parity.cases import written_case

    case = written_case(logprobs=[[-1.0, -2.0]], advantages=[[1.0, -3.0]])
    assert float(ours.loss(case, surrogate="halved_loss:halved")) == (0.5 - 3.0) / 2
'''
ROW = '''
"""Its row, and numbers that were worked out by hand."""

from functools import partial

from parity import ours
from parity.cases import EXTREME, written_case
from parity.peers import with_verl
from parity.row import Fixture, Row

HALVED = partial(ours.loss, surrogate="halved_loss:halved")
ROWS = (
    Row(
        "halved_loss:halved",
        "verl",
        "gpg, halved",
        HALVED,
        lambda case: with_verl.loss(case, name="gpg") / 2,
        EXTREME,
    ),
)
FIXTURES = (
    Fixture(
        "halved", written_case(advantages=[[2.0, 4.0]]), 1.5, {"ours": HALVED}, gradient=[[-0.5, -1.0]]
    ),
)
'''


def _suite(folder: Path) -> tuple[int, str]:
    """`make test-parity PARITY="--rows FOLDER FOLDER/halved_loss.py -k halved"`, as the Makefile has it."""
    command = [sys.executable, "-m", "pytest", "-c", str(HERE / "pytest.ini"), f"--confcutdir={HERE}"]
    command += [str(HERE), "--rows", str(folder), str(folder / "halved_loss.py"), "-k", "halved", "-p"]
    done = subprocess.run([*command, "no:cacheprovider"], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_two_files_are_enough(tmp_path: Path) -> None:
    """The row, the numbers by hand and the loss's own check run; and fail where the loss is another."""
    (tmp_path / "halved_loss.py").write_text(LOSS)
    (tmp_path / "halved_row.py").write_text(ROW)
    code, said = _suite(tmp_path)
    assert code == 0, said
    assert "3 passed" in said
    (tmp_path / "halved_loss.py").write_text(LOSS.replace("inputs.logprobs / 2", "inputs.logprobs / 3"))
    code, said = _suite(tmp_path)
    assert code == 1, said
    assert "3 failed" in said
    assert "halved_loss:halved differs from verl gpg, halved by" in said
