"""What became of a checkpoint of shards on disk: damage is named by file and piece, and nothing that a file
claims is believed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from safetensors.torch import load_file, save_file
from tests.fakes.stories import fabric
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from rollbook.engines.model_files import MANIFEST, weight_files
from rollbook.store import Store
from rollbook.store.errors import ModelError
from rollbook.store.events import CheckpointWritten, StepCommitted
from rollbook.train.checkpoints.checkpoint import read_checkpoint, stream_checkpoint
from rollbook.train.checkpoints.shards import address_of, piece_name
from rollbook.train.model.reshard import Address

Stores = Callable[..., Store]
FILE = "shard-00001-of-00001.safetensors"
NORM = "weights/decoder.final_layernorm.weight//0-of-1/32/0"
STEP = "optimizer/decoder.final_layernorm.weight/step/0-of-1//0"
MEAN = "optimizer/decoder.final_layernorm.weight/exp_avg/0-of-1/32/0"


@pytest.fixture(scope="module")
def trained_path(recorded_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a checkpoint of shards after each of two steps."""
    from rollbook import store as rb

    log = rb.open(shutil.copytree(recorded_path, tmp_path_factory.mktemp("sharded") / "store"))
    changes = {"steps": 2, "checkpoint_every": 1, "checkpoint": {"sharded": True}}
    fabric.train(log, fabric.config(fabric.SFT, **changes))
    return log.path


@pytest.fixture
def place(trained_path: Path, tmp_path: Path) -> Path:
    """A copy of the last checkpoint."""
    folder: Path = shutil.copytree(trained_path / "checkpoints/demo/actor/v00000002", tmp_path / "v00000002")
    return folder


def _manifest(place: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = orjson.loads((place / MANIFEST).read_bytes())
    return manifest


def _say(place: Path, manifest: dict[str, Any]) -> None:
    (place / MANIFEST).write_bytes(orjson.dumps(manifest))


def _refused(place: Path, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        read_checkpoint(place)


def test_a_name_is_read_as_it_was_written() -> None:
    """Of a slice, of a single number, of a weight; and what is no name is none."""
    for address in (
        Address("state", "decoder.layers.0.mlp.linear_fc1.weight", "exp_avg", 1, 2, (64, 32), 512),
        Address("state", "a.b", "step", 0, 1, (), 0),
        Address("adapter", "a.adapter.q_proj.A", "", 3, 4, (4, 8), 0),
    ):
        assert address_of(piece_name(address)) == address
    assert piece_name(address) == "adapter/a.adapter.q_proj.A//3-of-4/4x8/0"
    for name in ("", "weights/a//0-of-1/3", "gradients/a//0-of-1/3/0", "weights/a//0-of-1/-3/0", f"{NORM}/"):
        assert address_of(name) is None, name


def test_the_damaged_piece_is_named(place: Path) -> None:
    """Whatever it is a piece of."""
    for name, what in ((NORM, "weights"), (MEAN, "optimizer"), (STEP, "optimizer")):
        held = load_file(place / FILE)
        save_file(held | {name: held[name] + 1}, place / FILE)
        _refused(place, rf"{what} damaged: {name} in {FILE} \(not what {MANIFEST} names\)")
        save_file(held, place / FILE)
    manifest = _manifest(place)
    _say(place, manifest | {"weights_digest": "0" * 64})
    _refused(place, f"weights damaged: no piece is, so {MANIFEST} itself changed")
    _say(place, manifest)
    assert read_checkpoint(place).optimizer


def test_a_missing_or_truncated_file(place: Path) -> None:
    """It is named."""
    data = (place / FILE).read_bytes()
    for size in (0, 7, 100, len(data) - 1):
        (place / FILE).write_bytes(data[:size])
        _refused(place, rf"{FILE}: cannot be read: .*: restore the checkpoint from a copy")
    (place / FILE).unlink()
    _refused(place, rf"{FILE}: is missing")


def test_a_file_of_another_version(trained_path: Path, place: Path) -> None:
    """Its pieces have the right names and other numbers."""
    shutil.copyfile(trained_path / "checkpoints/demo/actor/v00000001" / FILE, place / FILE)
    _refused(place, rf"weights damaged: weights/\S+ in {FILE}, .* more \(not what")


def test_a_link_in_the_place_of_a_file(place: Path, tmp_path: Path) -> None:
    """It is not followed."""
    (place / FILE).rename(tmp_path / "elsewhere")
    (place / FILE).symlink_to(tmp_path / "elsewhere")
    _refused(place, rf"{FILE} is no plain file")


def _renamed(place: Path, old: str, new: str) -> None:
    """Have a piece claim to be another one, in the file and in the manifest."""
    held, manifest = load_file(place / FILE), _manifest(place)
    held[new] = held.pop(old)
    manifest["shards"][FILE][new] = manifest["shards"][FILE].pop(old)
    save_file(held, place / FILE)
    _say(place, manifest)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("weights/decoder.final_layernorm.weight//0-of-1/33/0", "is not of the model's shape"),
        ("weights/decoder.final_layernorm.weight//0-of-1/999999999999999x99999/0", "the model's shape"),
        ("weights/decoder.final_layernorm.weight//0-of-1//0", "has 32 numbers of 1"),
        ("weights/decoder.final_layernorm.weight//0-of-1/32/1", "begins after a gap, where number 0 comes"),
        ("weights/decoder.final_layernorm.weight//1-of-1/32/0", "does not fit"),
        ("weights/decoder.final_layernorm.weight//0-of-2/32/0", "does not fit"),
        ("weights/decoder.final_layernorm.weight//0-of-99999/32/0", "does not fit"),
        ("weights/decoder.final_layernorm.weight//0-of-0/32/0", "does not fit"),
        ("weights/decoder.layers.9.norm//0-of-1/32/0", "the model has no tensor of which"),
        ("adapter/decoder.final_layernorm.weight//0-of-1/32/0", "the model has no tensor of which"),
        ("../../etc/passwd", "is no piece of a tensor"),
        (
            "weights/decoder.final_layernorm.weight/exp_avg/0-of-1/32/0",
            "no shard holds weights decoder.final",
        ),
    ],
)
def test_a_piece_that_claims_to_be_another(place: Path, name: str, reason: str) -> None:
    """The file and the piece are named, and no memory is taken for what is not there."""
    _renamed(place, NORM, name)
    _refused(place, rf"v00000002.*{reason}")


def test_pieces_that_overlap_or_leave_gaps(place: Path) -> None:
    """A tensor in two pieces is read; not if a number is there twice, or is not."""
    held, manifest = load_file(place / FILE), _manifest(place)
    norm = held.pop(NORM)
    del manifest["shards"][FILE][NORM]

    def cut(*ends: tuple[int, int]) -> None:
        pieces = {f"{NORM[:-1]}{start}": norm[start:end].clone() for start, end in ends}
        save_file(held | pieces, place / FILE)
        digests = manifest["shards"][FILE] | dict.fromkeys(pieces, "")
        _say(place, manifest | {"shards": {FILE: digests}})

    cut((0, 20), (20, 32))
    weights = dict(stream_checkpoint(place))
    assert (weights["model.norm.weight"] == norm).all()
    assert read_checkpoint(place).optimizer
    cut((0, 20), (19, 32))
    _refused(place, rf"{FILE}: '{NORM[:-1]}19' begins again, where number 20 comes")
    cut((0, 20), (21, 32))
    _refused(place, rf"{FILE}: '{NORM[:-1]}21' begins after a gap, where number 20 comes")
    cut((0, 20))
    _refused(place, rf"{FILE}: part 0 of decoder.final_layernorm.weight has 20 numbers of 32")


def test_a_piece_more_or_less(place: Path) -> None:
    """A file's pieces are those that the manifest names."""
    held = load_file(place / FILE)
    save_file(held | {"more": held[NORM].clone()}, place / FILE)
    _refused(place, rf"{FILE}: holds other pieces than {MANIFEST} names, such as 'more'")
    del held[NORM]
    save_file(held, place / FILE)
    _refused(place, rf"{FILE}: holds other pieces than {MANIFEST} names, such as '{NORM}'")


@pytest.mark.parametrize(
    "shards",
    [
        *(None, [], {}, "x", {FILE: 1}, {"../" + FILE: {}}, {"/etc/passwd": {}}, {"model.safetensors": {}}),
        *({FILE: {}, "shard-00001-of-00002.safetensors": {}}, {"shard-00000-of-00001.safetensors": {}}),
        *({"shard-00001-of-00002.safetensors": {}}, {"critic-shard-00001-of-00001.safetensors": {}}),
        {FILE: {}, "critic-shard-00002-of-00001.safetensors": {}},
        {"shard-00001-of-99999.safetensors": {}},
    ],
)
def test_a_manifest_that_names_other_files(place: Path, shards: Any) -> None:
    """Nothing beside the files that ranks write is opened."""
    _say(place, _manifest(place) | {"shards": shards})
    _refused(place, rf"{MANIFEST}: (its shards are not what ranks write|names 1 of \d+ shards)")


@pytest.mark.parametrize("lora", [1, {}, {"rank": "x"}])
def test_a_manifest_with_odd_factors(place: Path, lora: Any) -> None:
    """It is named."""
    _say(place, _manifest(place) | {"lora": lora})
    _refused(place, MANIFEST)


def test_an_engine_is_not_given_it(
    place: Path, cli: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    """Whatever reads a model directory says what this is, and what makes one of it."""
    with pytest.raises(ModelError, match=r"checkpoint\.sharded.*`rollbook export model`"):
        weight_files(place)
    Tokenizer(WordLevel({"a": 0}, "a")).save(str(place / "tokenizer.json"))
    (place / "chat_template.jinja").write_text("x")
    (place / "generation_config.json").write_text('{"eos_token_id": 0}')
    code, _, err = cli("serve", "--store", tmp_path / "other", "--model", place, "--engine", "embedded")
    assert code == 2
    assert "`rollbook export model`" in " ".join(err.split())


def test_a_damaged_one_is_passed_over(trained_path: Path, tmp_path: Path) -> None:
    """Training goes on from the one before, and comes out the same."""
    from rollbook import store as rb

    logs = [rb.open(shutil.copytree(trained_path, tmp_path / name)) for name in ("damaged", "whole")]
    file = logs[0].path / "checkpoints/demo/actor/v00000002" / FILE
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    for log in logs:
        fabric.train(log, fabric.config(fabric.SFT, steps=3, checkpoint={"sharded": True}))
    ends = [[e.record for e in log.events() if isinstance(e.record, StepCommitted)][-1] for log in logs]
    assert ends[0].digests == ends[1].digests
    written = [e.record for e in logs[0].events() if isinstance(e.record, CheckpointWritten)]
    assert [record.policy_version for record in written] == [0, 1, 2, 3]
