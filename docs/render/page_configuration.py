"""`docs/configuration.md`, rendered from the typed settings by `docs/render/page_configuration.py`."""

from __future__ import annotations

from collections.abc import Iterator

from key_tables import HEAD, cell, rows

from rollbook.train.algorithms.policy_gradient import GroupPolicyGradient
from rollbook.train.algorithms.registry import PolicyGradient
from rollbook.train.config.config import TABLES, TrainConfig
from rollbook.train.config.files import header

INTRODUCTION = """# Configuration of a training

<!-- Generated: python docs/render/page_configuration.py > docs/configuration.md -->

`rollbook train CONFIG` reads a TOML file with the keys below; those of the first table stand at its top.
Three are required: `model`, `steps` and the `name` of the `[algorithm]`. `--set table.key=value` overrules
the file. An unknown key, or a value of another type, is an error that names all such keys. `--show-config`
prints what holds, defaults included, as a CONFIG of its own:

```bash
rollbook train configs/sft.toml --store demo-store --set optimizer.lr=3e-4 --show-config
```

A restart goes on with a training as long as nothing changes that decides its course: `steps`,
`checkpoint_every`, `threads`, `device`, `engine_gap_alarm`, `idle_timeout_s`, `model`, `[admission]`,
`[checkpoint]`, `[sync]`, `[evaluation]` and `[[stop]]` may change, and a key that is left out is the same as
one that says its default. Any other change begins a new training in the same run, from the run's newest
weights and with a new optimizer.
"""


def render() -> str:
    """The whole page as Markdown."""
    return "\n".join([INTRODUCTION, *_sections()])


def _sections() -> Iterator[str]:
    composed = set(rows(PolicyGradient))
    for table, kinds in TABLES.items():
        for kind, model in kinds.items():
            title = header(table) if table else "Top of the file"
            title = f'{title}, name = "{kind}"' if kind else title
            about = "" if model is TrainConfig else f"{cell(model.__doc__ or '')}\n\n"
            lines = "\n".join(rows(model))
            if issubclass(model, GroupPolicyGradient) and model is not PolicyGradient:
                about += 'Its keys are those of `name = "policy_gradient"`. Other defaults:\n\n'
                lines = "\n".join(row for row in rows(model) if row not in composed)
            yield f"## {title}\n\n{about}{HEAD}\n{lines}\n"


if __name__ == "__main__":
    print(render(), end="")
