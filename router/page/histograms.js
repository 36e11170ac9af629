// Times as bars, a bar a bucket, with the median, the 99th percentile and what the user asks for.

import { byId, el, keyed, say, set, svg } from "./dom.js";
import { plural, seconds } from "./format.js";

const KINDS = [
  ["ttft", "Time to first token"],
  ["itl", "Between tokens"],
  ["e2e", "Whole answer"],
];
const WIDTH = 300;
const HEIGHT = 84;

/** Draw the histograms of an overview; `limits` are the user's, in seconds. */
export function showHistograms(overview, limits) {
  keyed(byId("histograms"), KINDS, ([name]) => name, make, (figure, [name, title]) => {
    const times = overview.histograms[name];
    draw(figure, title, cut(times), { ttft: limits.ttftS, itl: limits.itlS }[name], overview.histogram_span_s);
  });
}

function make([, title]) {
  return el("figure", {},
    el("figcaption", {}, el("b", {}, title), el("span", { class: "quantiles" })),
    svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT + 18}`, role: "img" },
      svg("g", { class: "bars" }), svg("g", { class: "marks" }), svg("g", { class: "axis" })),
    el("p", { class: "empty" }));
}

/** Leave out empty buckets at both ends but one. */
function cut({ bounds_s: bounds, counts, p50_s: p50, p99_s: p99 }) {
  const first = Math.max(0, counts.findIndex((number) => number > 0) - 1);
  const last = Math.min(counts.length - 1, counts.findLastIndex((number) => number > 0) + 1);
  const buckets = counts.slice(first, last + 1).map((number, at) => ({
    number, low: first + at ? bounds[first + at - 1] : 0, high: bounds[first + at] ?? null,
  }));
  return { buckets, p50, p99, all: counts.reduce((sum, number) => sum + number, 0) };
}

function draw(figure, title, { buckets, p50, p99, all }, limit, spanS) {
  const [caption, picture, empty] = figure.children;
  const [bars, marks, axis] = picture.children;
  const minutes = Math.round(spanS / 60);
  picture.toggleAttribute("hidden", !all);
  empty.hidden = Boolean(all);
  say(empty, `Nothing was measured in the last ${minutes} minutes.`);
  say(caption.lastElementChild, all ? `p50 ${seconds(p50)} · p99 ${seconds(p99)}` : "");
  if (!all) return;
  set(picture, "aria-label", `${title}: ${plural(all, "time")} in ${minutes} minutes, half of them up to ${seconds(p50)}, `
    + `99 of 100 up to ${seconds(p99)}`);
  const step = WIDTH / buckets.length;
  const most = Math.max(...buckets.map((bucket) => bucket.number));
  keyed(bars, buckets, ({ high }) => high, () => svg("rect", { rx: 1.5 }, svg("title")), (bar, bucket) => {
    const at = buckets.indexOf(bucket);
    const height = bucket.number ? Math.max(1.5, (HEIGHT * bucket.number) / most) : 0;
    for (const [name, value] of Object.entries({ x: at * step + 1, y: HEIGHT - height, width: step - 2, height })) {
      set(bar, name, value.toFixed(2));
    }
    bar.classList.toggle("is-over", limit !== undefined && bucket.low >= limit);
    say(bar.firstElementChild, `${bucket.number} ${range(bucket)}`);
  });
  const x = (timeS) => place(buckets, timeS) * step;
  const lines = [["p50", p50, ""], ["p99", p99, ""], ["limit", limit, "limit"]].filter(
    ([name, timeS]) => timeS !== undefined && (name !== "limit" || place(buckets, timeS) < buckets.length));
  keyed(marks, lines, ([name]) => name, ([name]) => svg("line", { class: name, y1: 0, y2: HEIGHT }), (line, [, timeS]) => {
    for (const name of ["x1", "x2"]) set(line, name, x(timeS).toFixed(2));
  });
  const every = Math.ceil(buckets.length / 6);
  const ticks = buckets.slice(0, -1).filter((bucket, at) => bucket.high !== null && at % every === 0);
  keyed(axis, ticks, ({ high }) => high, () => svg("text", { y: HEIGHT + 13 }), (text, bucket) => {
    set(text, "x", ((buckets.indexOf(bucket) + 1) * step).toFixed(2));
    say(text, brief(bucket.high));
  });
}

/** Where a time stands among the buckets, in buckets. */
function place(buckets, timeS) {
  const at = buckets.findIndex(({ high }) => high === null || timeS <= high);
  if (at < 0) return buckets.length;
  const { low, high } = buckets[at];
  return at + (high === null ? 0.5 : Math.max(0, (timeS - low) / (high - low)));
}

const brief = (timeS) => (timeS >= 1 ? `${Number(timeS.toPrecision(3))} s` : `${Number((timeS * 1000).toPrecision(3))} ms`);
const range = ({ low, high }) => (high === null ? `over ${brief(low)}` : `from ${brief(low)} to ${brief(high)}`);
