// The nodes: prefill nodes on the left, decode nodes on the right, and pairs as lines between them.

import { byId, el, keyed, listKeys, oneTabStop, setText, set } from "./dom.js";
import { bytesRate, count, plural, rate } from "./format.js";
import { drawLines } from "./lines.js";
import { showTiers, spokenTiers, tierFacts } from "./tiers.js";

// With more nodes of one role, each node is a single line instead of a card.
const MOST_CARDS = 8;
export const PAGE_STATES = ["held", "granted", "quarantined", "cached", "free"];

let chosen = null;
let shown = null;

const lists = () => [byId("prefills"), byId("decodes")];

/** Prepare the lists for keyboard and mouse. `draw` is called when a different node is chosen. */
export function prepareNodes(draw) {
  const choose = (url) => {
    chosen = chosen === url ? null : url;
    draw();
  };
  lists().forEach((list, side) => listKeys(list, choose, (step, at) => {
    const other = lists()[side + step]?.children;
    return other?.[Math.min(at, other.length - 1)] ?? null;
  }));
  byId("field").addEventListener("keydown", (event) => {
    if (event.key === "Escape" && chosen) choose(chosen);
  });
  for (const state of PAGE_STATES) {
    byId("page-legend").append(el("li", {}, el("i", { class: `swatch page-${state}` }), state));
  }
  new ResizeObserver(() => shown && drawLines(shown, chosen)).observe(byId("field"));
}

/** Draw nodes and pairs. */
export function showNodes(overview) {
  shown = overview;
  const { nodes } = overview;
  if (!nodes.some((node) => node.url === chosen)) chosen = null;
  const roles = [nodes.filter((node) => node.role === "prefill"), nodes.filter((node) => node.role !== "prefill")];
  byId("field").classList.toggle("is-dense", Math.max(...roles.map((one) => one.length)) > MOST_CARDS);
  byId("field").hidden = !nodes.length;
  byId("no-nodes").hidden = Boolean(nodes.length);
  setText(byId("no-nodes"), "No node is known yet. Start `tandem prefill` and `tandem decode` with `--router` set to "
    + "this router's URL, or add them with POST /nodes.");
  setText(byId("prefill-title"), `${plural(roles[0].length, "prefill node")}`);
  setText(byId("decode-title"), `${plural(roles[1].length, "decode node")}`);
  lists().forEach((list, side) => {
    keyed(list, roles[side], (node) => node.url, makeCard, updateCard);
    oneTabStop(list);
  });
  drawLines(overview, chosen);
  showDetail(nodes.find((node) => node.url === chosen));
}

function makeCard() {
  return el("li", { role: "option", class: "node", tabindex: "-1" },
    el("span", { class: "name" }, el("i", { class: "dot" }), el("span", { class: "mono id" }), el("span", { class: "zone" })),
    el("span", { class: "speed" }),
    el("span", { class: "pages" }, ...PAGE_STATES.map((state) => el("i", { class: `page-${state}` }))),
    el("span", { class: "tiers" }), el("span", { class: "work" }));
}

function updateCard(card, node) {
  const { load } = node;
  const isUp = node.state === "up" || node.state === "draining";
  const [name, speedOf, pages, tiers, work] = card.children;
  set(card, "data-state", node.state);
  set(card, "aria-selected", node.url === chosen);
  set(card, "aria-label", spoken(node));
  setText(name.children[1], node.id);
  setText(name.children[2], node.zone);
  setText(speedOf, isUp ? speed(node) : node.state);
  PAGE_STATES.forEach((state, at) => {
    pages.children[at].style.flexGrow = load.num_pages && isUp ? load[`pages_${state}`] / load.num_pages : 0;
  });
  const isTroubled = showTiers(tiers, node);
  tiers.hidden ||= !isUp;
  set(card, "data-tiers", isUp && isTroubled ? "troubled" : "");
  setText(work, isUp ? workOf(node) : node.reason || "not reached yet");
  card.title = `${node.url}${node.reason ? `: ${node.reason}` : ""}`;
}

function speed({ role, rates }) {
  return role === "prefill" ? `${rate(rates.prompt_tokens)} tok/s in` : `${rate(rates.generated_tokens)} tok/s`;
}

function workOf({ role, state, load, rates }) {
  const parts = [`${count(load.num_running)} running`, `${count(load.num_waiting)} waiting`];
  if (load.num_transferring) parts.push(`${count(load.num_transferring)} moving`);
  const moved = role === "prefill" ? rates.pushed_bytes : rates.received_bytes;
  if (moved >= 1) parts.push(`${bytesRate(moved)} ${role === "prefill" ? "out" : "in"}`);
  if (state === "draining") parts.push("draining");
  return parts.join(" · ");
}

function spoken(node) {
  const { load } = node;
  const pages = PAGE_STATES.map((state) => `${load[`pages_${state}`]} ${state}`).join(", ");
  return `${node.role || "node"} ${node.id}, ${node.state}${node.reason ? `, ${node.reason}` : ""}, ${workOf(node)}, `
    + `${speed(node)}, pages: ${pages}${spokenTiers(node)}`;
}

function showDetail(node) {
  const detail = byId("node-detail");
  detail.hidden = !node;
  if (!node) return;
  const { load, rates } = node;
  const cached = load.prompt_tokens ? `${Math.round((100 * load.cached_tokens) / load.prompt_tokens)} %` : "0 %";
  const facts = [
    ["URL", node.url], ["state", node.reason ? `${node.state}: ${node.reason}` : node.state], ["zone", node.zone || "none"],
    ["requests from this router", count(node.in_flight_requests)],
    ["running", load.max_running ? `${count(load.num_running)} of ${count(load.max_running)}` : count(load.num_running)],
    ["waiting", count(load.num_waiting)], ["moving", count(load.num_transferring)],
    ...PAGE_STATES.map((state) => [`pages ${state}`, `${count(load[`pages_${state}`])} of ${count(load.num_pages)}`]),
    ["page", plural(load.page_size, "token")],
    ["prompt tokens", `${count(load.prompt_tokens)}, ${rate(rates.prompt_tokens)}/s`], ["from cache", cached],
    ["generated tokens", `${count(load.generated_tokens)}, ${rate(rates.generated_tokens)}/s`],
    ["pushed", bytesRate(rates.pushed_bytes)], ["received", bytesRate(rates.received_bytes)],
    ["retracted", count(load.num_retracted)], ["failed", count(load.num_failed)], ["corrupted", count(load.num_corrupted)],
    ...tierFacts(node),
  ];
  keyed(detail, facts, ([name]) => name,
    ([name, , kind = ""]) => el("div", { class: `fact ${kind}` }, el("span", { class: "faint" }, name), el("b")),
    (fact, [, value]) => setText(fact.lastElementChild, value));
  detail.setAttribute("aria-label", `Details of ${node.id}`);
}
