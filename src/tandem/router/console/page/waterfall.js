// One request as a waterfall: its consecutive phases, and the work that ran in parallel.

import { el, setText } from "./dom.js";
import { count, plural, seconds, short } from "./format.js";

/** The phases in their order, with descriptions. */
export const PHASES = {
  tokenize: "converting text to tokens",
  queue: "waiting in the router's queue",
  pair: "choosing a prefill and a decode node",
  lost_attempt: "a failed attempt",
  reserve: "reserving pages at decode",
  kv_tier: "reading KV from tiers",
  prefill_queue: "waiting in prefill's queue",
  prefill: "computing the prompt",
  link: "sending the first token to the router",
  detokenize: "converting tokens to text",
  stream: "streaming the remaining tokens",
  unanswered: "no token yet, or none at all",
};
const BESIDE = {
  prefill_chunk: "a chunk of the prompt", push: "pushing KV", landed: "landing of KV", first_step: "decode's first step",
  resampled: "continues with other random draws",
};

const COLUMNS = [["name", "phase"], ["when", "when"], ["time", "time"], ["node-name", "node"]];

const swatch = (name) => el("i", { class: `swatch phase-${name in PHASES || name in BESIDE ? name : "other"}` });
const words = (name) => name.replaceAll("_", " ");

/** Return the legend's entries. */
export function phaseLegend() {
  return Object.keys(PHASES).map((name) => el("li", { title: PHASES[name] }, swatch(name), words(name)));
}

/** Fill `bar`, which is `spanS` seconds wide, with the phases of a request. */
export function fillBar(bar, timings, spanS) {
  bar.replaceChildren(...timings.phases.filter((phase) => phase.duration_s > 0).map((phase) => {
    const part = swatch(phase.name);
    place(part, phase, spanS);
    part.title = `${words(phase.name)}: ${seconds(phase.duration_s)}`;
    return part;
  }));
}

function place(part, { start_s: start, duration_s: duration }, spanS) {
  part.style.left = `${Math.min(100, (100 * start) / spanS)}%`;
  part.style.width = `${Math.max(0, Math.min(100, (100 * (start + duration)) / spanS) - Math.min(100, (100 * start) / spanS))}%`;
}

/** Return the full waterfall of a request, scaled to the time to first token or to the whole request. */
export function waterfall(timings, toFirst = false) {
  const first = timings.ttft_s;
  const ends = [...timings.phases, ...timings.beside].map((one) => one.start_s + one.duration_s);
  // Parallel work that ends shortly after the first token is still shown.
  const span = toFirst && first ? 1.3 * first : Math.max(timings.e2e_s, ...ends, 1e-9);
  const box = el("div", { class: "waterfall" },
    el("p", { class: "facts" }, ...facts(timings)),
    el("table", { "aria-label": `Phases of request ${timings.request_id}` },
      el("thead", {}, el("tr", {}, ...COLUMNS.map(([kind, name]) => el("th", { scope: "col", class: kind }, name)))),
      el("tbody", {}, ...timings.phases.map((phase) => row(phase, span, PHASES)),
        ...timings.beside.map((run) => row(run, span, BESIDE, true)))),
    el("p", { class: "faint sum" }));
  if (first !== null && first !== undefined) setText(box.lastElementChild, sum(timings, first));
  return box;
}

function facts(timings) {
  const pairs = [
    ["request", timings.request_id], ["", timings.outcome],
    ["first token", seconds(timings.ttft_s)], ["total", seconds(timings.e2e_s)],
    ["tokens", `${count(timings.num_prompt_tokens)} in, ${count(timings.num_output_tokens)} out`],
    ["cached", cached(timings)], ["attempts", count(timings.num_attempts)],
  ];
  return pairs.map(([name, value]) => el("span", {}, name ? el("span", { class: "faint" }, `${name} `) : null, el("b", {}, value)));
}

/** Return how many prompt tokens were not computed, and where they were cached, if that is reported. */
export function cached({ num_cached_tokens: all, cached_by_tier: byTier = {} }) {
  const fetched = Object.entries(byTier).filter(([, tokens]) => tokens > 0);
  if (!fetched.length) return count(all);
  const own = all - fetched.reduce((sumOf, [, tokens]) => sumOf + tokens, 0);
  const places = [...(own > 0 ? [["device", own]] : []), ...fetched];
  return `${count(all)}: ${places.map(([place, tokens]) => `${place} ${count(tokens)}`).join(", ")}`;
}

/** Return a sentence that compares the sum of the phases before the first token with the time to first token. */
function sum(timings, firstS) {
  const before = timings.phases.filter((phase) => phase.name !== "stream");
  const allS = before.reduce((sumS, phase) => sumS + phase.duration_s, 0);
  return `${plural(before.length, "phase")} before the first token, together ${seconds(allS)}: `
    + (Math.abs(allS - firstS) <= 0.001 + 0.01 * firstS ? "the time to first token." : `the first token came after ${seconds(firstS)}.`);
}

function row(phase, span, names, isBeside = false) {
  const bar = el("span", { class: "track" }, swatch(phase.name));
  place(bar.firstElementChild, phase, span);
  return el("tr", { class: isBeside ? "beside" : "" },
    el("th", { scope: "row", title: names[phase.name] ?? "" }, swatch(phase.name), words(phase.name)),
    el("td", { class: "when" }, bar), el("td", { class: "time" }, seconds(phase.duration_s)),
    el("td", { class: "mono node-name" }, short(phase.node || "")));
}
