"""Export for Hugging Face datasets: the real library reads the folder, offline, with types and values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow.parquet as pq
import pytest

from rollbook.store import Store
from rollbook.store.errors import InterchangeError
from rollbook.store.interchange import export
from rollbook.store.interchange.export import ROWS, export_store, text_of


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Export a store and read the folder with `datasets.load_dataset`: split -> dataset."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    count = 0

    def export(store: Store, **options: Any) -> Any:
        import datasets

        nonlocal count
        count += 1
        out = tmp_path / f"dataset-{count}"
        export_store(store.path, out, "datasets", **options)
        assert not list(out.rglob("*.partial"))
        return datasets.load_dataset(str(out), cache_dir=str(tmp_path / f"cache-{count}"))

    return export


def test_load_dataset_reads_it(woods: Store, load: Callable[..., Any]) -> None:
    """A split for each of ours; every column with its type; values of a forked trajectory."""
    read = load(woods)
    assert {name: len(split) for name, split in read.items()} == {"train": 3, "teacher": 1}
    train = read["train"]
    assert train.column_names == ROWS.names
    row = next(r for r in train if r["trajectory"] == "fork/ü" and r["loss_mask"][3])
    assert (row["reward"], row["success"], row["status"], row["run"]) == (-2.5, False, "truncated", "woods")
    assert row["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "naïve 文字 🙂"},
        {"role": "assistant", "content": None},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "42 ✓"},
    ]
    sent = orjson.loads(row["messages_json"])
    assert sent[-1] == {"role": "assistant", "content": "42 ✓"}
    assert sent[1]["content"][0] == {"type": "text", "text": "naïve "}
    assert sent[2]["tool_calls"][0]["function"]["arguments"] == '{"q": "é✓"}'
    assert orjson.loads(row["tools"])[0]["function"]["name"] == "look_up"
    assert orjson.loads(row["labels"]) == {"k": ["v", 1]}
    assert row["input_ids"] == [1, 2, 3, 10, 11, 12, 4, 13]
    assert row["loss_mask"] == [False, False, False, True, True, True, False, True]
    assert row["versions"] == [-1, -1, -1, 3, 3, 3, -1, 3]
    assert [t["message"] for t in row["turns"]] == [2, 4]
    assert row["turns"][0]["completion_ids"] == [10, 11, 12]
    assert row["turns"][1]["version_spans"] == [{"policy": "actor", "version": 3, "start": 0, "end": 1}]


def test_arrays_are_typed_and_exact(woods: Store, load: Callable[..., Any]) -> None:
    """int32 ids, float32 logprobs with the log's bits; NaN and -1 where there is none."""
    read = load(woods, run="woods")
    features = read["train"].features
    types = [features[name].feature.dtype for name in ("input_ids", "loss_mask", "logprobs", "versions")]
    assert types == ["int32", "bool", "float32", "int32"]
    read = read.with_format("numpy")
    stored = woods.trajectories(ids=["fork"])["fork"].turns["f1"].completed
    assert stored is not None
    assert stored.logprobs is not None
    row = next(r for r in read["train"] if r["loss_mask"][3])
    assert row["logprobs"].dtype == np.float32
    assert row["logprobs"][3:6].tobytes() == stored.logprobs.tobytes()
    taught = read["teacher"][0]
    assert np.isnan(taught["logprobs"]).tolist() == [False, False, True]
    assert taught["versions"].tolist() == [-1, -1, -1]
    assert taught["loss_mask"].tolist() == [False, False, True]


def test_the_card_says_what_the_library_finds(woods: Store, load: Callable[..., Any], tmp_path: Path) -> None:
    """The front matter is YAML; its features, splits and numbers are those of the loaded data."""
    import yaml

    read = load(woods)
    text = (tmp_path / "dataset-1" / "README.md").read_text()
    matter = yaml.safe_load(text.split("---\n")[1])
    assert matter["dataset_info"]["features"] == read["train"].features._to_yaml_list()
    assert {s["name"]: s["num_examples"] for s in matter["dataset_info"]["splits"]} == {
        "train": 3,
        "teacher": 1,
    }
    files = {f["split"]: f["path"] for f in matter["configs"][0]["data_files"]}
    assert files == {"train": "data/train-*", "teacher": "data/teacher-*"}
    assert f"`{woods.store_id}`" not in text
    assert woods.store_id in text
    assert "woods-late=1" in text


def test_an_empty_store_and_a_cut(
    empty: Store, story_store: Store, load: Callable[..., Any], tmp_path: Path
) -> None:
    """A dataset without a row could not be loaded, so none is made; a cut gives what was known then."""
    for store, options, cut in (
        (empty, {}, "0 trajectories at empty"),
        (story_store, {"split": "eval"}, "1 traj"),
    ):
        with pytest.raises(
            InterchangeError, match=rf"none of the {cut}.* has a completed turn, .*use parquet$"
        ):
            load(store, **options)
    assert not list(tmp_path.glob("*dataset-*"))
    early = load(story_store, as_of="serve=5")["train"]
    assert [(r["status"], r["reward"], r["input_ids"]) for r in early] == [("open", None, [1, 2, 3, 10, 11])]


def test_a_split_is_cut_into_files(
    woods: Store, load: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that has grown large is closed; names count from 0 of as many as there are."""
    monkeypatch.setattr(export, "SHARD_BYTES", 10)
    monkeypatch.setattr(export, "GROUP_ROWS", 1)
    read = load(woods)
    names = sorted(p.name for p in (tmp_path / "dataset-1" / "data").iterdir())
    assert names == [
        "teacher-00000-of-00001.parquet",
        "train-00000-of-00003.parquet",
        "train-00001-of-00003.parquet",
        "train-00002-of-00003.parquet",
    ]
    assert len(read["train"]) == 3
    file = pq.ParquetFile(tmp_path / "dataset-1" / "data" / names[1])
    assert file.schema_arrow.equals(ROWS)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("as sent", "as sent"),
        ("", ""),
        (None, None),
        ([], None),
        ([{"type": "text", "text": "a"}, {"type": "image_url"}, {"type": "text", "text": "b"}], "ab"),
        ([{"type": "image_url", "image_url": {"url": "x"}}], None),
        ({"type": "text", "text": "one"}, "one"),
        ([1, {"text": 2}], None),
    ],
)
def test_text_of_content(content: Any, text: str | None) -> None:
    """Text as sent; text parts joined; null where there is no text, never made up."""
    assert text_of(content) == text
