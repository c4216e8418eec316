/* Owns the conversation: its turns, the answer as it grows, stop and retry. Does not own how a stream is read (api). */

import { ApiError, chat } from "./api.js";
import { $, el, say } from "./dom.js";
import { modeName, show } from "./meter.js";

const NEAR = 48; // pixels from the end at which the log follows the text

export class Chat {
  #turns = []; // { role, content }
  #log = $("log");
  #stop = null;
  #live;

  /** @param live told of each token; see Live */
  constructor(live) {
    this.#live = live;
    this.#log.addEventListener("scroll", () => ($("latest").hidden = this.#atEnd()));
    $("latest").addEventListener("click", () => this.#toEnd());
  }

  get streaming() {
    return this.#stop !== null;
  }

  /** The last thing the user asked, or null. */
  get asked() {
    return this.#turns.findLast((turn) => turn.role === "user")?.content ?? null;
  }

  stop() {
    this.#stop?.abort();
  }

  clear() {
    this.stop();
    this.#turns = [];
    for (const article of this.#log.querySelectorAll("article")) article.remove();
    $("welcome").hidden = false;
  }

  /** Ask; `fields` are the request's but for its messages. */
  async send(text, fields, system) {
    $("welcome").hidden = true;
    this.#turns.push({ role: "user", content: text });
    this.#log.append(el("article", { className: "user", "aria-label": "You" }, el("p", { className: "text" }, text)));
    await this.#answer(fields, system);
  }

  /** Ask the last question again in place of its answer. */
  async retry(fields, system) {
    while (this.#turns.length && this.#turns.at(-1).role !== "user") this.#turns.pop();
    this.#log.lastElementChild.remove();
    await this.#answer(fields, system);
  }

  async #answer(fields, system) {
    const stop = (this.#stop = new AbortController()), turns = this.#turns;
    const words = document.createTextNode("");
    const note = el("p", { className: "note" }, "waiting for the first token");
    const article = el("article", { className: "answer", "aria-label": "Answer" }, el("p", { className: "text" }, words), note);
    for (const button of this.#log.querySelectorAll(".again")) button.remove();
    this.#log.append(article);
    this.#log.setAttribute("aria-busy", "true");
    this.#toEnd();
    const modes = new Set();
    let fresh = "", due = false, error = null, told = null, tokens = 0;
    const write = () => {
      due = false;
      const follow = this.#atEnd();
      words.appendData(fresh);
      if (words.data) say(note, ""); // its line stays
      fresh = "";
      if (follow) this.#toEnd();
    };
    const onText = (text) => {
      fresh += text;
      if (!due) due = requestAnimationFrame(write); // once a frame: tokens may come faster than the screen
    };
    const onTokens = (ms, count, context) => {
      tokens += count;
      modes.add(modeName(this.#live.add(ms, count, context)));
    };
    const messages = [...(system ? [{ role: "system", content: system }] : []), ...turns];
    const began = performance.now();
    try {
      told = await chat({ ...fields, messages }, stop.signal, onText, onTokens);
    } catch (caught) {
      error = caught;
    }
    const seconds = ((performance.now() - began) / 1e3).toFixed(1);
    cancelAnimationFrame(due);
    write();
    this.#live.rest();
    this.#stop = null;
    this.#log.removeAttribute("aria-busy");
    if (words.data) turns.push({ role: "assistant", content: words.data });
    const count = told ? `${told.tokens} tokens` : `ended after ${tokens + 1} tokens`;
    const facts = [`${count} in ${seconds} s`, told && `first after ${show(told.firstMs)} ms`, [...modes].join(", then ")];
    say(note, told || tokens ? facts.filter(Boolean).join(" · ") : "");
    if (error && !stop.signal.aborted) {
      if (!(error instanceof ApiError)) console.error(error);
      const why = error instanceof ApiError ? error.message : "The page made a mistake while it read the answer.";
      article.append(el("p", { className: "error", role: "alert" }, why));
    }
    article.append(el("button", { type: "button", className: "quiet again" }, error ? "Try again" : "Another answer"));
    this.#toEnd();
    if (error?.status === 401) throw error;
  }

  #atEnd() {
    return this.#log.scrollHeight - this.#log.scrollTop - this.#log.clientHeight < NEAR;
  }

  #toEnd() {
    this.#log.scrollTop = this.#log.scrollHeight;
  }
}
