// Sends a prompt, and shows the answer as it streams and the phases of its time.

import { KeyRequired, stream } from "./api.js";
import { byId, el, setText } from "./dom.js";
import { plural, rate, seconds } from "./format.js";
import { waterfall } from "./waterfall.js";

let running = null;

/** Prepare the form. `askForKey` is called when the router requires a key; `model` returns the model's name. */
export function preparePlayground(model, askForKey) {
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!running) ask(model(), askForKey);
  });
  byId("ask").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    byId("ask").requestSubmit();
  });
  byId("stop").addEventListener("click", stop);
  byId("ask").closest("section").addEventListener("keydown", (event) => {
    if (event.key === "Escape") stop();
  });
}

const stop = () => running?.abort();

async function ask(model, askForKey) {
  const prompt = byId("prompt").value;
  if (!prompt.trim()) return byId("prompt").focus();
  const turn = new AbortController();
  running = turn;
  const answer = el("span");
  byId("answer").replaceChildren(answer);
  byId("answer-waterfall").replaceChildren();
  const counted = { started: performance.now(), firstS: null, tokens: 0, timings: null, id: "" };
  working(true);
  setText(byId("answer-status"), "Waiting for the first token…");
  try {
    const isChat = document.querySelector("[name=mode]:checked").value === "chat";
    const path = isChat ? "/v1/chat/completions" : "/v1/completions";
    for await (const event of stream(path, body(model, prompt, isChat), turn.signal)) take(event, answer, counted);
    setText(byId("answer-status"), summary(counted));
  } catch (error) {
    if (error instanceof KeyRequired) askForKey(error.hadKey);
    const isStopped = error.name === "AbortError";
    setText(byId("answer-status"), isStopped ? `Stopped. ${summary(counted)}` : `It failed: ${error.message}`);
  } finally {
    running = null;
    working(false);
  }
  if (counted.timings) byId("answer-waterfall").replaceChildren(waterfall(counted.timings));
}

function body(model, prompt, isChat) {
  return {
    model,
    ...(isChat ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
    temperature: Number(byId("temperature").value),
    max_tokens: Math.max(1, Number(byId("max-tokens").value) || 1),
    stream: true,
    stream_options: { include_usage: true },
  };
}

function take(event, answer, counted) {
  if (event.error) throw new Error(event.error.message);
  if (event.timings) counted.timings = event.timings;
  if (event.usage) counted.tokens = event.usage.completion_tokens;
  const [choice] = event.choices ?? [];
  const text = choice?.delta?.content ?? choice?.text ?? "";
  if (!text) return;
  counted.firstS ??= (performance.now() - counted.started) / 1000;
  answer.append(text);
  byId("answer").scrollTop = byId("answer").scrollHeight;
  setText(byId("answer-status"), `First token after ${seconds(counted.firstS)}…`);
}

function summary({ started, firstS, tokens }) {
  if (firstS === null) return "No token arrived.";
  const allS = (performance.now() - started) / 1000;
  const first = `First token after ${seconds(firstS)}, all after ${seconds(allS)}, measured in this browser`;
  return tokens ? `${plural(tokens, "token")}, ${rate(tokens / allS)} per second. ${first}.` : `${first}.`;
}

function working(isWorking) {
  byId("send").disabled = isWorking;
  byId("stop").disabled = !isWorking;
  byId("answer").setAttribute("aria-busy", isWorking);
}
