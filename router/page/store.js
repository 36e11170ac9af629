// What the page knows: the last overview, and the requests and events of all of them.

const MOST = 200;
const HISTORY = 120;
// The router's document may be a moment older than what it tells next.
const OVERLAP_S = 3;

const requestKey = (timings) => `${timings.request_id} ${timings.started_unix_s}`;

export class Store {
  constructor() {
    this.overview = null;
    this.recent = new Map(); // the newest last
    this.events = new Map();
    this.history = []; // one overview's numbers a second, for small curves
  }

  /** From when on the next overview is to tell requests and events. */
  get after() {
    return this.overview ? this.overview.now_unix_s - OVERLAP_S : 0;
  }

  /** Take up an overview. */
  take(overview) {
    this.overview = overview;
    for (const timings of overview.recent) this.recent.set(requestKey(timings), timings);
    for (const event of overview.events) this.tell(event);
    trim(this.recent);
    const { rates, histograms, num_in_flight, num_queued } = overview;
    this.history.push({
      requests: rates.requests, inFlight: num_in_flight, queued: num_queued,
      ttft: histograms.ttft.p50_s ?? 0, itl: histograms.itl.p50_s ?? 0, tokens: rates.generated_tokens,
    });
    if (this.history.length > HISTORY) this.history.shift();
  }

  /** Keep an event, of the router or of this page. One that was counted on moves to the end. */
  tell(event) {
    const known = this.events.get(event.id);
    if (known && known.count === event.count) return;
    this.events.delete(event.id);
    this.events.set(event.id, event);
    trim(this.events);
  }

  /** Requests that ended in the last minute and kept the limits, as [kept, all]. */
  goodput({ ttftS, itlS }) {
    const since = this.overview.now_unix_s - 60;
    const ended = [...this.recent.values()].filter(
      (timings) => timings.ended_unix_s > since && timings.outcome !== "cancelled");
    const isGood = (timings) => timings.outcome === "finished" && (timings.ttft_s ?? 0) <= ttftS
      && betweenTokens(timings) <= itlS;
    return [ended.filter(isGood).length, ended.length];
  }
}

/** The mean time between two tokens of a request. */
export function betweenTokens(timings) {
  const gaps = timings.num_output_tokens - 1;
  return gaps > 0 && timings.ttft_s !== null ? (timings.e2e_s - timings.ttft_s) / gaps : 0;
}

function trim(map) {
  for (const key of map.keys()) {
    if (map.size <= MOST) return;
    map.delete(key);
  }
}
