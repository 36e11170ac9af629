// The tiers behind a node's prefix cache (host memory, disk, store): their fill, hit rate and state.

import { el, keyed, setText, set } from "./dom.js";
import { bytes, count, percent } from "./format.js";

const words = (state) => state.replaceAll("_", " ");
const fill = (tier) => (tier.limit_bytes ? Math.min(1, tier.num_bytes / tier.limit_bytes) : null);
const held = (tier) => (tier.limit_bytes ? `${bytes(tier.num_bytes)} of ${bytes(tier.limit_bytes)}` : bytes(tier.num_bytes));
const hits = (tier, load) => percent(load.prompt_tokens ? tier.hit_tokens / load.prompt_tokens : 0);

/** Draw the tiers of a node into `list`, and return whether one of them is not up. */
export function showTiers(list, { load }) {
  list.hidden = !load.tiers.length;
  keyed(list, load.tiers, (tier) => tier.name, make, (item, tier) => update(item, tier, load));
  return load.tiers.some((tier) => tier.state !== "up");
}

function make() {
  return el("span", { class: "tier" }, el("span", { class: "tier-name" }), el("span", { class: "gauge" }, el("i")), el("span", { class: "share" }));
}

function update(item, tier, load) {
  const [name, gauge, share] = item.children;
  set(item, "data-state", tier.state);
  setText(name, tier.name);
  gauge.hidden = fill(tier) === null;
  gauge.firstElementChild.style.width = `${100 * (fill(tier) ?? 0)}%`;
  setText(share, tier.state === "up" ? `${hits(tier, load)} hits` : words(tier.state));
  item.title = spokenTier(tier, load);
}

/** Return a description of a tier for screen readers. */
function spokenTier(tier, load) {
  const full = fill(tier);
  return `${tier.name} ${words(tier.state)}, ${full === null ? held(tier) : `${percent(full)} full`}, `
    + `${hits(tier, load)} of prompt tokens`;
}

/** Return the descriptions of all tiers of a node. */
export const spokenTiers = ({ load }) => load.tiers.map((tier) => `, tier ${spokenTier(tier, load)}`).join("");

/** Return all reported values of a node's tiers, as pairs of name and value. */
export function tierFacts({ load }) {
  return load.tiers.flatMap((tier) => [
    [tier.name, `${words(tier.state)}${tier.store ? ", shared" : ""}`, "begins"],
    [`${tier.name} holds`, held(tier)],
    [`${tier.name} hits`, `${count(tier.hit_tokens)} tokens, ${hits(tier, load)}`],
    [`${tier.name} misses`, `${count(tier.missed_tokens)} tokens, ${count(tier.late_tokens)} late`],
    [`${tier.name} cost per token`, tier.token_cost < 0 ? "not measured yet" : `${percent(tier.token_cost)} of computing it`],
    [`${tier.name} moved`, `${bytes(tier.put_bytes)} in, ${bytes(tier.got_bytes)} out`],
    [`${tier.name} evicted`, count(tier.num_evicted)],
    [`${tier.name} errors`, `${count(tier.num_failures)} failed, ${count(tier.num_corrupted)} corrupted`],
  ]);
}
