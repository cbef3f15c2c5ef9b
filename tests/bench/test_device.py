"""bench device: the same training on all sides, beside a device's limits; what does not fit is left out."""

from __future__ import annotations

import io
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from rollbook.bench import device, train_sides
from rollbook.bench.device import CPU, Course, Laps, Measured, Plan, check_losses, step_flops
from rollbook.bench.device_side import DIGEST, MODEL, PRODUCT, READ, DeviceSide, _digest, product_flops
from rollbook.bench.processes import BenchError, Process
from rollbook.bench.train_sides import (
    BARE,
    OURS,
    PLAIN_PACKED,
    SIDES,
    Size,
    Way,
    best_attention,
    make_model,
    samples,
)
from rollbook.engines.weights.digests import digest_tensors
from rollbook.train.model.shape import read_shape

pytestmark = pytest.mark.torch

TINY = Size(64, 2, 4, 256)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short samples of few words."""
    for name, value in {"SAMPLES": 4, "LONGEST": 96, "VOCAB": 256, "LR": 1e-3}.items():
        monkeypatch.setattr(train_sides, name, value)


@pytest.mark.parametrize(("dtype", "close"), [("float32", 2e-4), ("bfloat16", 1e-2)])
def test_the_sides_learn_the_same(tmp_path: Path, short: None, dtype: str, close: float) -> None:
    """In each type, with more samples than one draw has, in packs of a given size."""
    make_model(tmp_path, TINY, dtype)
    losses = {}
    for name in device.TRAINERS:
        make, way = SIDES[name]
        step = make(tmp_path, replace(way, samples=6, most=150, dtype=dtype))
        losses[name] = [step() for _ in range(3)]
    first = losses[PLAIN_PACKED]
    assert first[0] == pytest.approx(5.5, abs=0.2)  # the logarithm of 256
    assert first[2] < first[0] - 0.02
    for name, curve in losses.items():
        assert curve == pytest.approx(first, rel=close), name


def test_more_samples_begin_with_the_same(short: None) -> None:
    """Those of a larger batch are those of a smaller one, and others."""
    few, many = samples(), samples(10)
    assert (len(few), len(many), len({sample.trajectory_id for sample in many})) == (4, 10, 10)
    assert [s.tokens.tolist() for s in many[:4]] == [s.tokens.tolist() for s in few]
    assert many[4].tokens.tolist() != few[0].tokens.tolist()


def test_words_say_the_way(monkeypatch: pytest.MonkeyPatch, capsysbinary: Any) -> None:
    """The device, the type, samples and tokens of a micro-batch; the trainer alone says what it recorded."""
    seen = []

    def make(model: Path, way: Way) -> train_sides.Step:
        seen.append((model, way))
        return lambda: 1.5

    monkeypatch.setattr(train_sides, "ours", make)
    monkeypatch.setitem(SIDES, OURS, (make, Way(recompute=True)))
    for name, words in ((OURS, ["cpu", "bfloat16", "7", "99"]), (BARE, [])):
        monkeypatch.setitem(SIDES, BARE, (lambda *given: make(*given), Way()))
        monkeypatch.setattr("sys.argv", ["train_sides", name, "m", *words])
        monkeypatch.setattr("sys.stdin", io.StringIO('{"rest": true}\n'))
        train_sides.main()
    given = Way(recompute=True, samples=7, most=99, device="cpu", dtype="bfloat16")
    assert seen == [(Path("m"), given), (Path("m"), Way())]
    first, second = capsysbinary.readouterr().out.splitlines()
    assert (b'"manifest"' in first, b'"manifest"' in second) == (True, False)


def test_flops_are_those_that_torch_counts(tmp_path: Path, short: None) -> None:
    """For each sample; attention by its definition computes what is masked, too, which is as much again."""
    make_model(tmp_path, TINY)
    shape, batch = read_shape(tmp_path), samples()
    policy = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    counted = FlopCounterMode(display=False)
    with counted:
        for sample in batch:
            tokens = torch.from_numpy(sample.tokens.astype("int64"))[None]
            policy(tokens, use_cache=False).logits.sum().backward()
    masked = sum(6 * shape.layers * shape.heads * shape.head_dim * len(sample) ** 2 for sample in batch)
    assert counted.get_total_flops() == pytest.approx(step_flops(shape, batch) + masked, rel=2e-3)
    weights = sum(p.numel() for p in policy.parameters() if p.dim() == 2)
    tokens_of_all = sum(map(len, batch))
    assert step_flops(shape, batch) == 6 * weights * tokens_of_all + masked


def test_a_device_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it takes to multiply, read and digest; a digest is that of a step. It makes models of its type."""
    monkeypatch.setattr("rollbook.bench.device_side.PRODUCTS", {"cpu": (8, 3)})
    assert product_flops("cpu") == 3072
    side = DeviceSide("cpu", "bfloat16")
    for what in (PRODUCT, READ, DIGEST):
        assert side({"what": what, "floats": 100_000})["seconds"] > 0
    wanted = digest_tensors({"0": torch.arange(100_000, dtype=torch.float32)}, tree=True)
    assert cast(Any, _digest(side._of(0))).digest == wanted
    side(
        {"what": MODEL, "folder": str(tmp_path), "size": {"width": 64, "layers": 1, "heads": 4, "vocab": 64}}
    )
    held = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert {p.dtype for p in held.parameters()} == {torch.bfloat16}
    assert side({"what": "name"})


# Turns ------------------------------------------------------------------------------------------------


class Scripted:
    """Stands in for a process: answers at once, but for a side that fails."""

    fails = ""

    def __init__(self, name: str, words: list[str], folder: Path, cores: str) -> None:
        self.name, self.words = name, words

    def __enter__(self) -> Scripted:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def ask(self, **command: Any) -> Any:
        """Its answer."""
        if command["what"] == MODEL:
            make_model(Path(command["folder"]), TINY)
        if command["what"] == "name":
            return "a device"
        if any(self.fails == f"{self.name} {Path(word).name}" for word in self.words):
            raise BenchError(f"{self.name} ended\nTraceback\nOutOfMemoryError: too large")
        return {"seconds": 2.0, "loss": 5.5, "manifest": 0.5}


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> type[Scripted]:
    """Processes are `Scripted`."""
    monkeypatch.setattr(device, "Process", Scripted)
    monkeypatch.setattr(Scripted, "fails", "")
    return Scripted


PLAN = Plan(replace(CPU, courses=(Course("a", TINY, 2, 4), Course("b", TINY, 1, 4))), 2)


def test_sides_take_turns(tmp_path: Path, scripted: type[Scripted]) -> None:
    """Each has its seconds of each round; what was planned is what was done."""
    rounds: list[None] = []
    measured = device.measure(tmp_path, PLAN, lambda: rounds.append(None))
    assert (measured.name, measured.left_out, len(rounds)) == ("a device", {}, PLAN.steps)
    assert measured.digests == {DIGEST: [2.0, 2.0], READ: [2.0, 2.0]}
    names = {PRODUCT, OURS, BARE, PLAIN_PACKED}
    assert {c: laps.seconds for c, laps in measured.laps.items()} == {
        "a": {name: [2.0, 2.0] for name in names},
        "b": {name: [2.0] for name in names},
    }
    assert measured.laps["a"].manifest == [0.5, 0.5]
    assert measured.laps["a"].trained == sum(sample.trained for sample in samples(4))


def test_what_does_not_fit_is_left_out(
    tmp_path: Path, scripted: type[Scripted], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A size of which a side fails, with what it said; the others are measured. None: nothing is."""
    monkeypatch.setattr(scripted, "fails", f"{BARE} a")
    measured = device.measure(tmp_path, PLAN, lambda: None)
    assert measured.left_out == {"a": f"{BARE} ended: OutOfMemoryError: too large"}
    assert list(measured.laps) == ["b"]
    figures = {figure.figure: figure for figure in device.outcome(measured).figures}
    assert figures["device.left_out"].against == f"a: {BARE} ended: OutOfMemoryError: too large"
    with pytest.raises(BenchError, match=r"^a: no time was left\nb: no time was left$"):
        device.measure(tmp_path, replace(PLAN, seconds=0), lambda: None)


def test_rounds_end_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sides are ended where time is; the rounds until then count, if there is one."""
    ended = threading.Event()
    slow = SimpleNamespace(child=SimpleNamespace(kill=ended.set), ask=lambda **_: _answer(ended))
    sides = dict.fromkeys((PRODUCT, *device.TRAINERS), cast(Process, slow))
    until, laps = time.monotonic() + 0.2, Laps(1, 1, {name: [] for name in sides}, [])
    with device._ended_at(until, sides):
        device._take_turns(sides, 1000, until, laps, lambda: None)
    assert 0 < len(laps.manifest) < 1000
    assert {len(seconds) for seconds in laps.seconds.values()} == {len(laps.manifest)}
    with pytest.raises(BenchError, match="ended"):
        device._take_turns(sides, 1000, until, laps, lambda: None)


def _answer(ended: threading.Event) -> Any:
    if ended.wait(0.002):
        raise BenchError("ended")
    return {"seconds": 1.0, "manifest": 0.1}


def test_another_loss_is_no_figure() -> None:
    """A side that does other work is not measured, nor one that has no number."""
    check_losses({PLAIN_PACKED: 9.0, OURS: 9.04}, 0.05)
    for loss in (9.06, float("nan")):
        with pytest.raises(BenchError, match=f"{OURS}: its first loss is {loss}, that of {PLAIN_PACKED} 9"):
            check_losses({PLAIN_PACKED: 9.0, OURS: loss}, 0.05)


def test_figures() -> None:
    """Ratios are medians over rounds; the limit of a step is a product of the same round."""
    seconds = {
        PLAIN_PACKED: [2.0, 6.0],
        BARE: [1.0, 2.0],
        OURS: [1.25, 2.5],
        PRODUCT: [0.5, 1.0],
    }
    flops = product_flops("cpu")
    laps = Laps(100, flops, seconds, [0.125, 0.5])
    measured = Measured(CPU, "a device", {DIGEST: [2.0, 4.0], READ: [1.0, 3.0]}, {"6m": laps}, {"1b": "why"})
    outcome = device.outcome(measured)
    figures = {figure.figure: figure for figure in outcome.figures}
    assert {name: figure.ratio for name, figure in figures.items()} == {
        "device.product": None,
        "device.train_vs_transformers_6m": 2.5,
        "device.recorded_6m": 0.8,
        "device.replayability_share_6m": None,
        "device.flops_used_6m": pytest.approx(0.4),
        "device.digest": 0.625,
        "device.left_out": None,
    }
    assert figures["device.replayability_share_6m"].value == pytest.approx(0.15)
    assert figures["device.train_vs_transformers_6m"].value == pytest.approx(100 / 1.5)
    assert figures["device.train_vs_transformers_6m"].against == f"{PLAIN_PACKED}, sdpa: 25 tokens/s"
    assert figures["device.product"].value == pytest.approx(flops / 0.75 / 1e12)
    assert figures["device.product"].against == "a device: float32"
    assert figures["device.digest"].value == pytest.approx((4 << 26) / 3 / 1e9)
    assert (figures["device.left_out"].value, figures["device.left_out"].against) == (1, "1b: why")
    assert {spread.what for spread in outcome.spreads} == {f"{name}_6m" for name in seconds} | {DIGEST, READ}


def test_attention_is_the_best_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention's own package where it is installed, on a GPU alone."""
    for there, kind, wanted in (
        (True, "cuda", "flash_attention_2"),
        (None, "cuda", "sdpa"),
        (True, "cpu", "sdpa"),
    ):
        monkeypatch.setattr("importlib.util.find_spec", lambda _, there=there: there)
        assert best_attention(kind) == wanted


def test_flash_attention_is_told_where_samples_end(short: None) -> None:
    """From the first place to the last, and how long the longest is."""
    some = samples()
    inputs, _ = train_sides._packed(some, ends=True)
    lengths = inputs["cu_seq_lens_q"].diff().tolist()
    assert lengths == [len(sample) for sample in some]
    assert inputs["cu_seq_lens_q"].dtype == torch.int32
    assert inputs["max_length_k"] == max(lengths)
