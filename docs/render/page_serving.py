"""`docs/serving.md`, rendered from the typed settings by `docs/render/page_serving.py`."""

from __future__ import annotations

from key_tables import HEAD, rows

from rollbook.ingest.settings import SECRETS, ServeSettings

INTRODUCTION = """# Settings of the proxy

<!-- Generated: python docs/render/page_serving.py > docs/serving.md -->

`rollbook serve` takes its settings as options, from a TOML file, or both. Options overrule the file, and so
does `ROLLBOOK_STORE`:

```bash
rollbook serve serve.toml --port 8001
```

A key of the file is an option's name with `_` for `-`; an option that may be given several times is a list.
An unknown key, or a value of another type, is an error that names all such keys. Paths are relative to where
the command runs. `--show-config` prints what holds, defaults included, as a file of its own, and serves
nothing. A file:

```toml
store = "runs"
model = "my-model"
engine = "sglang"
engine_url = ["http://127.0.0.1:30000"]
keys = "keys.toml"
max_running = 1024
```
"""


def render() -> str:
    """The whole page as Markdown."""
    secrets = "\n".join(f"| `{name}` | {remedy} |" for name, remedy in SECRETS.items())
    return "\n".join(
        [
            INTRODUCTION,
            f"## Keys\n\n{HEAD}",
            *rows(ServeSettings, ()),
            "\n## Secrets\n\nThey are never in the file, nor is a login in `engine_url`:\n",
            f"| option | instead |\n|---|---|\n{secrets}\n",
        ]
    )


if __name__ == "__main__":
    print(render(), end="")
