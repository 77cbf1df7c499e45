"""``report.html``: one page with every curve, which opens anywhere, without a server and without a network."""

from __future__ import annotations

import html
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_WIDTH, _HEIGHT, _MARGIN = 420, 180, 8
_MOST_DOTS = 100  # more of them hide the line and make the page heavy
_STYLE = (
    "body{font:15px system-ui,sans-serif;margin:2em auto;max-width:1340px;padding:0 1em;color-scheme:light dark}"
    "main{display:flex;flex-wrap:wrap;gap:1em}figure{margin:0;border:1px solid #8884;padding:.6em}"
    "svg{display:block}polyline{fill:none;stroke:#0a8f8f;stroke-width:2}circle{fill:#0a8f8f}"
    "figcaption{display:flex;justify-content:space-between;gap:1em}small{opacity:.7}"
)


def render_report(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the page as HTML.

    Args:
        title: The run's name.
        rows: Lines of ``metrics.jsonl``, oldest epoch first.
    """
    names = sorted({name for row in rows for name in row} - {"epoch"})
    curves = {name: [(row["epoch"], float(row[name])) for row in rows if name in row] for name in names}
    epochs = f"epochs {rows[0]['epoch']} to {rows[-1]['epoch']}" if rows else "nothing logged yet"
    figures = "".join(_figure(name, points) for name, points in curves.items())
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
        f"<h1>{html.escape(title)}</h1><p>{epochs}</p><main>{figures}</main></html>\n"
    )


def _figure(name: str, points: Sequence[tuple[int, float]]) -> str:
    finite = [(epoch, value) for epoch, value in points if math.isfinite(value)]
    missing = len(points) - len(finite)
    note = f", {missing} not finite" if missing else ""
    low, high = (min(v for _, v in finite), max(v for _, v in finite)) if finite else (math.nan, math.nan)
    return (
        f"<figure><figcaption><b>{html.escape(name)}</b><span>{points[-1][1]:.6g}</span></figcaption>"
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{html.escape(name)} over epochs">'
        f"{_curve(finite)}</svg><small>from {low:.6g} to {high:.6g}, epochs {points[0][0]} to {points[-1][0]}{note}"
        "</small></figure>"
    )


def _curve(points: Sequence[tuple[int, float]]) -> str:
    if not points:
        return ""
    xs = _spread([epoch for epoch, _ in points], _MARGIN, _WIDTH - _MARGIN)
    ys = _spread([value for _, value in points], _HEIGHT - _MARGIN, _MARGIN)
    dots = [
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5"><title>epoch {epoch}: {value:.6g}</title></circle>'
        for x, y, (epoch, value) in zip(xs, ys, points, strict=True)
    ]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
    return f'<polyline points="{line}"/>{"".join(dots if len(dots) <= _MOST_DOTS else [])}'


def _spread(values: Sequence[float], start: float, end: float) -> list[float]:
    """Map values linearly so that the least falls on ``start`` and the greatest on ``end``; equal ones between them."""
    low, high = min(values), max(values)
    if high == low:
        return [(start + end) / 2] * len(values)
    # Halved, as the distance of two large floats of opposite sign overflows.
    return [start + (end - start) * ((value / 2 - low / 2) / (high / 2 - low / 2)) for value in values]
