/* Owns the arithmetic of token times: percentiles, rates, bytes over time. Draws nothing. */

const KEPT = 1024;

export const modeName = ({ ops, graph }) => `${ops}, ${graph === "on" ? "graph" : "eager"}`;
export const sameMode = (a, b) => a.ops === b.ops && a.graph === b.graph;
export const show = (value, digits = value < 10 ? 2 : value < 100 ? 1 : 0) => (value === null ? "–" : value.toFixed(digits));
export const showBytes = (n) => (n < 1e6 ? `${(n / 1e3).toFixed(1)} kB` : n < 1e9 ? `${(n / 1e6).toFixed(1)} MB` : `${(n / 1e9).toFixed(2)} GB`);

/** The value at a share of the sorted ones, nearest rank; null of none. */
export function percentile(values, share) {
  const sorted = Float64Array.from(values).sort();
  return sorted.length ? sorted[Math.ceil(share * sorted.length) - 1] : null;
}

/** The gaps of one stretch in one mode; the last 1,024 count. */
export class Meter {
  gaps = [];
  #context = 0;

  add(ms, count, context) {
    for (let i = 0; i < count; i++) this.gaps.push(ms);
    this.gaps.splice(0, this.gaps.length - KEPT);
    this.#context = context;
  }

  /** p50, p99: ms; rate: tokens a second; gbps, share: bytes of a step over p50, and that over the datasheet's rate. */
  read(runtime) {
    const p50 = percentile(this.gaps, 0.5);
    if (p50 === null) return { p50, p99: null, rate: null, gbps: null, share: null };
    const seen = Math.min(this.#context, runtime.window ?? Infinity);
    const bytes = runtime.weight_bytes_per_token + seen * runtime.kv_bytes_per_position;
    const gbps = bytes / p50 / 1e6;
    const rate = (1e3 * this.gaps.length) / this.gaps.reduce((sum, ms) => sum + ms, 0);
    return { p50, p99: percentile(this.gaps, 0.99), rate, gbps, share: runtime.datasheet_gbps && gbps / runtime.datasheet_gbps };
  }
}
