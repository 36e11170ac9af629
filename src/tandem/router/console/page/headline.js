// The row of headline numbers, each with a curve of the last two minutes.

import { byId, el, keyed, setText, set, svg } from "./dom.js";
import { count, rate, seconds } from "./format.js";

// A short curve starts at the right and grows to the left.
const FEWEST_STEPS = 30;

/** Return the numbers in reading order: label, value, subtitle, name of the curve. */
function numbers(store) {
  const { rates, totals, latencies, num_in_flight: running, num_queued: queued } = store.overview;
  const failed = totals.num_failed ? `${count(totals.num_failed)} failed` : `${count(totals.num_finished)} finished`;
  return [
    ["requests/s", rate(rates.requests), failed, "requests"],
    ["in flight", count(running), "now", "inFlight"],
    ["queued", count(queued), totals.num_refused ? `${count(totals.num_refused)} rejected` : "none rejected", "queued"],
    ["TTFT", seconds(latencies.ttft.p50_s), `p99 ${seconds(latencies.ttft.p99_s)}`, "ttft"],
    ["ITL", seconds(latencies.itl.p50_s), `p99 ${seconds(latencies.itl.p99_s)}`, "itl"],
    ["tokens/s", rate(rates.generated_tokens), `${rate(rates.prompt_tokens)} prompt tokens/s`, "tokens"],
    ["replays", count(totals.num_replays), "since the start", ""],
  ];
}

function make([label, , , curve]) {
  return el("div", { class: "number" },
    el("dt", {}, label), el("dd", { class: "value" }), el("dd", { class: "under" }),
    curve ? svg("svg", { class: "curve", viewBox: "0 0 120 24", preserveAspectRatio: "none", "aria-hidden": "true" },
      svg("path", { class: "area" }), svg("path", { class: "line" })) : null);
}

function update(history) {
  return (tile, [label, value, under, curve]) => {
    setText(tile.children[1], value);
    setText(tile.children[2], under);
    tile.classList.toggle("is-warning", label === "replays" && value !== "0");
    if (curve) draw(tile.lastElementChild, history.map((row) => row[curve]));
  };
}

function draw(curve, values) {
  const top = Math.max(...values);
  curve.toggleAttribute("hidden", !top);
  if (!top) return;
  const step = 120 / Math.max(FEWEST_STEPS, values.length - 1);
  const x = (at) => (120 - (values.length - 1 - at) * step).toFixed(1);
  const points = values.map((value, at) => `${x(at)},${(22 - (20 * value) / top).toFixed(1)}`).join(" L");
  set(curve.children[0], "d", `M${x(0)},24 L${points} L120,24 Z`);
  set(curve.children[1], "d", `M${points}`);
}

/** Draw the numbers. */
export function showHeadline(store) {
  keyed(byId("numbers"), numbers(store), ([label]) => label, make, update(store.history));
}
