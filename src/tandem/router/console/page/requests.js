// The list of requests, running ones first, then the newest, each as a small waterfall; the chosen request in full.

import { byId, el, keyed, listKeys, oneTabStop, setText, set } from "./dom.js";
import { clock, count, seconds } from "./format.js";
import { cached, fillBar, phaseLegend, waterfall } from "./waterfall.js";

const MOST_SHOWN = 60;

// Other outcomes are shown in place of the time to first token.
const SHOWN_TIMES = new Set(["running", "finished"]);

let chosen = null;
let drawn = null;

/** Prepare the list. `draw` is called when a different request or scale is chosen. */
export function prepareRequests(draw) {
  byId("phase-legend").append(...phaseLegend());
  const choose = (key) => {
    chosen = chosen === key ? null : key;
    draw();
  };
  listKeys(byId("recent"), choose);
  byId("recent").closest("section").addEventListener("keydown", (event) => {
    if (event.key === "Escape" && chosen) choose(chosen);
  });
  for (const radio of document.querySelectorAll("[name=scale]")) radio.addEventListener("change", draw);
}

/** Draw the requests of the store. */
export function showRequests(store) {
  const entries = [...[...store.live].reverse(), ...[...store.recent].reverse()].slice(0, MOST_SHOWN);
  const toFirst = document.querySelector("[name=scale]:checked").value === "first";
  const lengths = entries.map(([, timings]) => lengthOf(timings, toFirst)).sort((one, other) => one - other);
  // The 95th percentile, so that one slow request does not shrink all other bars.
  const span = Math.max(lengths[Math.floor(0.95 * (lengths.length - 1))] ?? 0, 1e-6);
  byId("no-requests").hidden = entries.length > 0;
  byId("recent").hidden = byId("recent-head").hidden = !entries.length;
  setText(byId("no-requests"), "No requests yet. Send one from the playground.");
  keyed(byId("recent"), entries, ([key]) => key, make, (row, [key, timings]) => update(row, key, timings, span, toFirst));
  oneTabStop(byId("recent"));
  showDetail(store.live.get(chosen) ?? store.recent.get(chosen), toFirst);
}

const lengthOf = (timings, toFirst) => (toFirst ? timings.ttft_s ?? timings.e2e_s : timings.e2e_s);

function make() {
  return el("li", { role: "option", tabindex: "-1", class: "request" },
    el("span", { class: "at faint" }), el("span", { class: "mono rid" }), el("span", { class: "tokens faint" }),
    el("span", { class: "track" }), el("span", { class: "ttft" }), el("span", { class: "e2e faint" }));
}

function update(row, key, timings, span, toFirst) {
  const [at, id, tokens, track, ttft, e2e] = row.children;
  set(row, "data-outcome", timings.outcome);
  set(row, "aria-selected", key === chosen);
  const scale = `${span} ${toFirst} ${timings.outcome} ${timings.e2e_s}`;
  if (row.dataset.scale === scale) return;
  row.dataset.scale = scale;
  setText(at, clock(timings.started_unix_s));
  setText(id, timings.request_id);
  setText(tokens, `${count(timings.num_prompt_tokens)} → ${count(timings.num_output_tokens)}`);
  tokens.title = `cached ${cached(timings)}`;
  setText(ttft, SHOWN_TIMES.has(timings.outcome) && timings.ttft_s !== null ? seconds(timings.ttft_s) : timings.outcome);
  setText(e2e, `${seconds(timings.e2e_s)}${timings.outcome === "running" ? " …" : ""}`);
  track.classList.toggle("is-cut", lengthOf(timings, toFirst) > span * 1.001);
  row.classList.toggle("is-replayed", timings.num_attempts > 1);
  fillBar(track, toFirst ? { phases: timings.phases.filter((phase) => phase.name !== "stream") } : timings, span);
  set(row, "aria-label", `${timings.request_id}, ${timings.outcome}, ${timings.num_prompt_tokens} prompt tokens, `
    + `cached ${cached(timings)}, `
    + `${timings.num_output_tokens} tokens, first token after ${seconds(timings.ttft_s)}, all after ${seconds(timings.e2e_s)}`);
}

function showDetail(timings, toFirst) {
  const detail = byId("request-detail");
  detail.hidden = !timings;
  const wanted = timings && `${chosen} ${toFirst} ${timings.e2e_s}`;
  if (drawn === wanted) return;
  drawn = wanted;
  detail.replaceChildren(...(timings ? [waterfall(timings, toFirst)] : []));
}
