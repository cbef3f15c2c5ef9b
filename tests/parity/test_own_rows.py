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


def third(inputs, clips):
    """Not half, but a third of it."""
    return -inputs.advantages * inputs.logprobs / 3


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
THIRD = partial(ours.loss, surrogate="halved_loss:third")


def theirs(case):
    return with_verl.loss(case, name="gpg") / 2


ROWS = (
    Row("halved_loss:halved", "verl", "gpg, halved", HALVED, theirs, EXTREME),
    Row("halved_loss:third", "verl", "gpg, halved", THIRD, theirs, EXTREME),
)
FIXTURES = (
    Fixture(
        "halved_loss", written_case(advantages=[[2.0, 4.0]]), 1.5, {"ours": HALVED}, gradient=[[-0.5, -1.0]]
    ),
)
'''


def test_two_files_are_enough(tmp_path: Path) -> None:
    """As `make test-parity PARITY="--rows FOLDER FOLDER/halved_loss.py -k halved_loss"` runs it: the row, the
    numbers by hand and the loss's own check pass; the row of another loss fails."""
    (tmp_path / "halved_loss.py").write_text(LOSS)
    (tmp_path / "halved_row.py").write_text(ROW)
    command = [sys.executable, "-m", "pytest", "-c", str(HERE / "pytest.ini"), f"--confcutdir={HERE}"]
    command += [str(HERE), "--rows", str(tmp_path), str(tmp_path / "halved_loss.py"), "-k", "halved_loss"]
    done = subprocess.run([*command, "-p", "no:cacheprovider"], capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    assert done.returncode == 1, output
    assert "1 failed, 3 passed" in output
    assert "halved_loss:third differs from verl gpg, halved by" in output
