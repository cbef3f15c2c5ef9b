"""Tiny models of random weights that see images, with their tokenizer and the settings of their image
processor: of each kind one, made once a session."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tests.fakes.stories import fabric

from rollbook.engines.vision.sizes import token_count
from rollbook.train.batches.batch import MicroBatch
from rollbook.train.batches.images import Picture, collate_images
from rollbook.train.model.shape import read_shape

KINDS = ("qwen2_5_vl", "qwen3_vl")
CLASSES = {"qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}
"""What transformers calls their classes, without the end of the names."""
SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
IDS = {token: 256 + at for at, token in enumerate(SPECIAL)}
"""Behind the 256 bytes."""
IMAGE = IDS["<|image_pad|>"]
TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.content is string %}{{- message.content }}{%- else %}{%- for part in message.content %}"
    "{%- if part.type == 'image' or 'image' in part or 'image_url' in part %}"
    "{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- elif 'text' in part %}{{- part.text }}{%- endif %}{%- endfor %}{%- endif %}"
    "{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
LIMITS = {
    "qwen2_5_vl": {"shortest_edge": 3136, "longest_edge": 28 * 28 * 64},
    "qwen3_vl": {"shortest_edge": 4096, "longest_edge": 32 * 32 * 64},
}


@functools.cache
def sighted_folder(kind: str, *, tied: bool | None = None) -> Path:
    """The folder of a model; Qwen3-VL's output is its embedding, that of Qwen2.5-VL is not, unless `tied`
    says so."""
    folder = fabric.scratch() / f"{kind}-{tied}"
    make_sighted(folder, kind, tied=kind == "qwen3_vl" if tied is None else tied)
    return folder


@functools.cache
def sighted_model(kind: str, *, tied: bool | None = None) -> Any:
    """The same in transformers. Its gradients are whoever's used it last."""
    import transformers

    name = f"{CLASSES[kind]}ForConditionalGeneration"
    return getattr(transformers, name).from_pretrained(sighted_folder(kind, tied=tied)).eval()


def make_sighted(folder: Path, kind: str, *, tied: bool, seed: int = 0) -> None:
    """Write a model whose every weight is random, and so large that images, places and deep features move its
    logits."""
    import torch
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(seed)
    model = getattr(transformers, f"{CLASSES[kind]}ForConditionalGeneration")(sighted_config(kind, tied=tied))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and name.endswith("weight"):  # of norms
                parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
            else:
                parameter.normal_(0, 0.15 if "embed" in name or "lm_head" in name else 0.1)
    model.save_pretrained(folder)
    _write_processors(folder, kind)


def sighted_config(kind: str, *, tied: bool) -> Any:
    """Three layers, 200,000 to 300,000 weights; a tower of two or three layers, of which some attend without
    windows, or have deep features."""
    import transformers

    tokens = {f"{what}_token_id": IDS[f"<|{what}_pad|>"] for what in ("image", "video")}
    tokens |= {f"vision_{end}_token_id": IDS[f"<|vision_{end}|>"] for end in ("start", "end")}
    text: dict[str, Any] = {
        "vocab_size": 256 + len(SPECIAL),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "eos_token_id": IDS["<|im_end|>"],
        "tie_word_embeddings": tied,
    }
    tower: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 64,
    }
    rope: dict[str, Any] = {"rope_type": "default"}
    if kind == "qwen2_5_vl":
        tower |= {"depth": 2, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]}
        rope |= {"rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    else:
        tower |= {
            "depth": 3,
            "patch_size": 16,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        }
        rope |= {"rope_theta": 5e6, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
        text |= {"head_dim": 16}
    config = getattr(transformers, f"{CLASSES[kind]}Config")
    return config(
        **tokens, tie_word_embeddings=tied, text_config=text | {"rope_parameters": rope}, vision_config=tower
    )


def _write_processors(folder: Path, kind: str) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
        extra_special_tokens={"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
    ).save_pretrained(folder)
    of_images: dict[str, Any] = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 14 if kind == "qwen2_5_vl" else 16,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": LIMITS[kind],
        "resample": 3,
    }
    if kind == "qwen3_vl":
        of_images |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    processors = {"image_processor": of_images, "processor_class": f"{CLASSES[kind]}Processor"}
    (folder / "processor_config.json").write_text(json.dumps(processors, indent=2))


# What they see -----------------------------------------------------------------------------------------

IMAGES = (2, 0, 1, 3)
"""Of each sample: several, none, one."""


@dataclass(frozen=True)
class SightedSample:
    """Tokens, and the images among them."""

    tokens: npt.NDArray[np.int64]
    pictures: tuple[Picture, ...]


def sighted_samples(kind: str, counts: Sequence[int] = IMAGES, *, seed: int = 5) -> list[SightedSample]:
    """Random text around random images; the last image of a sample is the first of the first sample."""
    rng = np.random.default_rng(seed)
    columns = read_shape(sighted_folder(kind)).vision.columns  # type: ignore[union-attr]
    shared, samples = None, []
    for count in counts:
        tokens: list[int] = []
        pictures: list[Picture] = []
        for number in range(count):
            tokens += rng.integers(0, 256, rng.integers(2, 7)).tolist()
            grid = (1, *(2 * rng.integers(1, 5, 2)).tolist())
            patches = rng.standard_normal((grid[1] * grid[2], columns)).astype(np.float32)
            picture = Picture(len(tokens), grid, f"{len(samples)}.{number}", patches)  # type: ignore[arg-type]
            if shared is not None and number == count - 1:
                picture = replace(shared, start=len(tokens))
            shared = shared or picture
            pictures.append(picture)
            tokens += [IMAGE] * token_count(picture.grid, 2)
        tokens += rng.integers(0, 256, rng.integers(3, 9)).tolist()
        samples.append(SightedSample(np.array(tokens), tuple(pictures)))
    return samples


def sighted_micro(samples: Sequence[SightedSample], *, packed: bool) -> MicroBatch:
    """The samples as one micro-batch; all tokens but the first are trained."""
    lengths = np.array([len(sample.tokens) for sample in samples])
    shape = (len(samples), int(lengths.max()))
    tokens, mask = np.zeros(shape, np.int64), np.arange(shape[1]) < lengths[:, None]
    for row, sample in enumerate(samples):
        tokens[row, : len(sample.tokens)] = sample.tokens
    mask[:, 0] = False
    zeros, ones = np.zeros(shape, np.float32), np.ones(shape, np.float32)
    images = collate_images([s.pictures for s in samples], [s.tokens for s in samples], 2, IMAGE)
    return MicroBatch(
        *(tokens, mask, zeros, ones, ones, np.zeros(shape, np.int64)),
        lengths=lengths if packed else None,
        images=images,
    )
