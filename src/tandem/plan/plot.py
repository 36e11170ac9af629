"""Goodput over the P:D ratio as a picture: an SVG of its own, or a page that holds it and the table."""

from html import escape
from pathlib import Path

from tandem.bench.page import STYLE
from tandem.bench.plots import HEIGHT, WIDTH, Axis, Series, from_zero, lines
from tandem.plan import words
from tandem.plan.planning import Plan

# What pictures of the documentation have, too: readable on light and dark grounds.
_STANDALONE = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '


def write_plot(path: Path, plan: Plan) -> None:
    """Write the picture that the name of the file asks for."""
    made = page(plan) if path.suffix == ".html" else picture(plan)
    path.write_text(made, encoding="utf-8")


def picture(plan: Plan) -> str:
    """Return an SVG that needs nothing else."""
    drawn = _drawn(plan)
    title = f"<title>{escape(_title(plan))}</title><style>{STYLE}</style>"
    head, _, rest = drawn.removeprefix("<svg ").partition(">")
    return f"{_STANDALONE}{head}>{title}{rest}\n"


def page(plan: Plan) -> str:
    """Return an HTML page that needs nothing else."""
    said = "\n".join([words.load_line(plan, 0), *words.answer(plan)])
    kinds = [kind for option in plan.options for kind in (option.prefill, option.decode)]
    estimated = words.estimated_line(kinds)
    return "".join(
        (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(_title(plan))}</title><style>{STYLE}</style></head><body>",
            f'<h1>{escape(_title(plan))}</h1><p class="soft">{escape(estimated)}</p>',
            f'<div class="card"><pre>{escape(said)}</pre></div>',
            f'<div class="grid-of"><figure class="card"><h2>Goodput over the ratio</h2>{_drawn(plan)}'
            "<figcaption>Requests a second that meet the goals, by prefills of as many nodes.</figcaption>",
            f'</figure></div><div class="card scroll">{_table(plan)}</div></body></html>\n',
        )
    )


def _title(plan: Plan) -> str:
    if plan.best is None:
        return "tandem plan: no fleet meets the goals"
    return f"tandem plan: {words.fleet_name(plan.best)}"


def _drawn(plan: Plan) -> str:
    trials = plan.ratios
    total = trials[0].fleet.num_prefill + trials[0].fleet.num_decode if trials else 2
    points = [(t.fleet.num_prefill, t.verdict.goodput) for t in trials]
    x = Axis(f"prefills of {total} nodes", 0.0, float(total))
    y = from_zero("", [plan.load.rate, *(goodput for _, goodput in points)])
    asked = Series("the load", [(0.0, plan.load.rate), (float(total), plan.load.rate)])
    goodput = Series("goodput", points, [trial.ratio for trial in trials])
    return lines(x, y, [goodput, asked])


def _table(plan: Plan) -> str:
    at = f"p{plan.goals.percentile:g}"
    heads = ["prefill : decode", "cost", f"TTFT {at}, ms", f"ITL {at}, ms", "goodput/s", "met"]
    rows = []
    for trial in plan.ratios or words.beside(plan):
        verdict = trial.verdict
        cells = (
            words.fleet_name(trial),
            f"{trial.fleet.cost:g}",
            words.milliseconds(verdict.ttft_s),
            words.milliseconds(verdict.itl_s),
            f"{verdict.goodput:.4g}",
            words.misses(verdict),
        )
        rows.append("".join(f"<td>{escape(cell)}</td>" for cell in cells))
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"
