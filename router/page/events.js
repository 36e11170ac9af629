// What happened lately, the newest first.

import { byId, el, keyed, say, set } from "./dom.js";
import { clock, plural, short } from "./format.js";

const BAD = new Set(["down", "corrupted", "refused", "lost"]);
const WARNING = new Set(["replay", "draining", "leaving", "restarted", "gone", "tier"]);

/** Draw the events of the store. */
export function showEvents(store) {
  const events = [...store.events.values()].reverse();
  byId("no-events").hidden = events.length > 0;
  byId("events").hidden = !events.length;
  say(byId("no-events"), "Nothing happened yet: nodes that come and go, replays and refusals are told here.");
  say(byId("event-count"), events.length ? plural(events.length, "event") : "");
  keyed(byId("events"), events, (event) => event.id, make, update);
}

function make() {
  return el("li", {}, el("time", { class: "faint" }), el("span", { class: "kind" }),
    el("span", { class: "text" }, el("span"), el("span", { class: "mono faint" })));
}

function update(row, event) {
  const [time, kind, text] = row.children;
  set(row, "data-level", BAD.has(event.kind) ? "bad" : WARNING.has(event.kind) ? "warning" : "good");
  say(time, clock(event.at_unix_s));
  set(time, "datetime", new Date(event.at_unix_s * 1000).toISOString());
  say(kind, event.count > 1 ? `${event.kind} ×${event.count}` : event.kind);
  say(text.firstElementChild, event.text);
  say(text.lastElementChild, event.node ? ` ${short(event.node)}` : "");
}
