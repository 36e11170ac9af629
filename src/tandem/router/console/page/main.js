// Fetches the router's overview once a second and draws all parts of the page.

import { KeyRequired, keepKey, overview } from "./api.js";
import { byId, setText } from "./dom.js";
import { clock, plural } from "./format.js";
import { showHeadline } from "./headline.js";
import { prepareKeys } from "./keys.js";
import { prepareNodes, showNodes } from "./nodes.js";
import { preparePlayground } from "./playground.js";
import { prepareRequests, showRequests } from "./requests.js";
import { Store } from "./store.js";

const INTERVAL_MS = 1000;
// A hidden tab fetches less often.
const HIDDEN_INTERVAL_MS = 10000;

const store = new Store();
let lostAt = null;
let isPaused = false;
let isAsking = false;
let timer = 0;

async function turn() {
  if (isAsking) return;
  clearTimeout(timer);
  isAsking = true;
  try {
    store.take(await overview(store.after));
    found();
    if (!isPaused) draw();
  } catch (error) {
    if (error instanceof KeyRequired) return askForKey(error.hadKey);
    lost(error);
  } finally {
    isAsking = false;
  }
  timer = setTimeout(turn, document.hidden ? HIDDEN_INTERVAL_MS : INTERVAL_MS);
}

function draw() {
  const seen = store.overview;
  if (!seen) return;
  setText(byId("model"), [seen.model, ...(seen.other_models ?? [])].join(", "));
  setText(byId("health"), seen.detail);
  byId("health").dataset.serving = seen.is_serving;
  showHeadline(store);
  showNodes(seen);
  showRequests(store);
  const silent = seen.silent_workers.length ? `, ${seen.silent_workers.length} silent` : "";
  setText(byId("version"), `Tandem ${seen.version}`);
  setText(byId("workers"), `${plural(seen.num_workers, "edge worker")}${silent}`);
}

/** Show that the router answered. */
function found() {
  document.body.dataset.connection = "live";
  byId("banner").hidden = true;
  lostAt = null;
}

/** Show that the router did not answer, or answered with an error. */
function lost(error) {
  lostAt ??= Date.now() / 1000;
  document.body.dataset.connection = "lost";
  byId("banner").hidden = false;
  const why = error.name === "TypeError" || error.name === "TimeoutError" ? "it cannot be reached" : error.message;
  setText(byId("banner"), `The router has not answered since ${clock(lostAt)}: ${why}. This page shows older data and retries every second.`);
}

function askForKey(isWrong) {
  byId("key-wrong").hidden = !isWrong;
  document.body.dataset.connection = "locked";
  if (!byId("key-dialog").open) byId("key-dialog").showModal();
}

function prepareKeyDialog() {
  byId("key-dialog").addEventListener("cancel", (event) => event.preventDefault());
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    keepKey(byId("key").value);
    byId("key").value = "";
    byId("key-dialog").close();
    turn();
  });
}

function changeTheme() {
  const root = document.documentElement;
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  localStorage.setItem("tandem-theme", root.dataset.theme);
}

function changePause() {
  isPaused = !isPaused;
  byId("pause").setAttribute("aria-pressed", isPaused);
  setText(byId("pause"), isPaused ? "Resume" : "Pause");
  if (!isPaused) draw();
}

prepareNodes(draw);
prepareRequests(draw);
prepareKeyDialog();
preparePlayground(() => store.overview?.model ?? "", askForKey);
prepareKeys({ theme: changeTheme, pause: changePause });
byId("theme").addEventListener("click", changeTheme);
byId("pause").addEventListener("click", changePause);
document.addEventListener("visibilitychange", () => document.hidden || document.body.dataset.connection === "locked" || turn());
turn();
