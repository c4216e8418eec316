/* Owns the figures under the strip, and which mode tokens count for: the figures begin anew when it changes. */

import { $, say } from "./dom.js";
import { Meter, sameMode, show } from "./meter.js";
import { Strip } from "./strip.js";

const SHOW_MS = 200; // figures are for reading

export class Live {
  #strip = new Strip($("strip"));
  #meter = new Meter();
  #runtime = null;
  #due = null;

  /** Take what GET /v1/runtime told. */
  take(told) {
    if (!this.#runtime || !sameMode(this.#runtime, told)) this.#meter = new Meter();
    this.#runtime = told;
    this.#strip.floor = told.floor_ms;
    $("floor").hidden = told.floor_ms === null;
    say($("floor"), `${show(told.floor_ms)} ms: reading the weights at the datasheet's rate`);
    say($("bus-name"), told.datasheet_gbps ? "memory bus" : "memory");
    say($("bus-unit"), told.datasheet_gbps ? "%" : "GB/s");
  }

  /** `count` tokens have come, `ms` apart, at `context` positions; the mode they count for. */
  add(ms, count, context) {
    this.#strip.add(ms, count, this.#runtime);
    this.#meter.add(ms, count, context);
    this.#due ??= setTimeout(() => this.#show(), SHOW_MS);
    return this.#runtime;
  }

  /** An answer has ended. */
  rest() {
    this.#strip.rest();
    this.#show();
  }

  /** Draw again: the colours have changed. */
  redraw() {
    this.#strip.draw();
  }

  #show() {
    this.#due = null;
    const { p50, p99, rate, gbps, share } = this.#meter.read(this.#runtime);
    say($("p50"), show(p50));
    say($("p99"), show(p99));
    say($("rate"), show(rate));
    say($("bus"), share === null ? show(gbps) : show(100 * share, 0));
  }
}
