"""Which extra of the package a command needs, of which a base install has none. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

OF_COMMANDS: Mapping[str, str] = {
    **dict.fromkeys(("train", "replay", "score", "preflight", "run", "bench"), "train"),
    "demo": "demo",
}
"""Command -> the extra that has all it needs; others need one for what they are asked to do."""
OF_MODULES: Mapping[str, str] = {
    **dict.fromkeys(("torch", "transformers", "safetensors"), "engine"),
    **dict.fromkeys(("megatron", "psutil", "tensorboard"), "train"),
    **{"matplotlib": "plot", "openai": "demo", "ray": "ray", "fsspec": "s3", "psycopg": "postgres"},
}
"""Module -> the smallest extra that brings it."""
INCLUDED: Mapping[str, frozenset[str]] = {
    "train": frozenset({"engine"}),
    "ray": frozenset({"engine", "train"}),
    "demo": frozenset({"engine", "train", "plot"}),
}
"""Extra -> those that it brings along."""


def missing_extra(module: str | None, words: Sequence[str]) -> str | None:
    """What is said of a module that is missing, None of one that no extra brings.

    Args:
        words: of the command line, without the program's name.
    """
    of_module = OF_MODULES.get((module or "").partition(".")[0])
    if of_module is None:
        return None
    command = next((word for word in words if not word.startswith("-")), "")
    of_command = OF_COMMANDS.get(command, of_module)
    extra = of_command if of_module in INCLUDED.get(of_command, ()) else of_module
    what = f"`rollbook {command}`" if command else "this command"
    return f"{what} needs {module}, which is not installed: pip install 'rollbook[{extra}]'"
