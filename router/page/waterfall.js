// One request as a waterfall: its phases one after the other, and what ran beside them.

import { el, say } from "./dom.js";
import { count, plural, seconds, short } from "./format.js";

/** The phases in the order in which they come, and in words. */
export const PHASES = {
  tokenize: "text to tokens",
  queue: "waits for room in the cluster",
  pair: "a prefill and a decode are chosen",
  lost_attempt: "an attempt that was lost",
  reserve: "decode sets pages aside",
  kv_tier: "comes from tiers",
  prefill_queue: "waits at prefill",
  prefill: "the prompt is computed",
  link: "the first token travels",
  detokenize: "tokens to text",
  stream: "the other tokens",
  unanswered: "no token yet, or none came",
};
const BESIDE = {
  prefill_chunk: "a chunk of the prompt", push: "KV is pushed", landed: "KV has landed", first_step: "decode's first step",
};

const COLUMNS = [["name", "phase"], ["when", "when"], ["time", "time"], ["node-name", "node"]];

const swatch = (name) => el("i", { class: `swatch phase-${name in PHASES || name in BESIDE ? name : "other"}` });
const words = (name) => name.replaceAll("_", " ");

/** Return the legend's entries. */
export function phaseLegend() {
  return Object.keys(PHASES).map((name) => el("li", { title: PHASES[name] }, swatch(name), words(name)));
}

/** Fill `bar` with the phases of a request, where its whole width is `spanS`. */
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

/** Return a request in full, drawn as wide as its beginning or all of it. */
export function waterfall(timings, toFirst = false) {
  const first = timings.ttft_s;
  const ends = [...timings.phases, ...timings.beside].map((one) => one.start_s + one.duration_s);
  // What ran beside and ended soon after the first token belongs to its beginning.
  const span = toFirst && first ? 1.3 * first : Math.max(timings.e2e_s, ...ends, 1e-9);
  const box = el("div", { class: "waterfall" },
    el("p", { class: "facts" }, ...facts(timings)),
    el("table", { "aria-label": `Phases of request ${timings.request_id}` },
      el("thead", {}, el("tr", {}, ...COLUMNS.map(([kind, name]) => el("th", { scope: "col", class: kind }, name)))),
      el("tbody", {}, ...timings.phases.map((phase) => row(phase, span, PHASES)),
        ...timings.beside.map((run) => row(run, span, BESIDE, true)))),
    el("p", { class: "faint sum" }));
  if (first !== null && first !== undefined) say(box.lastElementChild, sum(timings, first));
  return box;
}

function facts(timings) {
  const pairs = [
    ["request", timings.request_id], ["", timings.outcome],
    ["first token", seconds(timings.ttft_s)], ["whole", seconds(timings.e2e_s)],
    ["tokens", `${count(timings.num_prompt_tokens)} in, ${count(timings.num_output_tokens)} out`],
    ["cached", cached(timings)], ["attempts", count(timings.num_attempts)],
  ];
  return pairs.map(([name, value]) => el("span", {}, name ? el("span", { class: "faint" }, `${name} `) : null, el("b", {}, value)));
}

/** Say how many prompt tokens were not computed, and where they came from as far as that is told. */
export function cached({ num_cached_tokens: all, cached_by_tier: byTier = {} }) {
  const fetched = Object.entries(byTier).filter(([, tokens]) => tokens > 0);
  if (!fetched.length) return count(all);
  const own = all - fetched.reduce((sumOf, [, tokens]) => sumOf + tokens, 0);
  const places = [...(own > 0 ? [["device", own]] : []), ...fetched];
  return `${count(all)}: ${places.map(([place, tokens]) => `${place} ${count(tokens)}`).join(", ")}`;
}

/** Say whether what comes before the first token adds up to its time. */
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
