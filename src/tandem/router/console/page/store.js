// The data of the page: the last overview, and the requests of all overviews.

const MOST = 200;
const HISTORY = 120;
// Parts of an overview may be older than its `now_unix_s`, so consecutive fetches overlap.
const OVERLAP_S = 3;

const requestKey = (timings) => `${timings.request_id} ${timings.started_unix_s}`;

export class Store {
  constructor() {
    this.overview = null;
    this.live = new Map(); // newest last, as in `recent`
    this.recent = new Map();
    this.history = []; // the numbers of each overview, for the small curves
  }

  /** The Unix time after which the next overview must include ended requests. */
  get after() {
    return this.overview ? this.overview.now_unix_s - OVERLAP_S : 0;
  }

  /** Store an overview. */
  take(overview) {
    this.overview = overview;
    this.live = new Map(overview.live.map((timings) => [requestKey(timings), timings]));
    for (const timings of overview.recent) this.recent.set(requestKey(timings), timings);
    trim(this.recent);
    const { rates, latencies, num_in_flight, num_queued } = overview;
    this.history.push({
      requests: rates.requests, inFlight: num_in_flight, queued: num_queued,
      ttft: latencies.ttft.p50_s ?? 0, itl: latencies.itl.p50_s ?? 0, tokens: rates.generated_tokens,
    });
    if (this.history.length > HISTORY) this.history.shift();
  }
}

function trim(map) {
  for (const key of map.keys()) {
    if (map.size <= MOST) return;
    map.delete(key);
  }
}
