"""`docs/sql.md`, rendered from the views: `python docs/render/page_sql.py`. Pure."""

from __future__ import annotations

from rollbook.store.sql.columns import View
from rollbook.store.sql.views import VIEWS
from rollbook.viewer.examples import EXAMPLES, Example

INTRODUCTION = """# SQL over the log

<!-- Generated: python docs/render/page_sql.py > docs/sql.md -->

`rollbook sql "..." --store DIR` asks the log in DuckDB's SQL; `rollbook.store.connect(DIR)` gives Python a
DuckDB connection with the same views. Both see what was durable when they connected, and only read: the
processes that write are not disturbed. `--as-of` (Python: `as_of=`) takes an earlier cut:
`lane=count,lane=count`, or `step:N` for what step N was planned on; all views then say what was known then.

```bash
rollbook sql "select trajectory, reward from trajectories limit 5" --store demo-store
rollbook sql "select count(*) as n from events" --store demo-store --as-of step:3 --format json
```

A query reads the store and reaches nothing else: it opens no other file, writes none (`COPY`, `EXPORT` and
`ATTACH` are refused), loads no extension, asks no host, and throws no switch but `threads`, `timezone` and a
few that order rows. So a query may come from somebody else, or from a model. Tables, macros and variables of
its own are in memory, and go with the connection. To join files of yours, or to write some, say so:
`--allow-files` (Python: `allow_files=True`).

```bash
rollbook sql "copy (select trajectory, reward from trajectories) to 'r.csv'" --store demo-store --allow-files
```

What does not fit into memory is put into a folder in `TMPDIR` that only its owner may enter, up to half of
what is free there. In Python, `connection.raw` is DuckDB's own connection, for a library that asks for one;
`COPY` is not refused there.

`show tables` lists the views below, `describe turns` the columns of one. What the views read is in the schema
`internal`, whose names and columns may change in any release.

```bash
rollbook sql "show tables" --store demo-store
```

`tokens.text` is what a token says. Only where it is asked for a `tokenizer.json` is read: that of the model
directory which `--model` names (Python: `model=`), else that of the run's newest checkpoint in the store,
else that of the directory `rollbook serve` was given, where `ROLLBOOK_ALLOW` names it too. It is null where
there is none, and where it is not the run's by its sha256. Of a token that holds a part of a character it has
the bytes, as in `\\xe2\\x82`. `token_text(run, id)` says it of any id, such as a prompt's.

```bash
rollbook sql "select text, count(*) from tokens group by text" --store demo-store --model model
```

A query reads of `turns` the columns that it names: `turn_id`, `status`, versions, lengths, times and other
numbers are kept ready, texts and tokens are read from the events. One for at most a thousand turns, by a
limit or by a condition on what is kept ready or on the trajectory's name, reads the texts and tokens of those
alone. `explain` shows a query as it is run, but for that.

Times are UTC. A JSON column is taken apart with `->>'$.key'`. Lists count from 1, but token positions,
steps and versions from 0. No view is stored: each is a query over `events`.
"""

EXAMPLES_INTRODUCTION = """## Questions

Each stands as it can be run. Where a store holds several runs, add `where run = '...'`.
"""


def render() -> str:
    """The whole page as Markdown."""
    parts = [INTRODUCTION, "## Views\n", *map(_view, VIEWS)]
    return "\n".join([*parts, EXAMPLES_INTRODUCTION, *map(_example, EXAMPLES)])


def _view(view: View) -> str:
    rows = [f"| `{c.name}` | `{_cell(c.type)}` | {_cell(c.doc)} |" for c in view.columns]
    return "\n".join(
        [f"### `{view.name}`\n", f"{view.doc}\n", "| column | type | meaning |", "|---|---|---|", *rows, ""]
    )


def _example(example: Example) -> str:
    return "\n".join([f"### {example.question}\n", f"{example.doc}\n", "```sql", example.sql, "```", ""])


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


if __name__ == "__main__":
    print(render(), end="")
