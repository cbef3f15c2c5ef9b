"""Tensors in a pickle: what SGLang's clients send is read, and nothing else is run."""

from __future__ import annotations

import base64
import os
import pickle
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.processes.warm import TORCH, WarmProcess

pytest.importorskip("torch")

import torch

from rollbook.engines.embedded.sent_tensors import read_sent
from rollbook.store.errors import ModelError

pytestmark = pytest.mark.torch

SENDER = """
import base64, io, sys, torch
from multiprocessing.reduction import ForkingPickler
torch.multiprocessing.set_sharing_strategy(sys.argv[1])
data = io.BytesIO()
whole = torch.arange(12, dtype=torch.float32).reshape(3, 4)
ForkingPickler(data).dump([("a", whole), ("b", whole[1:]), ("c", torch.ones(2, dtype=torch.bfloat16))])
open(sys.argv[2], "wb").write(base64.b64encode(data.getvalue()))
print("sent", flush=True)
sys.stdin.read()
"""


def _from_a_process(strategy: str, file: Path) -> list[tuple[str, torch.Tensor]]:
    words = [sys.executable, "-c", SENDER, strategy, str(file)]
    with WarmProcess(words, modules=TORCH, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as sender:
        assert sender.stdout is not None
        assert sender.stdin is not None
        try:
            assert sender.stdout.readline() == b"sent\n"
            return read_sent([file.read_text()])
        finally:
            sender.stdout.close()
            sender.stdin.close()
            sender.wait(60)


def test_tensors_in_shared_memory_of_another_process(tmp_path: Path) -> None:
    """As SGLang's own serializer sends them, views and bfloat16 too."""
    first, second, third = _from_a_process("file_system", tmp_path / "sent")
    assert [first[0], second[0], third[0]] == ["a", "b", "c"]
    assert first[1].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert second[1].tolist() == [[4, 5, 6, 7], [8, 9, 10, 11]]
    assert (third[1].dtype, third[1].tolist()) == (torch.bfloat16, [1, 1])


def test_file_descriptors_are_refused_with_the_remedy(tmp_path: Path) -> None:
    """Torch's default way of sharing works for child processes only."""
    with pytest.raises(ModelError, match=r'set_sharing_strategy\("file_system"\)'):
        _from_a_process("file_descriptor", tmp_path / "sent")


def _sent(tensors: Any) -> list[str]:
    return [base64.b64encode(pickle.dumps(tensors)).decode()]


def test_pickled_tensors_and_views_are_read() -> None:
    """Plain pickles of tensors, parameters and views."""
    whole = torch.arange(6, dtype=torch.float16).reshape(2, 3)
    sent = [("a", whole), ("b", torch.nn.Parameter(whole.float())), ("c", whole.T), ("d", torch.zeros(0))]
    tensors = read_sent(_sent(sent))
    assert [name for name, _ in tensors] == ["a", "b", "c", "d"]
    for (_, tensor), (_, other) in zip(tensors, sent, strict=True):
        assert tensor.dtype == other.dtype
        assert torch.equal(tensor, other)


class _Runs:
    def __init__(self, call: Any, *arguments: Any) -> None:
        self.call = (call, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    "what",
    [
        _Runs(os.system, "true"),
        _Runs(eval, "1"),
        _Runs(torch.load, "/nothing"),
        _Runs(getattr, "", "upper"),
        _Runs(torch.ones, 2),
        _Runs(torch.storage._load_from_bytes, pickle.dumps(_Runs(os.getpid), 2)),
        _Runs(torch.UntypedStorage, 8),
        OrderedDict(a=_Runs(os.getpid)),
    ],
)
def test_what_builds_no_tensor_is_not_run(what: Any) -> None:
    """Refused before it is called, by name."""
    with pytest.raises(ModelError, match="cannot be read as named tensors"):
        read_sent(_sent([("a", what)]))


@pytest.mark.parametrize(
    ("payloads", "message"),
    [
        ([], "0 payloads"),
        (["AA==", "AA=="], "2 payloads"),
        (["é"], "not base64"),
        (["AAAA"], "cannot be read"),
        (_sent({"a": torch.ones(1)}), "is a dict"),
        (_sent([("a", 1)]), "not of"),
        (_sent([("a", torch.ones(1), 2)]), "not of"),
        (_sent([(b"a", torch.ones(1))]), "not of"),
    ],
)
def test_what_is_no_list_of_named_tensors(payloads: list[str], message: str) -> None:
    """Each is an error that says what came."""
    with pytest.raises(ModelError, match=message):
        read_sent(payloads)


def test_a_tensor_beyond_its_storage() -> None:
    """Sizes that do not fit the bytes that came are an error, not memory of somebody else's."""
    rebuild, storage = torch._utils._rebuild_tensor_v2, torch.zeros(2).untyped_storage()
    beyond = _Runs(rebuild, storage, 0, (99,), (1,), False, OrderedDict())
    with pytest.raises(ModelError, match="cannot be read"):
        read_sent(_sent([("a", beyond)]))
