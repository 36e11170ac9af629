// Lines between the nodes of each pair: more prompt tokens per second make a line thicker.

import { byId, keyed, set, svg } from "./dom.js";
import { plural, rate, short } from "./format.js";

const MOST_PX = 9;
// Animated dots take CPU time in the browser: with more lines than this, none is animated.
const MOST_MOVING = 48;

/** Draw the pairs of an overview, and highlight those of the chosen node. */
export function drawLines(overview, chosen) {
  const lines = byId("lines");
  const places = cardPlaces();
  const pairs = overview.pairs.filter((pair) => places.has(pair.prefill) && places.has(pair.decode));
  const busy = pairs.filter(isBusy);
  const most = Math.max(1, ...busy.map((pair) => pair.prompt_tokens_per_s));
  const box = byId("field").getBoundingClientRect();
  set(lines, "viewBox", `0 0 ${box.width} ${box.height}`);
  lines.classList.toggle("is-moving", busy.length <= MOST_MOVING);
  keyed(lines, pairs.sort((one, other) => isBusy(one) - isBusy(other)), (pair) => `${pair.prefill} ${pair.decode}`, make,
    (group, pair) => {
      const path = curve(places.get(pair.prefill).right, places.get(pair.decode).left);
      const width = 1.25 + (MOST_PX - 1.25) * Math.sqrt(pair.prompt_tokens_per_s / most);
      for (const line of [group.children[0], group.children[1]]) set(line, "d", path);
      group.children[0].style.strokeWidth = `${isBusy(pair) ? width : 1}px`;
      group.classList.toggle("is-busy", isBusy(pair));
      group.classList.toggle("is-faint", chosen !== null && chosen !== pair.prefill && chosen !== pair.decode);
      group.lastElementChild.textContent = `${short(pair.prefill)} feeds ${short(pair.decode)}: `
        + `${plural(pair.num_running, "request")}, ${rate(pair.prompt_tokens_per_s)} prompt tokens/s`;
    });
}

const isBusy = (pair) => pair.num_running > 0 || pair.prompt_tokens_per_s >= 1;

const make = () => svg("g", {}, svg("path", { class: "band" }), svg("path", { class: "dots" }), svg("title"));

/** Return the points at which the lines of each card start and end. */
function cardPlaces() {
  const origin = byId("field").getBoundingClientRect();
  const places = new Map();
  for (const card of document.querySelectorAll(".node")) {
    const box = card.getBoundingClientRect();
    const y = box.top - origin.top + box.height / 2;
    places.set(card.dataset.key, {
      left: { x: box.left - origin.left, y },
      right: { x: box.right - origin.left, y },
    });
  }
  return places;
}

function curve(from, to) {
  const bend = (to.x - from.x) / 2;
  return `M${from.x.toFixed(1)},${from.y.toFixed(1)} C${(from.x + bend).toFixed(1)},${from.y.toFixed(1)} `
    + `${(to.x - bend).toFixed(1)},${to.y.toFixed(1)} ${to.x.toFixed(1)},${to.y.toFixed(1)}`;
}
