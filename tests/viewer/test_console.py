"""SQL in the viewer: in the sandbox, bounded, and for itself."""

from __future__ import annotations

import io

import pyarrow.parquet
import pytest
from tests.viewer.conftest import Viewer

from rollbook.viewer import console


def test_rows_lead_to_pages(trained_view: Viewer) -> None:
    """The answer of a query, and a link where a row is about something that has a page."""
    sql = "SELECT trajectory_id, run, reward FROM trajectories ORDER BY trajectory_id LIMIT 2"
    answer = trained_view.json("/sql", q=sql)
    assert (answer["columns"], len(answer["rows"]), answer["error"]) == (
        ["trajectory_id", "run", "reward"],
        2,
        "",
    )
    page = trained_view.html("/sql", q=sql)
    assert f'href="/view/trajectories/{answer["rows"][0][0]}"' in page
    assert 'href="/view/runs/demo"' in page


@pytest.mark.parametrize(
    ("sql", "error"),
    [
        ("selec", "syntax error"),
        ("SELECT * FROM nothing", "nothing"),
        ("COPY (SELECT 1) TO 'x.csv'", "only reads the store"),
        ("SELECT * FROM read_csv('/etc/passwd')", "file system operations are disabled"),
        ("INSTALL httpfs", "disabled"),
        ("SET memory_limit = '1TB'", "configuration has been locked"),
    ],
)
def test_what_is_refused(trained_view: Viewer, sql: str, error: str) -> None:
    """It says why, and nothing else comes."""
    answer = trained_view.json("/sql", q=sql)
    assert error in answer["error"]
    assert answer["rows"] == []


def test_what_a_query_makes_is_seen_by_no_page(trained_view: Viewer) -> None:
    """A table in the place of a view goes with the connection of its query."""
    made = "CREATE OR REPLACE VIEW trajectories AS SELECT 1 AS run; SELECT * FROM trajectories"
    assert trained_view.json("/sql", q=made)["rows"] == [[1]]
    before = trained_view.json("/trajectories")["trajectories"]
    assert len(before) > 1


def test_it_ends_in_time(trained_view: Viewer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A query without end is interrupted, and says so."""
    monkeypatch.setattr(console, "MOST_S", 0.3)
    endless = "SELECT count(*) FROM range(100000000000) a, range(100000) b"
    assert "took longer than" in trained_view.json("/sql", q=endless)["error"]


def test_rows_are_bounded(trained_view: Viewer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page shows the first, and says that there are more; long values are cut."""
    monkeypatch.setattr(console, "SHOWN", 3)
    answer = trained_view.json("/sql", q="SELECT range AS n, repeat('x', 1000) AS long FROM range(9)")
    assert ([row[0] for row in answer["rows"]], answer["more"]) == ([0, 1, 2], True)
    assert len(answer["rows"][0][1]) == console.CELL + 1


def test_rows_as_files(trained_view: Viewer) -> None:
    """CSV and Parquet hold the same; a query that fails is an error, not a file."""
    sql = "SELECT trajectory_id, [1, 2] AS l FROM trajectories ORDER BY trajectory_id LIMIT 3"
    table = pyarrow.parquet.read_table(io.BytesIO(trained_view.get("/sql/rows.parquet", q=sql).content))
    assert table["l"].to_pylist() == [[1, 2]] * 3
    text = trained_view.get("/sql/rows.csv", q=sql)
    assert text.headers["content-disposition"] == 'attachment; filename="rows.csv"'
    ids = [line.split(",")[0].strip('"') for line in text.text.splitlines()[1:]]
    assert ids == table["trajectory_id"].to_pylist()
    assert trained_view.get("/sql/rows.csv", q="selec").status_code == 400
    assert trained_view.get("/sql/rows.json", q=sql).status_code == 404
    assert trained_view.get("/sql/rows.csv").status_code == 400
