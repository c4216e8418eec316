/* Owns the strip: one bar a token, its height the milliseconds since the one before, its colour the mode it was played in. */

import { modeName, percentile, sameMode, show } from "./meter.js";

const BAR = 4, GAP = 1, LEFT = 34, TOP = 16, BOTTOM = 6;

/** The next of 1, 2, 3, 4, 5, 6, 8, 10, 20 ... at or above a value. */
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 3, 4, 5, 6, 8, 10].find((step) => step * power >= value) * power;
}

export class Strip {
  #canvas;
  #bars = []; // { ms, mode } or null between two answers
  #floor = null;
  #due = false;

  constructor(canvas) {
    this.#canvas = canvas;
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  /** Milliseconds the memory bus needs at least; null: not known. */
  set floor(ms) {
    if (this.#floor === ms) return;
    this.#floor = ms;
    this.draw();
  }

  add(ms, count, mode) {
    for (let i = 0; i < count; i++) this.#bars.push({ ms, mode });
    this.#bars.splice(0, this.#bars.length - 2000);
    this.draw();
  }

  /** A space behind an answer. */
  rest() {
    if (this.#bars.at(-1)) this.#bars.push(null);
  }

  /** Draw at the next frame. */
  draw() {
    if (this.#due) return;
    this.#due = true;
    requestAnimationFrame(() => {
      this.#due = false;
      this.#paint();
    });
  }

  #paint() {
    const { clientWidth: width, clientHeight: height } = this.#canvas;
    const ratio = devicePixelRatio, css = getComputedStyle(this.#canvas), color = (name) => css.getPropertyValue(name);
    this.#canvas.width = width * ratio;
    this.#canvas.height = height * ratio;
    const pen = this.#canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = `11px ${css.fontFamily}`;
    const shown = this.#bars.slice(-Math.floor((width - LEFT) / (BAR + GAP)));
    const values = shown.filter(Boolean).map((bar) => bar.ms);
    const top = roundUp(Math.max(0.1, this.#floor ?? 0, 1.1 * (percentile(values, 0.98) ?? 10)));
    const base = height - BOTTOM, y = (ms) => base - (ms / top) * (base - TOP);
    pen.textAlign = "right";
    for (const ms of [0, top / 2, top]) {
      pen.fillStyle = color("--muted");
      pen.fillText(ms, LEFT - 6, y(ms) + 4);
      pen.fillStyle = color("--line");
      pen.fillRect(LEFT, Math.round(y(ms)), width - LEFT, 1);
    }
    pen.textAlign = "left";
    let before = null;
    shown.forEach((bar, i) => {
      if (!bar) return;
      const x = LEFT + i * (BAR + GAP), tall = bar.ms > top;
      pen.fillStyle = color(`--${bar.mode.ops}-${bar.mode.graph}`);
      pen.fillRect(x, tall ? TOP : y(bar.ms), BAR, base - (tall ? TOP : y(bar.ms)));
      if (tall) pen.clearRect(x - 1, TOP + 6, BAR + 2, 3); // a broken bar goes on past the top
      if (before && !sameMode(before, bar.mode)) {
        const name = modeName(bar.mode);
        pen.clearRect(x - 1, 0, pen.measureText(name).width + 8, TOP - 2); // the newer name stands over the older
        pen.fillStyle = color("--ink");
        pen.fillRect(x - 1, 0, 1, base);
        pen.fillText(name, x + 4, 10);
      }
      before = bar.mode;
    });
    if (this.#floor) {
      pen.strokeStyle = pen.fillStyle = color("--ink");
      pen.setLineDash([3, 3]);
      pen.beginPath();
      pen.moveTo(LEFT, y(this.#floor));
      pen.lineTo(width, y(this.#floor));
      pen.stroke();
    }
    const said = values.length ? `${values.length} tokens; the middle one took ${show(percentile(values, 0.5))} ms` : "No tokens yet";
    this.#canvas.setAttribute("aria-label", said);
  }
}
