"""Numbers as people read them, and foreign text as a terminal may show it."""

NONE = "-"


def plain(text: str) -> str:
    """Return text without what a terminal would obey: names and errors are foreign."""
    return "".join(char if char.isprintable() else "·" for char in text)


def seconds(value: float | None) -> str:
    """Return a time in seconds, as s, ms or µs."""
    if value is None:
        return NONE
    if value >= 0.9995:
        return f"{value:,.0f} s" if value >= 100 else f"{value:.2f} s"
    if value >= 0.001:
        return f"{value * 1e3:.0f} ms" if value >= 0.0995 else f"{value * 1e3:.1f} ms"
    return f"{value * 1e6:.0f} µs" if value else "0 ms"


def number(value: float) -> str:
    """Return a number of things: 7, 1,024, 12.3k, 4.56M."""
    if value < 10_000:
        return f"{value:,.0f}"
    return f"{value / 1e3:.1f}k" if value < 1e6 else f"{value / 1e6:.2f}M"


def rate(value: float) -> str:
    """Return how many a second, with a place behind the point where it is few."""
    if value < 0.05:
        return "0"
    return f"{value:.1f}" if value < 10 else number(value)


def bytes_rate(value: float) -> str:
    """Return bytes a second."""
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}/s" if unit == "B" else f"{value:.3g} {unit}/s"
        value /= 1000
    return f"{value:.3g} TB/s"
