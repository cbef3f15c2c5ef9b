"""Opens model directories that were spoiled at random, one after the other, under limits of memory and time.

    python open_folders.py MODEL SCRATCH FIRST COUNT [weights]

Each is opened as `rollbook serve` does, and with `weights` loaded as the embedded engine does. Only errors of
Rollbook's own tree may come. The number of the case is printed before it begins: what ends the process, or
does not end, is named by the last one.
"""

from __future__ import annotations

import faulthandler
import json
import random
import resource
import shutil
import struct
import sys
import traceback
from pathlib import Path
from typing import Any

from rollbook.ingest.replies.choose import AUTO, choose_family
from rollbook.ingest.tokens import sandbox
from rollbook.ingest.tokens.bridge import Bridges
from rollbook.ingest.tokens.chat_template import load_chat_tokenizer
from rollbook.store.errors import RollbookError

MEMORY, CASE_S = 6 << 30, 30
ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 2**31, 2**63, 2**64, 1.5, "", "x", "\0", "../../etc/passwd", [], {}, [[]]),
    *(["x"] * 300, {"a": {"b": 1}}, "a" * 100_000, "\ud7ff", "{{ 1 / 0 }}", -(2**31), 1e308),
)
TEMPLATES = (
    *("{{ 1 / 0 }}", "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"),
    *(
        "{{ 'a' * 10 ** 10 }}",
        "{{ messages[9].content }}",
        "{{ messages.x.y }}",
        "{% include 'x' %}",
        "{% extends a %}",
    ),
    *(
        "{% import 'os' as os %}",
        "{{ 10 ** 400 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ raise_exception(1) }}",
    ),
    *(
        "{% for a in messages %}" * 30 + "{% endfor %}" * 30,
        "(" * 5_000,
        "{{" + "(" * 5_000 + ")" * 5_000 + "}}",
    ),
    *(
        "{{ strftime_now(1) }}",
        "{{ strftime_now('%' * 99999) }}",
        "{{ tools[0] }}{{ messages | tojson(indent=10**9) }}",
        "\udcff",
    ),
    "{% set x = 'aa' %}" + "{% set x = x ~ x %}" * 60,
)
FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "config.json",
    "generation_config.json",
    "chat_template.jinja",
)
CONVERSATION = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "What is 3 + 4? \ud7ff \U0001f600"},
]


def main() -> None:
    """Spoil, open, and say how it went."""
    model, scratch = Path(sys.argv[1]), Path(sys.argv[2])
    first, count, weights = int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:] == ["weights"]
    if weights:
        import rollbook.engines.embedded.engine  # noqa: F401  (imported before the limit)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    sandbox.RENDER_S = 0.5
    refused = 0
    for number in range(first, first + count):
        print(number, flush=True)
        faulthandler.dump_traceback_later(CASE_S, exit=True)
        folder = scratch / str(number)
        shutil.copytree(model, folder)
        spoil(folder, random.Random(number), weights)
        try:
            opened(folder, weights)
        except RollbookError as error:
            refused += bool(str(error))
        except BaseException:
            traceback.print_exc()
            print(f"case {number} is no error of Rollbook's", flush=True)
            sys.exit(1)
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{refused} of {count} were refused")


def opened(folder: Path, weights: bool) -> None:
    """What serving does with a directory."""
    tokenizer = load_chat_tokenizer(folder)
    choose_family(AUTO, folder, tokenizer.template_source)
    Bridges.tested(tokenizer)
    ids = tokenizer.encode(tokenizer.render(CONVERSATION, None, generate=True))
    tokenizer.decode(ids)
    tokenizer.reply_text(ids, ())
    if weights:
        from rollbook.engines.embedded.engine import _loaded
        from rollbook.engines.weights.digests import read_unchanged

        read_unchanged(folder)
        _loaded(folder, "cpu")


def spoil(folder: Path, rng: random.Random, weights: bool) -> None:
    """One file of the directory, in one of many ways."""
    if weights:
        name = rng.choice(("model.safetensors", "config.json", "index"))
        if name == "index":
            return _index(folder, rng)
        if name == "model.safetensors":
            return _tensors(folder / name, rng)
    else:
        name = rng.choice(FILES)
    file = folder / name
    ways = (
        [_bytes, _bytes, _cut, _deep, _kind]
        if name.endswith(".jinja")
        else [_json] * 6 + [_bytes, _cut, _deep, _kind]
    )
    if name.endswith(".jinja") and rng.random() < 0.7:
        file.write_text(rng.choice(TEMPLATES), encoding="utf-8", errors="surrogateescape")
        return None
    return rng.choice(ways)(file, rng)


def _bytes(file: Path, rng: random.Random) -> None:
    data = bytearray(file.read_bytes())
    for _ in range(rng.randint(1, 20)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    file.write_bytes(data)


def _cut(file: Path, rng: random.Random) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: rng.randrange(len(data))])


def _deep(file: Path, rng: random.Random) -> None:
    depth = rng.choice((200, 5_000, 200_000))
    file.write_text('{"a":' * depth + "1" + "}" * depth if rng.random() < 0.5 else "[" * depth)


def _kind(file: Path, rng: random.Random) -> None:
    """Something else than a file of its own."""
    file.unlink()
    way = rng.randrange(4)
    if way == 0:
        file.mkdir()
    elif way == 1:
        file.symlink_to(rng.choice(("/etc/passwd", "/dev/zero", file.name, "../x", "/proc/self/mem")))
    elif way == 2:
        import os

        os.mkfifo(file)


def _places(value: Any) -> list[tuple[Any, Any]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    places = []
    for key, part in inner:
        places.append((value, key))
        places += _places(part)
    return places


def _json(file: Path, rng: random.Random) -> None:
    value = json.loads(file.read_bytes())
    for _ in range(rng.randint(1, 3)):
        places = _places(value)
        if not places:
            break
        # A vocabulary has hundreds of places and the rest a few: each kind is to have its turn.
        shallow = [place for place in places if not isinstance(place[0][place[1]], int)] or places
        holder, key = rng.choice(shallow if rng.random() < 0.8 else places)
        if rng.random() < 0.2 and isinstance(holder, dict):
            del holder[key]
        else:
            holder[key] = rng.choice(ODD)
    file.write_text(json.dumps(value), encoding="utf-8", errors="surrogatepass")


def _tensors(file: Path, rng: random.Random) -> None:
    """The header of a safetensors file, or its bytes."""
    data = file.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header, rest = json.loads(data[8 : 8 + size]), data[8 + size :]
    way = rng.randrange(6)
    if way == 0:
        return _bytes(file, rng)
    if way == 1:
        return _cut(file, rng)
    if way == 2:
        file.write_bytes(struct.pack("<Q", rng.choice((0, 2**63, 2**40, size - 1))) + data[8:])
        return None
    if way == 3:
        return _kind(file, rng)
    names = [name for name in header if name != "__metadata__"]
    entry = header[rng.choice(names)]
    key = rng.choice(("dtype", "shape", "data_offsets"))
    entry[key] = rng.choice(
        ("F64", "I8", "BOOL", "F8_E4M3", [2**62, 2], [-1], [0], [1, 2**40], [10, 5], *ODD)
    )
    if way == 5:
        header[rng.choice(("x" * 100_000, "", names[0] + ".x", "\0"))] = entry
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    file.write_bytes(struct.pack("<Q", len(text)) + text + rest)
    return None


def _index(folder: Path, rng: random.Random) -> None:
    name = rng.choice(
        ("../other.safetensors", "/etc/passwd", "pytorch_model.bin", "model.safetensors", 7, "\0", "")
    )
    folder.joinpath("model.safetensors.index.json").write_text(
        json.dumps({"weight_map": rng.choice(({"a": name}, [name], name))})
    )
    if rng.random() < 0.5:
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


if __name__ == "__main__":
    main()
