// Requests to the router. Its API key, if it requires one, stays in this tab.

const KEY = "tandem-key";
const TIMEOUT_MS = 5000;

/** The router requires an API key, or rejected the one that was sent. */
export class KeyRequired extends Error {
  constructor(hadKey) {
    super("the router requires an API key");
    this.hadKey = hadKey;
  }
}

export const keepKey = (key) => sessionStorage.setItem(KEY, key);

function headers() {
  const key = sessionStorage.getItem(KEY);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function answered(response) {
  if (response.status === 401) throw new KeyRequired(Boolean(sessionStorage.getItem(KEY)));
  if (response.ok) return response;
  const text = await response.text();
  let message = `it answers with status ${response.status}`;
  try {
    message = JSON.parse(text).error.message;
  } catch {
    // The response is not the router's, for example a proxy's: report its status.
  }
  throw new Error(message);
}

/** Fetch the overview, with the requests that ended after `after`. */
export async function overview(after) {
  const signal = AbortSignal.timeout(TIMEOUT_MS);
  const response = await fetch(`/overview?after=${after}`, { headers: headers(), signal, cache: "no-store" });
  return (await answered(response)).json();
}

/** Yield the events of a streamed answer. */
export async function* stream(path, body, signal) {
  const response = await answered(await fetch(path, {
    method: "POST",
    headers: { ...headers(), "Content-Type": "application/json", "X-Tandem-Timings": "1" },
    body: JSON.stringify(body),
    signal,
  }));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const data = line.startsWith("data:") ? line.slice(5).trim() : "";
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}
