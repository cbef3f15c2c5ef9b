"""A real Qwen3 tokenizer and chat template as a model directory without weights: enough to serve a script.

Both come out of packages of the clients' environment, as files: the ranks of Qwen's BPE out of dashscope,
the template out of trl.
"""

from __future__ import annotations

import base64
import itertools
import os
from pathlib import Path

import orjson
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

CONTROL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"),
    *("<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
"""Their ids follow those of the BPE, in this order."""

MARKERS = (
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    *("<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
)
"""Tokens of their own that are text all the same; they come next."""

WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How a text is cut before the BPE."""


def qwen3(folder: Path, packages: Path) -> Path:
    """The model directory, made once.

    Args:
        packages: where dashscope and trl are installed.
    """
    if folder.exists():
        return folder
    part = folder.with_name(f"{folder.name}.{os.getpid()}")
    part.mkdir(parents=True)
    _tokenizer(packages / "dashscope" / "resources" / "qwen.tiktoken").save(str(part / "tokenizer.json"))
    template = packages / "trl" / "chat_templates" / "qwen3.jinja"
    (part / "chat_template.jinja").write_bytes(template.read_bytes())
    (part / "tokenizer_config.json").write_bytes(orjson.dumps({"eos_token": "<|im_end|>"}))
    (part / "generation_config.json").write_bytes(orjson.dumps({"eos_token_id": [151645, 151643]}))
    (part / "config.json").write_bytes(orjson.dumps({"max_position_embeddings": 40960}))
    try:
        part.rename(folder)
    except OSError:  # another process was first
        assert folder.exists()
    return folder


def _tokenizer(file: Path) -> Tokenizer:
    lines = map(bytes.split, file.read_bytes().splitlines())
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    letters = _letters()
    names = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = [_halves(token, ranks) for token in ranks if len(token) > 1]
    model = models.BPE(
        vocab={names[token]: rank for token, rank in ranks.items()},
        merges=[(names[left], names[right]) for left, right in merges],
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKERS])
    assert tokenizer.encode("Hello world<|im_end|></think>").ids == [9707, 1879, 151645, 151668]
    return tokenizer


def _letters() -> dict[int, str]:
    """The letter that byte-level BPE writes each byte as."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}


def _halves(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two tokens that were merged into this one: what the merges of lower rank leave of its bytes."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = itertools.pairwise(parts)
        rank, at = min((ranks.get(left + right, len(ranks)), i) for i, (left, right) in enumerate(pairs))
        assert rank < ranks[token], token
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    left, right = parts
    return left, right
