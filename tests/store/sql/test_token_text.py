"""What a token says, in SQL: by the tokenizer of its run, where that is here, and at no cost for others."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from rollbook import store as rb
from rollbook.store import Event, Store
from rollbook.store.errors import ModelError
from rollbook.store.events import RunOpened, TrajectoryOpened, TurnCompleted, TurnRequested, token_ids
from rollbook.store.events.training import CheckpointWritten
from rollbook.store.fold.trajectory import prompt_sha256
from rollbook.store.sql.vocabularies import Vocabularies

TEXTS = "select text from tokens order by position"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Byte-level BPE, in which a letter with an accent is two tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, special_tokens=["<|end|>"])
    bpe.train_from_iterator(["hello there"] * 9, trainer)
    return bpe


@pytest.fixture
def model(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    """A model directory of it."""
    folder = tmp_path / "model"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def _digest(model: Path) -> str:
    return hashlib.sha256((model / "tokenizer.json").read_bytes()).hexdigest()


def _sampled(run: str, ids: list[int]) -> list[Event]:
    nothing, names = token_ids([]), (f"id-{run}", f"{run}-1")
    requested = TurnRequested(*names, "r", None, "first_turn", None, 0, [], {}, "m", {}, {}, "key")
    done = TurnCompleted(
        *(*names, None, None, nothing, token_ids(ids), None, (), 0, prompt_sha256(nothing), "stop"),
        *({"role": "assistant", "content": "?"}, {"kind": "none"}, [], {}),
    )
    return [Event(record, run) for record in (TrajectoryOpened(names[0], "t"), requested, done)]


def _write(store: Store, *events: Event) -> None:
    with store.writer("serve") as writer:
        writer.append(list(events)).result(30)


def _opened(model: Path, digest: str | None = None) -> Event:
    return Event(RunOpened("serve", {}, str(model), digest or _digest(model)), "demo")


def _checkpoint(store: Store, run: str, tokenizer: Tokenizer) -> Event:
    path = f"checkpoints/{run}/actor/v00000001"
    (store.path / path).mkdir(parents=True)
    tokenizer.save(str(store.path / path / "tokenizer.json"))
    return Event(CheckpointWritten("actor", 1, path, "w", None, None, 9), run)


def _texts(store: Store, query: str = TEXTS, **options: Any) -> list[Any]:
    with rb.connect(store.path, **options) as connection:
        return [text for (text,) in connection.execute(query).fetchall()]


def test_the_checkpoints_of_a_run_have_its_tokenizer(store: Store, tokenizer: Tokenizer) -> None:
    """Spaces stay, parts of characters are bytes, what is no token of it is null; cursors say it too."""
    ids = [*tokenizer.encode("hello there é\n<|end|>").ids, 99_999, -1]
    _write(store, _checkpoint(store, "demo", tokenizer), *_sampled("demo", ids))
    expected = ["hello", " there", " ", "\\xc3", "\\xa9", "\n", "<|end|>", None, None]
    assert _texts(store) == expected
    assert _texts(store, "select text from tokens where text like '%hell%'") == ["hello"]
    assert _texts(store, "select token_text('demo', null) union all select token_text(null, 1)") == [None] * 2
    with rb.connect(store.path) as connection:
        cursor = connection.cursor()
        assert cursor.execute("select count(text), count(*) from tokens").fetchall() == [(7, 9)]


def test_each_run_has_its_own(store: Store, tokenizer: Tokenizer) -> None:
    """One query over runs of different tokenizers, and one of which none is known."""
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, "a"))
    of_demo = tokenizer.encode("there").ids
    _write(
        store,
        *(_checkpoint(store, "demo", tokenizer), _checkpoint(store, "words", words)),
        *(*_sampled("demo", of_demo * 3000), *_sampled("words", [1, 0]), *_sampled("other", [0])),
    )
    text = "".join(tokenizer.id_to_token(i) for i in of_demo)
    assert text == "there"
    query = "select string_agg(text, '|' order by position) from tokens where run = '{}'"
    assert _texts(store, query.format("words")) == [" b| a"]
    assert _texts(store, query.format("other")) == [None]
    assert _texts(store, "select count(*) from tokens where text is null") == [1]
    assert _texts(store, query.format("demo").replace("'|'", "''")) == ["there" * 3000]


def test_a_model_that_is_named(store: Store, model: Path) -> None:
    """It is taken where it is the run's by its digest, or nothing says which that is."""
    _write(store, _opened(model), *_sampled("demo", [0]), *_sampled("imported", [0]))
    query = "select run || ' ' || coalesce(text, 'null') from tokens order by run"
    assert _texts(store, query) == ["demo null", "imported null"]
    assert _texts(store, query, model=model) == ["demo <|end|>", "imported <|end|>"]
    _write(store, _opened(model, "another"))
    assert _texts(store, query, model=model) == ["demo null", "imported <|end|>"]
    with pytest.raises(ModelError, match=r"holds no tokenizer\.json; give the directory of a model"):
        rb.connect(store.path, model=store.path)


def test_a_folder_that_the_log_names_is_only_a_wish(
    store: Store, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who reads the store has to name it as well; what is damaged or another file says nothing."""
    _write(store, _opened(model), *_sampled("demo", [0]))
    assert _texts(store) == [None]
    monkeypatch.setenv("ROLLBOOK_ALLOW", str(model))
    assert _texts(store) == ["<|end|>"]
    (model / "tokenizer.json").write_text("{")
    assert _texts(store) == [None]
    _write(store, _opened(model))
    assert _texts(store) == [None]


def test_who_does_not_ask_does_not_pay(store: Store, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other columns, and rows that are not there, read no tokenizer."""
    _write(store, _opened(model), *_sampled("demo", [0]))

    def asked(self: Any, runs: Any, ids: Any) -> Any:
        raise AssertionError("the text was asked for")

    monkeypatch.setattr(Vocabularies, "say", asked)
    for query in ("select count(*)", "select * exclude text", "select max(token_id)", "select text"):
        where = " where position > 7" if query == "select text" else ""
        assert rb.connect(store.path).execute(f"{query} from tokens{where}").fetchall() is not None
    with pytest.raises(Exception, match="the text was asked for"):
        _texts(store)


def test_transformers_is_never_imported(
    store: Store, model: Path, run_python: Callable[..., tuple[int, str, str]]
) -> None:
    """Not by asking for text either; the tokenizers' own library is, and only then."""
    _write(store, _opened(model), *_sampled("demo", [0]))
    code = f"""
import sys
from rollbook import store
with store.connect({str(store.path)!r}, model={str(model)!r}) as connection:
    for query in ("select count(*) from tokens", "select text from tokens"):
        rows = connection.execute(query).fetchall()
        print(rows, sorted({{"tokenizers", "transformers"}} & set(sys.modules)))
"""
    status, out, err = run_python(code)
    assert (status, err) == (0, "")
    assert out.splitlines() == ["[(1,)] []", "[('<|end|>',)] ['tokenizers']"]
