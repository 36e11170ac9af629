// Keyboard shortcuts, and the list that shows them.

import { byId, el } from "./dom.js";

const focusOn = (id) => () => {
  const place = byId(id);
  place.scrollIntoView({ block: "nearest" });
  (place.querySelector("[role=option][tabindex='0']") ?? place).focus();
};

const isTyping = (target) => target.matches("input:not([type=radio]), textarea, select");

/** Listen for shortcuts; `actions` has the functions that change the page. */
export function prepareKeys(actions) {
  const shortcuts = {
    "?": ["this list", () => byId("help").showModal()],
    n: ["nodes: arrows move, Enter shows details", focusOn("nodes")],
    r: ["recent requests: arrows move, Enter shows details", focusOn("recent")],
    p: ["playground: Ctrl+Enter sends, Esc stops", focusOn("prompt")],
    t: ["dark or light theme", actions.theme],
    ".": ["pause or resume updates", actions.pause],
  };
  const rows = [...Object.entries(shortcuts).map(([key, [does]]) => [key, does]), ["Esc", "closes what is open"]];
  byId("keys").append(...rows.map(([key, does]) => el("div", {}, el("dt", {}, el("kbd", {}, key)), el("dd", {}, does))));
  byId("help-open").addEventListener("click", shortcuts["?"][1]);
  document.addEventListener("keydown", (event) => {
    const isOurs = !(event.ctrlKey || event.metaKey || event.altKey || isTyping(event.target) || document.querySelector("dialog[open]"));
    const shortcut = isOurs && shortcuts[event.key];
    if (!shortcut) return;
    event.preventDefault();
    shortcut[1]();
  });
}
