/* Owns the race: the modes one after another on one prompt, a table of what each took, and its copy as text. */

import { setRuntime } from "./api.js";
import { $, el, say } from "./dom.js";
import { Meter, modeName, sameMode, show } from "./meter.js";
import { stream } from "./stream.js";

const TOKENS = 64;
const HEADS = ["mode", "first ms", "p50 ms", "p99 ms", "tok/s", "bus"];
const PROMPT = "Tell me about the sea.";

export class Race {
  #stop = null;
  #rows = []; // { mode, cells, result }
  #runtime = null;

  get running() {
    return this.#stop !== null;
  }

  stop() {
    this.#stop?.abort();
  }

  /** A row for each mode, so that nothing moves when figures come. */
  lay(runtime) {
    this.#runtime = runtime;
    this.#rows = runtime.modes.map((mode) => ({ mode, result: null, cells: HEADS.slice(1).map(() => el("td", { className: "number" }, "–")) }));
    const heads = HEADS.map((name, i) => el("th", { scope: "col", className: i ? "number" : "" }, name));
    const rows = this.#rows.map(({ mode, cells }) => {
      const name = el("th", { scope: "row", "data-mode": `${mode.ops} ${mode.graph}` }, modeName(mode));
      return el("tr", { className: mode.available ? "" : "absent", title: mode.reason ?? "" }, name, ...cells);
    });
    $("results").replaceChildren(el("thead", {}, el("tr", {}, ...heads)), el("tbody", {}, ...rows));
    const absent = runtime.modes.filter((mode) => !mode.available).length;
    say($("verdict"), absent ? `${absent} of the four cannot be played on this device.` : `${TOKENS} tokens each, greedy, one after another.`);
  }

  /** Play every mode the device has; back to the given one in the end. `live` and `switched` are told as they go. */
  async run({ ops, graph }, prompt, live, switched) {
    const before = { ops, graph };
    this.#stop = new AbortController();
    for (const row of this.#rows) this.#fill(row, null);
    try {
      for (const row of this.#rows.filter(({ mode }) => mode.available)) {
        const { ops, graph } = row.mode;
        switched(await setRuntime({ ops, graph }));
        this.#fill(row, await this.#heat(prompt ?? PROMPT, live));
        live.rest();
      }
      say($("verdict"), this.#verdict());
      $("copy").disabled = false;
    } catch (error) {
      if (!this.#stop.signal.aborted) throw error;
      say($("verdict"), "Stopped.");
    } finally {
      live.rest();
      this.#stop = null;
      await setRuntime(before).then(switched, () => {});
    }
  }

  async #heat(prompt, live) {
    const meter = new Meter();
    const messages = [{ role: "user", content: prompt }], fields = { temperature: 0, max_tokens: TOKENS, ignore_eos: true };
    const { firstMs } = await stream(this.#runtime.prompts, messages, fields, this.#stop.signal, ({ ms, count, context }) => {
      if (!count) return;
      live.add(ms, count, context);
      meter.add(ms, count, context);
    });
    return { firstMs, ...meter.read(this.#runtime) };
  }

  #fill(row, result) {
    row.result = result;
    const texts = result
      ? [show(result.firstMs), show(result.p50), show(result.p99), show(result.rate), result.share === null ? "–" : `${(100 * result.share).toFixed(0)} %`]
      : HEADS.slice(1).map(() => "–");
    row.cells.forEach((cell, i) => say(cell, texts[i]));
  }

  /** What fusing changed, in words, from the two rows that differ in nothing else. */
  #verdict() {
    const p50 = (ops, graph) => this.#rows.find(({ mode }) => sameMode(mode, { ops, graph })).result?.p50;
    const graph = ["on", "off"].find((each) => p50("fused", each) && p50("unfused", each));
    if (!graph) return "No two modes that differ in fusing alone have figures to compare.";
    const [fused, unfused] = [p50("fused", graph), p50("unfused", graph)];
    const { layers, launches } = this.#runtime;
    const fewer = layers * (launches.unfused.length - launches.fused.length);
    const change = `${show(Math.abs(unfused - fused))} ms a token ${unfused > fused ? "less" : "more"}`;
    return `Fusing took ${fewer} launches out of each token: ${change} (${show(fused)} for ${show(unfused)}, graph ${graph}). The weights read are the same.`;
  }

  /** The table in Markdown, with what it was measured on. */
  get text() {
    const { model, device_name, dtype } = this.#runtime;
    const rows = this.#rows.map(({ mode, cells }) => [modeName(mode), ...cells.map((cell) => cell.textContent)]);
    const line = (cells) => `| ${cells.join(" | ")} |`;
    const table = [HEADS, HEADS.map((_, i) => (i ? "---:" : "---")), ...rows].map(line).join("\n");
    return `${model}, ${dtype}, ${device_name}; ${TOKENS} tokens greedy, batch 1, timed in the browser\n\n${table}\n`;
  }
}
