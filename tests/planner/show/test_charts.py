"""Charts of the HTML reports: their values, before plotly draws them."""

import math
import re
import sys

import pytest

from fourfold.planner.show.charts import Curve, bars, curves, document, drawn, heat_map, smooth, thinned


def test_a_curve_has_the_finite_points() -> None:
    points = [(1, 2.0), (2, 6.0), (3, math.nan), (5, math.inf), (6, 0.0)]
    (line,) = curves([Curve("c", "#000", points)], ".3~g")["data"]
    assert (line["x"], line["y"]) == ([1, 2, 6], [2.0, 6.0, 0.0])


def test_bars_have_their_parts_sums_and_limit() -> None:
    rows = [("a", {"one": 1.0, "two": 2.0}), ("b", {"one": 4.0})]
    chart = bars(rows, {"one": "#111", "two": "#222", "unused": "#333"}, "{:g} s".format, 3.5)
    assert [(t["name"], t["y"], t["x"]) for t in chart["data"]] == [
        ("one", ["a", "b"], [1.0, 4.0]),
        ("two", ["a", "b"], [2.0, 0.0]),
    ]
    assert [(note["y"], note["x"], note["text"]) for note in chart["layout"]["annotations"]] == [
        ("a", 3.0, " 3 s"),
        ("b", 4.0, " 4 s"),
    ]
    assert [shape["x0"] for shape in chart["layout"]["shapes"]] == [3.5]
    assert not bars(rows, {"one": "#111"}, str)["layout"]["shapes"]


def test_a_map_has_shades_where_something_fits_and_crosses_elsewhere() -> None:
    cells = {(1, 8): (1.0, "1.00", "best"), (2, 8): (0.5, "1.59", "slower")}
    shades, crosses = heat_map(("x", [1, 2]), ("z", [8, 16]), cells)["data"]
    assert shades["z"] == [[1.0, 0.5], [None, None]]
    assert shades["text"][0] == ["1.00", "1.59"]
    assert list(zip(crosses["x"], crosses["y"], strict=True)) == [("1", "16"), ("2", "16")]


def test_long_curves_are_thinned_and_stay_accurate() -> None:
    line = [(float(i), 3.0 * i) for i in range(10_001)]
    thin = thinned(line)
    assert len(thin) < 500
    assert (thin[0], thin[-1]) == (line[0], line[-1])
    assert all(y == pytest.approx(3 * x) for x, y in thin)
    # A centred mean keeps a straight line; one that lags would not.
    assert smooth(line) == [(x, pytest.approx(y)) for x, y in line]


def test_a_document_holds_all_that_it_needs() -> None:
    chart = curves([Curve("c", "#000", [(1, 2.0)])], ".3~g")
    page = document("a <title>", [drawn("first", chart), drawn("second", chart)])
    assert page == document("a <title>", [drawn("first", chart), drawn("second", chart)])
    assert "a &lt;title&gt;" in page
    assert re.findall(r'<div id="(\w+)" class="plotly-graph-div"', page) == ["first", "second"]
    assert not re.search(r"<script[^>]* src|<link|<img", page)
    assert "Plotly=" in page or "Plotly =" in page


def test_without_plotly_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    for name in [name for name in sys.modules if name.startswith("plotly.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ValueError, match=r"pip install 'fourfold\[plots\]'"):
        document("title", [])
