import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias
from xml.sax.saxutils import escape

Curve: TypeAlias = Sequence[tuple[float, float]]

WIDTH, HEIGHT, MARGIN = 460, 260, 44  # of a panel, in pixels
COLOURS = ("#1f6feb", "#d1642a", "#2b8a3e", "#8250df", "#b3261e", "#0b7285", "#7a5c00", "#495057")
END = ' text-anchor="end"'
SMOOTHED = 5  # logged steps that a point is the mean of


def draw_run(log: Path, out: Path, title: str) -> None:
    lines = {line["step"]: line for line in map(json.loads, log.read_text().splitlines())}
    if not lines:
        return
    steps = sorted(lines)
    depths = range(len(lines[steps[0]].get("acceptance", ())))
    accepted = {f"depth {depth + 1}": [(step, lines[step]["acceptance"][depth]) for step in steps] for depth in depths}
    panels = [_panel(f"{title}: loss", {"": [(step, lines[step]["loss"]) for step in steps]}, 0)]
    panels += [_panel("acceptance by depth", accepted, WIDTH)] if accepted else []
    size = f'width="{WIDTH * len(panels)}" height="{HEIGHT}"'
    style = 'font-family="sans-serif" font-size="11" fill="#57606a"'
    out.write_text(f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n{"".join(panels)}</svg>\n')


def _panel(title: str, curves: Mapping[str, Curve], left: int) -> str:
    groups = {
        name: [curve[start : start + SMOOTHED] for start in range(0, len(curve), SMOOTHED)]
        for name, curve in curves.items()
    }
    smooth = {name: [(g[-1][0], sum(y for _, y in g) / len(g)) for g in own] for name, own in groups.items()}
    points = [point for curve in smooth.values() for point in curve]
    last, high = max(x for x, _ in points), max(max(y for _, y in points), 1e-9) * 1.05

    def place(x: float, y: float) -> tuple[float, float]:
        return left + MARGIN + (WIDTH - 1.5 * MARGIN) * x / last, HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * y / high

    def text(x: float, y: float, words: str, more: str = "") -> str:
        return f'<text x="{x:.1f}" y="{y:.1f}"{more}>{escape(words)}</text>'

    def line(path: Curve, colour: str) -> str:
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in path)
        return f'<polyline points="{drawn}" stroke="{colour}" stroke-width="1.5" fill="none"/>'

    parts = [text(left + MARGIN, MARGIN / 2, title, ' font-weight="bold"')]
    for value in (high * share / 4 for share in range(5)):
        x, y = place(0, value)
        parts += [line([(x, y), place(last, value)], "#d0d7de"), text(x - 6, y + 4, f"{value:.2f}", END)]
    x, y = place(last, 0)
    parts.append(text(x, y + 16, f"{last:.0f} steps", END))
    for index, (name, curve) in enumerate(smooth.items()):
        colour = COLOURS[index % len(COLOURS)]
        parts.append(line([place(*point) for point in curve], colour))
        at = left + WIDTH - 70, HEIGHT - MARGIN - 12 * (len(smooth) - index)
        parts.append(text(*at, name, f' fill="{colour}"'))
    return "\n".join(parts) + "\n"
