"""A supervised loop: the model learns lines of text, resumes from what it saved, and says one of them."""

from __future__ import annotations

import sys

import tinker
from tinker import types

LINES = ["the log is the only truth", "every token once", "a step can be done again"]


def datum(ids: list[int]) -> types.Datum:
    """A line, each token of which is to be followed by the next."""
    weights = [1.0] * (len(ids) - 1)
    inputs = {"target_tokens": ids[1:], "weights": weights}
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


def main(base_model: str, steps: int) -> None:
    """Train in two halves, the second from a checkpoint with its optimizer."""
    service = tinker.ServiceClient()
    training = service.create_lora_training_client(base_model=base_model, rank=16, seed=1).result()
    tokenizer = training.get_tokenizer()
    lines = [tokenizer.encode(line + "\n") for line in LINES]
    data = [datum(ids) for ids in lines]
    for half in range(2):
        for _ in range(steps // 2):
            passed = training.forward_backward(data, "cross_entropy")
            training.optim_step(types.AdamParams(learning_rate=3e-3)).result()
            tokens = sum(len(ids) - 1 for ids in lines)
            print(f"loss {passed.result().metrics['loss:sum'] / tokens:.3f}")
        path = training.save_state(f"half-{half}").result().path
        training = service.create_training_client_from_state_with_optimizer(path).result()
    sampler = training.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(lines[0][:3])
    params = types.SamplingParams(max_tokens=32, temperature=0.0, stop=["\n"])
    [said] = sampler.sample(prompt, 1, params).result().sequences
    print(repr(tokenizer.decode([*lines[0][:3], *said.tokens])))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
