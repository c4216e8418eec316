/* Owns the conversation: its turns, the answer as it grows, stop and retry. Does not own how a stream is read (api). */

import { ApiError } from "./api.js";
import { $, el, say } from "./dom.js";
import { modeName, show } from "./meter.js";
import { stream } from "./stream.js";

const NEAR = 48; // pixels from the end at which the log follows the text

const log = $("log");
const atEnd = () => log.scrollHeight - log.scrollTop - log.clientHeight < NEAR;
const toEnd = () => (log.scrollTop = log.scrollHeight);

/** One answer on the page, written once a frame: tokens may come faster than the screen. */
class Answer {
  #words = document.createTextNode("");
  #note = el("p", { className: "note" }, "waiting for the first token");
  #article = el("article", { className: "answer", "aria-label": "Answer" }, el("p", { className: "text" }, this.#words), this.#note);
  #fresh = "";
  #due = 0;

  constructor() {
    for (const button of log.querySelectorAll(".again")) button.remove();
    log.append(this.#article);
    log.setAttribute("aria-busy", "true");
    toEnd();
  }

  get text() {
    return this.#words.data + this.#fresh;
  }

  add(text) {
    this.#fresh += text;
    this.#due ||= requestAnimationFrame(() => this.#write());
  }

  /** @param {string} note what it took @param {string?} error what went wrong, in words @param {boolean} whole */
  end(note, error, whole) {
    cancelAnimationFrame(this.#due);
    this.#write();
    log.removeAttribute("aria-busy");
    say(this.#note, note);
    if (error) this.#article.append(el("p", { className: "error", role: "alert" }, error));
    this.#article.append(el("button", { type: "button", className: "quiet again" }, whole ? "Another answer" : "Try again"));
    toEnd();
  }

  #write() {
    const follow = atEnd();
    this.#words.appendData(this.#fresh);
    if (this.#fresh) say(this.#note, ""); // its line stays
    this.#fresh = "";
    this.#due = 0;
    if (follow) toEnd();
  }
}

export class Chat {
  #turns = []; // { role, content }
  #stop = null;
  #live;

  /** @param live told of each token; see Live */
  constructor(live) {
    this.#live = live;
    log.addEventListener("scroll", () => ($("latest").hidden = atEnd()));
    $("latest").addEventListener("click", toEnd);
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
    for (const article of log.querySelectorAll("article")) article.remove();
    $("welcome").hidden = false;
  }

  /** Ask; `prompts` is what the model takes, `fields` are the request's but for its messages. */
  async send(text, prompts, fields, system) {
    $("welcome").hidden = true;
    if (this.#turns.at(-1)?.role === "user") this.#turns.pop(); // what got no answer is no part of the talk
    this.#turns.push({ role: "user", content: text });
    log.append(el("article", { className: "user", "aria-label": "You" }, el("p", { className: "text" }, text)));
    await this.#answer(prompts, fields, system);
  }

  /** Ask the last question again in place of its answer. */
  async retry(prompts, fields, system) {
    if (this.#turns.at(-1).role === "assistant") this.#turns.pop();
    log.lastElementChild.remove();
    await this.#answer(prompts, fields, system);
  }

  async #answer(prompts, fields, system) {
    const stop = (this.#stop = new AbortController()), turns = this.#turns, answer = new Answer(), modes = new Set();
    const messages = [...(system ? [{ role: "system", content: system }] : []), ...turns];
    const began = performance.now();
    let gaps = 0, told = null, error = null;
    try {
      told = await stream(prompts, messages, fields, stop.signal, ({ text, ms, count, context }) => {
        if (text) answer.add(text);
        if (!count) return;
        gaps += count;
        modes.add(modeName(this.#live.add(ms, count, context)));
      });
    } catch (caught) {
      error = stop.signal.aborted ? null : caught;
    }
    const seconds = ((performance.now() - began) / 1e3).toFixed(1);
    const count = told ? `${told.tokens} tokens` : `ended after ${gaps + 1} tokens`;
    const facts = [`${count} in ${seconds} s`, told && `first after ${show(told.firstMs)} ms`, [...modes].join(", then ")];
    const slip = error && !(error instanceof ApiError);
    answer.end(told || gaps ? facts.filter(Boolean).join(" · ") : "", slip ? "The page failed to read the answer." : error?.message, told);
    if (answer.text) turns.push({ role: "assistant", content: answer.text });
    this.#stop = null;
    this.#live.rest();
    if (slip || error?.status === 401) throw error;
  }
}
