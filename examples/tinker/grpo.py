"""GRPO on a task of one's own: to add two digits. Rewards are the loop's own; Rollbook samples and trains."""

from __future__ import annotations

import random
import sys

import tinker
from tinker import types

GROUP = 8


def rewarded(prompt: list[int], one: types.SampledSequence, advantage: float) -> types.Datum:
    """A sequence behind its prompt: what was sampled is trained, by its advantage."""
    words, before = [*prompt, *one.tokens], len(prompt) - 1
    inputs = {
        "target_tokens": words[1:],
        "logprobs": [0.0] * before + [*one.logprobs],
        "advantages": [0.0] * before + [advantage] * len(one.tokens),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(words[:-1]), loss_fn_inputs=inputs)


def main(base_model: str, steps: int) -> None:
    """Each step: two tasks, a group of sequences for each; what is better than its group becomes likelier."""
    service, draw = tinker.ServiceClient(), random.Random(1)
    training = service.create_lora_training_client(base_model=base_model, rank=16, seed=1).result()
    tokenizer = training.get_tokenizer()
    for step in range(steps):
        sampler = training.save_weights_and_get_sampling_client().result()
        data, rewards = list[types.Datum](), list[float]()
        for _ in range(2):
            a, b = draw.randrange(10), draw.randrange(10)
            prompt = tokenizer.encode(f"{a} + {b} =")
            params = types.SamplingParams(max_tokens=4, seed=1000 * step)
            sampled = sampler.sample(types.ModelInput.from_ints(prompt), GROUP, params).result().sequences
            group = [float(tokenizer.decode([*one.tokens]).strip().isdigit()) for one in sampled]
            mean = sum(group) / GROUP
            data += [rewarded(prompt, one, r - mean) for one, r in zip(sampled, group, strict=True)]
            rewards += group
        passed = training.forward_backward(data, "importance_sampling")
        training.optim_step(types.AdamParams(learning_rate=3e-3)).result()
        loss = passed.result().metrics["loss:sum"]
        print(f"step {step}: reward {sum(rewards) / len(rewards):.2f}, loss {loss:.4f}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
