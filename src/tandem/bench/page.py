"""A report as one HTML page that needs nothing else: no script, no font, no server."""

from collections.abc import Sequence
from html import escape
from itertools import pairwise

from tandem.bench.plots import NUM_COLOURS, Axis, Series, bars, from_zero, lines, logarithmic
from tandem.bench.report import LoadReport, Report, Times
from tandem.bench.table import sentences, times_of

NUM_BARS = 30
STYLE = """
:root { color-scheme: light dark; --back: #fbfbfa; --card: #fff; --ink: #1d1f23; --soft: #62676f;
  --rule: #e3e4e6; --s0: #2f6fd0; --s1: #d4692a; --s2: #2a8f63; --s3: #a64ca6; --s4: #b08a14; --s5: #d0455b; }
@media (prefers-color-scheme: dark) { :root { --back: #15171a; --card: #1d2024; --ink: #e8e9eb;
  --soft: #9aa0a8; --rule: #33373d; --s0: #6ea3f2; --s1: #f09a61; --s2: #5cc493; --s3: #d58bd5;
  --s4: #dcbb4f; --s5: #f08394; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1240px; padding: 28px 24px 60px; background: var(--back); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 22px; margin: 0 0 2px; } h2 { font-size: 15px; margin: 0 0 8px; font-weight: 600; }
.soft, figcaption { color: var(--soft); font-size: 13px; } .soft { margin: 0 0 22px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 14px; }
th, td { padding: 5px 10px; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th { color: var(--soft); font-weight: 500; } td:first-child, th:first-child { text-align: left; padding-left: 0; }
.grid-of { display: grid; gap: 18px; grid-template-columns: repeat(auto-fit, minmax(min(460px, 100%), 1fr)); margin-top: 18px; }
.card { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 16px 18px; margin: 0; min-width: 0; }
.key { display: inline-block; margin-right: 14px; } .key i { display: inline-block; width: 14px; height: 3px;
  border-radius: 2px; margin-right: 6px; vertical-align: middle; background: var(--c); }
svg { display: block; width: 100%; height: auto; } svg text { fill: var(--soft); font-size: 12px; }
.grid { stroke: var(--rule); } .axis, .tick { stroke: var(--soft); }
.line { fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round; } .bar { fill: var(--c); }
.dot { fill: var(--c); stroke: var(--card); stroke-width: 2; }
pre { white-space: pre-wrap; font-size: 13px; margin: 0; overflow-wrap: anywhere; }
""" + "".join(f".s{n} {{ --c: var(--s{n}); }}" for n in range(NUM_COLOURS))


def page(report: Report) -> str:
    """Return the page."""
    loads = [load for load in report.loads if load.ttft_ms.count]
    cards = [_curve(name, loads) for name in ("TPOT", "TTFT") if len(loads) > 1]
    if loads:
        cards += [_cdf(name, loads) for name in ("TTFT", "ITL")]
        cards += [_histogram(name, loads[-1]) for name in ("TTFT", "ITL")]
        cards += [_timeline(loads), _cdf("E2E", loads)]
    title = f"{report.model or report.url}, {report.started_at}"
    said = "\n".join(line for load in report.loads for line in sentences(load))
    settings = ", ".join(f"{name} {value}" for name, value in report.settings.items() if value)
    return "".join(
        (
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<style>{STYLE}</style></head><body>",
            f"<h1>{escape(report.model or 'Load test')}</h1>",
            f'<p class="soft">{escape(report.url)} · {report.api} API · {report.started_at} · '
            f"tandem bench {escape(report.version)}</p>",
            f'<div class="card scroll">{_table(report.loads)}</div>',
            f'<div class="grid-of">{"".join(cards)}</div>',
            f'<div class="grid-of"><div class="card"><h2>In words</h2><pre>{escape(said)}</pre></div>',
            f'<div class="card"><h2>Settings</h2><pre>{escape(settings)}</pre></div></div>',
            "</body></html>\n",
        )
    )


def _table(loads: Sequence[LoadReport]) -> str:
    heads = ["load", "done", "failed", "requests/s", "output tokens/s", "input tokens/s"]
    heads += [f"{name} {which}" for name in ("TTFT", "ITL", "E2E") for which in ("p50", "p99")]
    heads += ["goodput"] * any(load.goodput for load in loads)
    rows = []
    for load in loads:
        cells = [escape(load.name), f"{load.num_done:,}", f"{load.num_failed:,}"]
        speeds = (load.requests_per_s, load.output_tokens_per_s, load.input_tokens_per_s)
        cells += [f"{speed:,.1f}" for speed in speeds]
        for times in (load.ttft_ms, load.itl_ms, load.e2e_ms):
            cells += [
                f"{value:,.1f} ms" if times.count else "-" for value in (times.p50, times.p99)
            ]
        cells += [f"{load.goodput.share:.1%}"] if load.goodput else []
        rows.append("".join(f"<td>{cell}</td>" for cell in cells))
    head = "".join(f"<th>{name}</th>" for name in heads)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def _card(title: str, plot: str, names: Sequence[str], note: str = "") -> str:
    keys = "".join(
        f'<span class="key s{number % NUM_COLOURS}"><i></i>{escape(name)}</span>'
        for number, name in enumerate(names)
        if len(names) > 1
    )
    caption = f"<figcaption>{keys}{escape(note)}</figcaption>"
    return f'<figure class="card"><h2>{escape(title)}</h2>{plot}{caption}</figure>'


def _curve(name: str, loads: Sequence[LoadReport]) -> str:
    """Throughput against what one reader sees."""
    medians = [times_of(load)[name].p50 for load in loads]
    speeds = [load.output_tokens_per_s for load in loads]
    points = list(zip(medians, speeds, strict=True))
    x, y = from_zero(f"p50 {name}, ms", medians), from_zero("", speeds)
    plot = lines(x, y, [Series("loads", points, [load.name for load in loads])])
    return _card(f"Output tokens/s against {name}", plot, (), "Up and to the left is better.")


def _cdf(name: str, loads: Sequence[LoadReport]) -> str:
    series = [
        Series(load.name, [(ms, pc / 100) for pc, ms in enumerate(times_of(load)[name].quantiles)])
        for load in loads
    ]
    x = logarithmic("ms, logarithmic", [ms for one in series for ms, _ in one.points])
    y = Axis("", 0.0, 1.0)
    return _card(f"{name}: share at or below", lines(x, y, series), [load.name for load in loads])


def _histogram(name: str, load: LoadReport) -> str:
    times = times_of(load)[name]
    edges, shares = histogram(times)
    x = Axis("ms", edges[0], edges[-1])
    plot = bars(x, from_zero("", shares), edges, shares)
    return _card(
        f"{name}: distribution, {load.name}",
        plot,
        (),
        "Up to the 99th percentile; bars are shares.",
    )


def histogram(times: Times) -> tuple[list[float], list[float]]:
    """Return edges and the share of values between them, from 0 to the 99th percentile.

    It is read off the quantiles: between two of them lies one hundredth, spread evenly.
    """
    known = times.quantiles[:100] or [0.0, 1.0]
    high = known[-1] or 1.0
    edges = [high * index / NUM_BARS for index in range(NUM_BARS + 1)]
    shares = [0.0] * NUM_BARS
    for low, top in pairwise(known):
        first = min(int(low / high * NUM_BARS), NUM_BARS - 1)
        last = min(int(top / high * NUM_BARS), NUM_BARS - 1)
        for index in range(first, last + 1):
            inside = min(top, edges[index + 1]) - max(low, edges[index])
            shares[index] += 0.01 * (inside / (top - low) if top > low else 1.0)
    return edges, shares


def _timeline(loads: Sequence[LoadReport]) -> str:
    series = [
        Series(load.name, [((i + 0.5) * load.step_s, v) for i, v in enumerate(load.tokens_per_s)])
        for load in loads
    ]
    x = from_zero("s after the start of the load", [load.duration_s for load in loads])
    y = from_zero("", [value for load in loads for value in load.tokens_per_s])
    return _card("Output tokens/s over time", lines(x, y, series), [load.name for load in loads])
