// Formats numbers for people.

export const NONE = "–";

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** 3 significant digits, without an exponent. */
function three(value) {
  if (value >= 100) return whole.format(value);
  return value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

/** A count: 7, 1,024, 12.3k, 4.56M. */
export function count(value) {
  if (value < 10000) return whole.format(value);
  return value < 1e6 ? `${three(value / 1e3)}k` : `${three(value / 1e6)}M`;
}

/** A rate per second: 0, 0.4, 12.5, 3,210. */
export function rate(value) {
  if (value < 0.05) return "0";
  return value < 10 ? value.toFixed(1) : count(value);
}

/** Bytes per second. */
export const bytesRate = (value) => `${bytes(value)}/s`;

/** Bytes: 512 B, 1.50 MB. */
export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  for (; value >= 1000 && at < units.length - 1; at++) value /= 1000;
  return `${at && value < 100 ? three(value) : whole.format(value)} ${units[at]}`;
}

/** A fraction in percent. */
export const percent = (part) => `${whole.format(100 * part)} %`;

/** A time in seconds, as s, ms or µs. */
export function seconds(value) {
  if (value === null || value === undefined) return NONE;
  if (value >= 0.9995) return value >= 100 ? `${whole.format(value)} s` : `${value.toFixed(2)} s`;
  const ms = value * 1000;
  if (ms >= 1) return `${ms >= 99.95 ? whole.format(ms) : ms.toFixed(1)} ms`;
  return ms === 0 ? "0 ms" : `${whole.format(ms * 1000)} µs`;
}

/** The time of day of a Unix time. */
export function clock(unixS) {
  return new Date(unixS * 1000).toLocaleTimeString([], { hour12: false });
}

/** A URL without its scheme. */
export const short = (url) => url.replace(/^https?:\/\//, "");

/** `1 request`, `2 requests`. */
export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
