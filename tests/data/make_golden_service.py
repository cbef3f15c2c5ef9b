"""Writes tests/data/format-1-service: sessions and operations of clients, as their release does.

    python tests/data/make_golden_service.py

It is never written again. Lane `serve` has a sealed segment in which a model is made, and a live one with a
pass, an operation that failed, one that did not end, and weights that are copied and deleted. What they say
is in `format-1-service.jsonl`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from golden_store import write_golden

from rollbook.store.events import (
    Json,
    LaneOrdered,
    OperationAccepted,
    OperationEnded,
    Record,
    SamplerOpened,
    SessionEnded,
    SessionOpened,
    StepCommitted,
    StepPlanned,
    WeightsChanged,
    WeightsCopied,
    WeightsFreed,
)

FOLDER = Path(__file__).parent / "format-1-service"
STORE_ID = "01900000-0000-7000-8000-000000000036"
MODEL = "s1:train:0"
LORA = {"rank": 4, "alpha": 32.0, "targets": ["q_proj", "v_proj"]}


def segments() -> list[list[Any]]:
    """The records of both segments."""
    client = {"tags": ["try"], "user_metadata": None, "sdk_version": "0.38.0"}
    made = {"base_model": "tiny", "lora": LORA, "seed": 7}
    keys = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    passed = {"loss": "ppo", "keys": keys, "tokens": 15}
    adam = {
        "learning_rate": 1e-4,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-12,
        "weight_decay": 0.0,
        "clip_grad": 0.0,
    }
    state = {"adapter": "a" * 64, "optimizer": "b" * 64, "gradients": "c" * 64}
    named = [(f"{MODEL}:{number}", MODEL, number) for number in range(5)]
    saved = {"kind": "weights", "name": "best", "overwrite": False, "ttl_seconds": 7200}
    path, wrote = f"tinker://{MODEL}/weights/best", "checkpoints/s1.train.0/operation-00000004"
    digests = {"adapter": "4" * 64}
    return [
        [
            SessionOpened("s1", "key-1", client, "alice"),
            OperationAccepted(*named[0], "create_model", {"base_model": "tiny"}, "d" * 64, made),
            OperationEnded(*named[0], {"type": "create_model", "model_id": MODEL}, None, state),
        ],
        [
            SessionOpened("s2", None, client),
            OperationAccepted(*named[1], "forward_backward", {"protobuf": "KLUv/SAA"}, "e" * 64, passed),
            OperationEnded(
                *named[1],
                {"protobuf": "CgA="},
                None,
                {"result": "f" * 64, "gradients": "c" * 64},
                metrics={"loss:sum": 2.5},
            ),
            OperationAccepted(*named[2], "optim_step", {"seq_id": 2}, "0" * 64, {"refused": "no such key"}),
            OperationEnded(*named[2], None, {"category": "user", "error": "no such key"}, {}),
            OperationAccepted(*named[3], "optim_step", {"seq_id": 3}, "1" * 64, adam),
            *_step(adam),
            OperationEnded(
                *named[3], {"metrics": {}}, None, state, "checkpoints/s1.train.0/operation-00000003"
            ),
            OperationAccepted(f"{MODEL}:6", MODEL, 6, "optim_step", {"seq_id": 6}, "2" * 64, adam),
            SamplerOpened("s1:sample:0", "s1", "tiny", None, None, 0, "3" * 64, None),
            SamplerOpened(
                *("s1:sample:1", "s1", "tiny", MODEL, f"tinker://{MODEL}/sampler_weights/best", 1),
                *("4" * 64, "checkpoints/s1.train.0/operation-00000003"),
            ),
            SessionEnded("s2", {"reason": {"type": "success"}, "detail": None}),
            OperationAccepted(*named[4], "save_weights", {"path": "best"}, "5" * 64, saved),
            OperationEnded(*named[4], {"path": path}, None, digests, wrote),
            WeightsChanged(MODEL, path, wrote, "published", None, "alice"),
            WeightsChanged(MODEL, path, wrote, "kept", 1_900_000_000_000_000, "alice"),
            WeightsCopied(
                *("s2:train:0", "tinker://s2:train:0/weights/best", path, MODEL, 4, 1, wrote, digests),
                *(None, {"step": "1"}, "key-2", "bob"),
            ),
            WeightsChanged("s2:train:0", "tinker://s2:train:0/weights/best", wrote, "deleted"),
            WeightsChanged(MODEL, path, wrote, "expired"),
            WeightsFreed(MODEL, 4, wrote, 4096),
            LaneOrdered(1),
        ],
    ]


def _step(adam: Json) -> list[Record]:
    """The optimizer step of the third operation, on one datum that was sampled here and one that was not."""
    operations = [
        {"request_id": f"{MODEL}:{number}", "number": number, "operation": name, "body_digest": digest * 64}
        for number, name, digest in ((1, "forward_backward", "e"), (3, "optim_step", "1"))
    ]
    samples = [
        {"trajectory_id": "sequence-1", "turn_id": "sequence-1-0"},
        {"trajectory_id": None, "turn_id": f"{MODEL}:1#1"},
    ]
    plan = StepPlanned(
        step=0,
        attempt=1,
        policy="actor",
        policy_version=0,
        phase="service",
        cut="service=9",
        recipe={},
        recipe_digest="5" * 64,
        samples=samples,
        partition=[[[0, 1]]],
        algorithm={"name": "cross_entropy"},
        optimizer=adam,
        learning_rate=1e-4,
        seed=7,
        input_digests={"input_weights": "a" * 64, "input_optimizer": "6" * 64},
        environment={},
        operations=operations,
    )
    digests = {"samples": "7" * 64, "gradients": "c" * 64, "optimizer": "b" * 64, "weights": "a" * 64}
    return [plan, StepCommitted(0, 1, "actor", 1, digests, {"loss": 1.25, "trained_tokens": 2})]


def main() -> None:
    """Write the store."""
    write_golden(FOLDER, STORE_ID, "serve", segments())


if __name__ == "__main__":
    main()
