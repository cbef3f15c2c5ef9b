"""What clients send as JSON is what they meant, or is refused in few words."""

from __future__ import annotations

import orjson
import pytest

from rollbook.service.requests import (
    MOST_METADATA,
    CreateSession,
    LoadState,
    Lora,
    OptimStep,
    Sample,
    Unusable,
    read_body,
    read_operation,
)
from rollbook.store.errors import RequestError

ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize(
    ("left_out", "targets"),
    [
        ((), (*ATTENTION, *MLP, "lm_head")),
        (("unembed",), (*ATTENTION, *MLP)),
        (("attn",), (*MLP, "lm_head")),
        (("attn", "mlp"), ("lm_head",)),
    ],
)
def test_which_matrices(left_out: tuple[str, ...], targets: tuple[str, ...]) -> None:
    """All are trained, but for those that the client leaves out."""
    lora = Lora.model_validate({"rank": 4} | {f"train_{name}": False for name in left_out}).config()
    assert (lora.rank, lora.alpha, lora.targets) == (4, 32.0, targets)


def test_nothing_to_train() -> None:
    """Without any it is refused, and told which there are."""
    nothing = Lora(rank=4, train_attn=False, train_mlp=False, train_unembed=False)
    with pytest.raises(
        RequestError, match="train_attn, train_mlp and train_unembed are false: set one of them"
    ):
        nothing.config()


ODD: dict[str, tuple[bytes, str]] = {
    "twice": (b'{"tags": [], "tags": ["a"]}', "has a key twice"),
    "twice inside": (b'{"user_metadata": {"a": [{"b": 1, "b": 1}]}}', "has a key twice"),
    "twice, written apart": (b'{"tags": [], "\\u0074ags": ["a"]}', "has a key twice"),
    "deep": (b'{"user_metadata": {"a": ' + b"[" * 101 + b"]" * 101 + b"}}", "nested more than 100 deep"),
    "many keys": (orjson.dumps({str(n): n for n in range(5000)}), "has 5000 keys"),
    "metadata": (orjson.dumps({"user_metadata": {"a": "x" * MOST_METADATA}}), "give at most 16384"),
    "a long key": (b'{"' + b"k" * 5000 + b'": 1}', "kkk: Extra inputs"),
    "half a character": (b'{"sdk_version": "\\ud800"}', "is not JSON"),
}


@pytest.mark.parametrize("name", [*ODD])
def test_bodies_that_are_refused(name: str) -> None:
    """Each with its reason."""
    body, told = ODD[name]
    with pytest.raises(RequestError, match=told) as error:
        read_body(CreateSession, body)
    assert error.value.status == 400
    assert len(error.value.message) < 400


def test_colons_and_quotes_in_texts_are_no_keys() -> None:
    """Nor what an escape makes of them."""
    metadata = {'a:"b': 'c":"d', "e\\": "f:", "g": ['\\":', {"h:i": {}}]}
    assert read_body(CreateSession, orjson.dumps({"user_metadata": metadata})).user_metadata == metadata


def test_an_operation_with_a_number_is_told_apart() -> None:
    """It is accepted, and fails when its number comes; what has none, or is no JSON, is refused at once."""
    body = {"model_id": "m", "seq_id": 3, "adam_params": {"eps": 0}}
    unusable = read_operation(OptimStep, orjson.dumps(body))
    assert isinstance(unusable, Unusable)
    assert (unusable.model_id, unusable.seq_id, unusable.sent) == ("m", 3, body)
    for odd in (b'{"model_id": "m"}', b"{", b'{"model_id": "m", "seq_id": 1, "seq_id": 1}'):
        with pytest.raises(RequestError):
            read_operation(OptimStep, odd)


@pytest.mark.parametrize("odd", [{"seed": 1e20}, {"top_k": 1 << 31}, {"stop": ""}, {"stop": ["x" * 257]}])
def test_numbers_and_texts_that_no_engine_takes(odd: dict[str, object]) -> None:
    """And a temperature with which logits would overflow is 0."""
    sent = {"sampling_session_id": "s", "seq_id": 0, "prompt": {"chunks": []}}
    with pytest.raises(RequestError, match=rf"sampling_params\.{next(iter(odd))}"):
        read_body(Sample, orjson.dumps(sent | {"sampling_params": odd}))
    cold = read_body(Sample, orjson.dumps(sent | {"sampling_params": {"temperature": 1e-30}}))
    assert cold.sampling_params.temperature == 0.0


def test_names_in_a_load_are_bounded() -> None:
    """As those of all other operations: with a path that is too long it cannot be done, and a model of such a
    name is none."""
    sent = {"model_id": "s1:train:0", "seq_id": 1, "path": "tinker://s1:train:0/weights/a", "optimizer": True}
    assert isinstance(read_operation(LoadState, orjson.dumps(sent)), LoadState)
    unusable = read_operation(LoadState, orjson.dumps(sent | {"path": "x" * 1025}))
    assert isinstance(unusable, Unusable)
    assert unusable.why.startswith("path: String should have at most 1024 characters")
    with pytest.raises(RequestError, match="model_id: String should have at most 1024 characters"):
        read_operation(LoadState, orjson.dumps(sent | {"model_id": "x" * 1025}))
