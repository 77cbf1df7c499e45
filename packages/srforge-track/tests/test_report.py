"""The report is one page that loads nothing and shows every number."""

import math
import re
from html.parser import HTMLParser

import pytest

from srforge.tracking import LocalTracker
from srforge.tracking.report import render_report


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.open = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes


def points(text):
    return [
        [tuple(map(float, pair.split(","))) for pair in line.split()] for line in re.findall(r'points="([^"]*)"', text)
    ]


def test_every_metric_is_a_curve_and_nothing_is_loaded():
    rows = [{"epoch": epoch, "training/loss": 1.0 / (epoch + 1), "psnr": 30.0 + epoch} for epoch in range(3)]
    text = render_report("my run", rows)
    page = Page(text)
    assert page.tags.count("polyline") == 2
    assert page.tags.count("circle") == 6
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name in {"src", "href"}]
    assert "url(" not in text


def test_a_curve_rises_to_the_right_and_upwards():
    ((low, middle, high),) = points(render_report("run", [{"epoch": e, "a": float(e)} for e in (0, 1, 4)]))
    assert low == (8.0, 172.0)
    assert middle == (109.0, 131.0)  # a quarter of the way
    assert high == (412.0, 8.0)


@pytest.mark.parametrize("values", [[1.0], [2.0, 2.0], [-1.7e308, 1.7e308], ["nan", 1.0], ["inf"], [math.nan]])
def test_any_values_give_a_page_with_coordinates_inside(values):
    text = render_report("run", [{"epoch": epoch, "a": value} for epoch, value in enumerate(values)])
    for line in points(text):
        for x, y in line:
            assert 0 <= x <= 420
            assert 0 <= y <= 180
    finite = [value for value in map(float, values) if math.isfinite(value)]
    assert Page(text).tags.count("circle") == len(finite)


def test_names_cannot_break_the_page():
    text = render_report("<script>x</script>", [{"epoch": 0, 'a"><script>': 1.0}])
    assert "script" not in Page(text).tags


def test_the_local_tracker_writes_it_at_the_end_and_after_each_epoch(tmp_path):
    tracker = LocalTracker(tmp_path, name="my run")
    tracker.log_metrics({"loss": 0.5}, epoch=0)
    assert "my run" in (tmp_path / "report.html").read_text()
    tracker.log_metrics({"loss": 0.25}, epoch=1)
    tracker.finish()
    assert len(points((tmp_path / "report.html").read_text())[0]) == 2
    again = LocalTracker(tmp_path)
    again.rewind(1)
    assert len(points((tmp_path / "report.html").read_text())[0]) == 1


def test_an_empty_history_gives_a_page():
    assert "nothing logged yet" in render_report("run", [])
