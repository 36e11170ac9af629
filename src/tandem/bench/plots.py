"""Small plots as inline SVG, coloured by the page they stand in (classes `s0`, `s1`, ...)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 260
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 12, 40
# Colours that the page has.
NUM_COLOURS = 6
MOST_STEPS = 7 + 1e-6


@dataclass(frozen=True, slots=True)
class Series:
    """One line: its points, and what stands at each, where each counts."""

    name: str
    points: Sequence[tuple[float, float]]
    labels: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Axis:
    """A linear or logarithmic axis from `low` to `high` with its ticks."""

    title: str
    low: float
    high: float
    is_log: bool = False

    def share(self, value: float) -> float:
        """Return how far along the axis a value is, 0 to 1."""
        if self.is_log:
            low, high = math.log10(self.low), math.log10(self.high)
            return (math.log10(max(value, self.low)) - low) / (high - low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Return round values within the axis."""
        return _log_ticks(self.low, self.high) if self.is_log else _ticks(self.low, self.high)


def from_zero(title: str, values: Sequence[float]) -> Axis:
    """Return an axis from 0 to a round value at or above the highest."""
    highest = max(values, default=0.0) or 1.0
    step = _step(highest)
    return Axis(title, 0.0, math.ceil(highest / step - 1e-9) * step)


def logarithmic(title: str, values: Sequence[float]) -> Axis:
    """Return a logarithmic axis around positive values, of a factor of four at least."""
    found = [value for value in values if value > 0] or [1.0]
    low, high = min(found) / 1.1, max(found) * 1.1
    spread = max(4 / (high / low), 1.0) ** 0.5
    return Axis(title, low / spread, high * spread, is_log=True)


def lines(x: Axis, y: Axis, series: Sequence[Series]) -> str:
    """Return a plot of lines, with a dot at each point that has a label."""
    drawn = []
    for number, one in enumerate(series):
        spots = [_place(x, y, point) for point in one.points]
        colour = f"s{number % NUM_COLOURS}"
        if spots:
            path = "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in spots)
            name = escape(one.name)
            drawn.append(f'<path class="line {colour}" d="{path}"><title>{name}</title></path>')
        for (px, py), label in zip(spots, one.labels, strict=False):
            drawn.append(f'<circle class="dot {colour}" cx="{px:.1f}" cy="{py:.1f}" r="4.5"/>')
            anchor = "end" if px > WIDTH * 0.75 else "start"
            # Beside the line, which mostly rises to the right, and not on the axis.
            dx, dy = (-9, -9) if anchor == "end" else (9, min(14, HEIGHT - BOTTOM - 6 - py))
            drawn.append(
                f'<text x="{px + dx:.1f}" y="{py + dy:.1f}" text-anchor="{anchor}">{escape(label)}</text>'
            )
    return _svg(x, y, drawn)


def bars(x: Axis, y: Axis, edges: Sequence[float], values: Sequence[float]) -> str:
    """Return a histogram: a bar between each two edges."""
    drawn = []
    for low, high, value in zip(edges, edges[1:], values, strict=False):
        (left, top), (right, bottom) = _place(x, y, (low, value)), _place(x, y, (high, 0.0))
        drawn.append(
            f'<rect class="bar s0" x="{left:.1f}" y="{top:.1f}" width="{max(right - left - 1, 0.5):.1f}" '
            f'height="{bottom - top:.1f}"><title>{low:.4g} to {high:.4g}: {value:.1%}</title></rect>'
        )
    return _svg(x, y, drawn)


def _place(x: Axis, y: Axis, point: tuple[float, float]) -> tuple[float, float]:
    return (
        LEFT + x.share(point[0]) * (WIDTH - LEFT - RIGHT),
        HEIGHT - BOTTOM - y.share(point[1]) * (HEIGHT - TOP - BOTTOM),
    )


def _svg(x: Axis, y: Axis, drawn: Sequence[str]) -> str:
    floor, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    for tick in y.ticks():
        py = _place(x, y, (x.low, tick))[1]
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{py:.1f}" y2="{py:.1f}"/>')
        parts.append(
            f'<text x="{LEFT - 7}" y="{py + 4:.1f}" text-anchor="end">{_label(tick)}</text>'
        )
    for tick in x.ticks():
        px = _place(x, y, (tick, y.low))[0]
        parts.append(
            f'<line class="tick" x1="{px:.1f}" x2="{px:.1f}" y1="{floor}" y2="{floor + 4}"/>'
        )
        parts.append(
            f'<text x="{px:.1f}" y="{floor + 17}" text-anchor="middle">{_label(tick)}</text>'
        )
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{floor}" y2="{floor}"/>')
    parts.append(
        f'<text class="title" x="{right}" y="{HEIGHT - 5}" text-anchor="end">{escape(x.title)}</text>'
    )
    return "".join([*parts, *drawn, "</svg>"])


def _step(span: float) -> float:
    """Return a round step that cuts a span into three to seven."""
    power = 10.0 ** math.floor(math.log10(span / 5))
    return next(factor * power for factor in (1, 2, 5, 10) if span / (factor * power) <= MOST_STEPS)


def _ticks(low: float, high: float) -> list[float]:
    step = _step(high - low)
    return [index * step for index in range(math.ceil(low / step), int(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Return powers of ten, with twos and fives where there is room."""
    factors = (1, 2, 5) if high / low < 1e3 else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [f * 10.0**p for p in powers for f in factors if low <= f * 10.0**p <= high]


def _label(value: float) -> str:
    for size, suffix in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{suffix}"
    return f"{value:.4g}"
