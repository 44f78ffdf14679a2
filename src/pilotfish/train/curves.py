"""Curves of a run as an SVG file: its loss, and the acceptance at each depth."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias
from xml.sax.saxutils import escape

Curve: TypeAlias = Sequence[tuple[float, float]]

WIDTH, HEIGHT, MARGIN = 460, 260, 44  # of a panel, in pixels
COLOURS = ("#1f6feb", "#d1642a", "#2b8a3e", "#8250df", "#b3261e", "#0b7285", "#7a5c00", "#495057")
SMOOTHED = 5  # logged steps that a point is the mean of


def draw_run(log: Path, out: Path, title: str) -> None:
    """The curves of a trainer's `log`; lines of steps that an interrupted run did twice count once."""
    lines = {line["step"]: line for line in map(json.loads, log.read_text().splitlines())}
    steps = sorted(lines)
    if not steps:
        return
    loss = [(step, lines[step]["loss"]) for step in steps]
    depths = range(len(lines[steps[0]].get("acceptance", ())))
    accepted = {f"depth {depth + 1}": [(step, lines[step]["acceptance"][depth]) for step in steps] for depth in depths}
    panels = [_panel(f"{title}: loss", {"": loss}, 0)]
    panels += [_panel("acceptance by depth", accepted, WIDTH)] if accepted else []
    size = f'width="{WIDTH * len(panels)}" height="{HEIGHT}"'
    style = 'font-family="sans-serif" font-size="11" fill="#57606a"'
    out.write_text(f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n{"".join(panels)}</svg>\n')


def _panel(title: str, curves: Mapping[str, Curve], left: int) -> str:
    smooth = {name: _smoothed(curve) for name, curve in curves.items()}
    points = [point for curve in smooth.values() for point in curve]
    last = max(x for x, _ in points)
    low, high = 0.0, max(max(y for _, y in points), 1e-9) * 1.05

    def place(x: float, y: float) -> str:
        across = left + MARGIN + (WIDTH - 1.5 * MARGIN) * x / last
        return f"{across:.1f},{HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * (y - low) / (high - low):.1f}"

    parts = [f'<text x="{left + MARGIN}" y="{MARGIN / 2:.0f}" font-weight="bold">{escape(title)}</text>']
    for share in range(5):
        value = low + (high - low) * share / 4
        parts.append(f'<polyline points="{place(0, value)} {place(last, value)}" stroke="#d0d7de" fill="none"/>')
        x, y = place(0, value).split(",")
        parts.append(f'<text x="{float(x) - 6:.1f}" y="{float(y) + 4:.1f}" text-anchor="end">{value:.2f}</text>')
    x, y = place(last, low).split(",")
    parts.append(f'<text x="{x}" y="{float(y) + 16:.1f}" text-anchor="end">{last:.0f} steps</text>')
    for index, (name, curve) in enumerate(smooth.items()):
        colour = COLOURS[index % len(COLOURS)]
        path = " ".join(place(*point) for point in curve)
        parts.append(f'<polyline points="{path}" stroke="{colour}" stroke-width="1.5" fill="none"/>')
        at = f'x="{left + WIDTH - 70}" y="{HEIGHT - MARGIN - 12 * (len(smooth) - index)}"'
        parts.append(f'<text {at} fill="{colour}">{escape(name)}</text>')
    return "\n".join(parts) + "\n"


def _smoothed(curve: Curve) -> Curve:
    groups = [curve[start : start + SMOOTHED] for start in range(0, len(curve), SMOOTHED)]
    return [(group[-1][0], sum(y for _, y in group) / len(group)) for group in groups]
