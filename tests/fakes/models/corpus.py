"""Real chat templates and a real tokenizer, read as files out of the packages that tests/corpus.txt names."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from rollbook.ingest.tokens.chat_template import ChatTokenizer, compile_template
from rollbook.ingest.tokens.template_traits import probed
from rollbook.ingest.tokens.text_encoder import TextEncoder

FIRST_ADDED = 151643
"""Qwen3's control tokens and markers begin here, in this order; the ranks of its BPE end before."""

CONTROL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"),
    *("<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
MARKERS = (
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    *("<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
)

WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen's tokenizer cuts a text before its BPE."""

# Where the turns of a template's families end: the tokens that a model of it stops with, the usual one first.
ENDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("qwen", "lfm2", "nemotron"), ("<|im_end|>", "<|endoftext|>")),
    "cohere": ("<|END_OF_TURN_TOKEN|>",),
    "deepseek": ("<｜end▁of▁sentence｜>",),
    "gemma4": ("<turn|>", "<|tool_response>"),
    "diffusion_gemma": ("<turn|>", "<|tool_response>"),
    "gemma": ("<end_of_turn>",),
    "glm": ("<|observation|>", "<|user|>", "<|endoftext|>"),
    "gptoss": ("<|call|>", "<|return|>"),
    "idefics": ("<end_of_utterance>",),
    "smolvlm": ("<end_of_utterance>",),
    "llama": ("<|eot_id|>", "<|eom_id|>"),
    "llava": ("</s>",),
    "mistral": ("</s>",),
    "muse": ("<|eot|>", "<|eom|>"),
    "phi3": ("<|end|>", "<|endoftext|>"),
}

STARTS = (
    *(
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<start_of_turn>",
        "<|turn>",
        "<|tool_call>",
        "<tool_call|>",
    ),
    *("<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|assistant|>"),
    *("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    *("<|start|>", "<|message|>", "<|channel|>", "<｜User｜>", "<｜Assistant｜>", "<|system|>", "<bos>"),
)


def qwen_tokenizer(folder: Path) -> Tokenizer:
    """Qwen3's tokenizer, made from the ranks of its BPE; `folder` keeps it for the next time."""
    ranks_file = _package("dashscope") / "resources" / "qwen.tiktoken"
    raw = ranks_file.read_bytes()
    kept = folder / f"{hashlib.sha256(raw + Path(__file__).read_bytes()).hexdigest()[:16]}.json"
    if not kept.exists():
        part = kept.with_suffix(f".{id(raw)}.part")
        _from_ranks({base64.b64decode(a): int(b) for a, b in map(bytes.split, raw.splitlines())}).save(
            str(part)
        )
        part.replace(kept)
    return Tokenizer.from_file(str(kept))


def _package(name: str) -> Path:
    """The folder of a package that is not imported."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        pytest.skip(f"pip install --no-deps -r tests/corpus.txt brings {name}")
    return Path(spec.origin).parent


def _from_ranks(ranks: dict[bytes, int]) -> Tokenizer:
    letters = _byte_letters()
    names = {token: "".join(letters[b] for b in token) for token in ranks}
    merges = [tuple(names[part] for part in _halves(t, ranks)) for t in ranks if len(t) > 1]
    vocabulary = {names[token]: rank for token, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.normalizer = normalizers.NFC()
    cut = pre_tokenizers.Split(Regex(WORDS), "isolated")
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, spell])
    tokenizer.decoder = decoders.ByteLevel()
    plain = [AddedToken(t, special=False, normalized=False) for t in MARKERS]
    other = dict.fromkeys([*(end for ends in ENDS.values() for end in ends), *STARTS])
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROL])
    tokenizer.add_tokens(plain)
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in other if t not in CONTROL]
    )
    return tokenizer


def _byte_letters() -> dict[int, str]:
    """The letter that byte-level BPE writes each byte as."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {b: chr(b) for b in shown}
    return letters | {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in letters)}


def _halves(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """The two tokens that were merged into this one: what merges of lower rank leave of its bytes."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [(ranks.get(a + b, len(ranks)), i) for i, (a, b) in enumerate(pairwise(parts))]
        rank, at = min(pairs)
        assert rank < ranks[token], token
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def chat_templates() -> dict[str, str]:
    """Sources of the real chat templates, by file name without its suffix."""
    folder = _package("trl") / "chat_templates"
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.jinja"))}


def ends_of(name: str) -> tuple[str, ...]:
    """The end-of-turn tokens of the family that a template is of."""
    return ENDS[max((family for family in ENDS if name.startswith(family)), key=len)]


def real_chat_tokenizer(tokenizer: Tokenizer, name: str, source: str) -> ChatTokenizer:
    """A template of the corpus over the tokenizer, as `load_chat_tokenizer` would give it.

    That reads the tokenizer anew for each of them, which takes a while.
    """
    special = {"bos_token": "<bos>", "eos_token": "<|endoftext|>"}
    template = compile_template(source)
    return ChatTokenizer(
        encoder=TextEncoder(tokenizer),
        template=template,
        special_tokens=special,
        stop_ids=tuple(tokenizer.token_to_id(end) for end in ends_of(name)),
        context_length=40960,
        traits=probed(template, source, special),
        tokenizer_digest="qwen",
        template_digest=hashlib.sha256(source.encode()).hexdigest(),
        template_source=source,
        special={i: t.content for i, t in tokenizer.get_added_tokens_decoder().items() if t.special},
        vocabulary=tokenizer.get_vocab_size(with_added_tokens=True),
    )
