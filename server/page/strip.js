/* Owns the strip: one bar a token, its height the milliseconds since the one before, its colour the mode it was played in. Fast
   tokens have bars as narrow as their time: a change must be in sight for seconds, however fast the device. */

import { modeName, percentile, sameMode, show } from "./meter.js";

const STEP = 5, GAP = 1, LEFT = 34, TOP = 16, BOTTOM = 6; // pixels; a bar and its gap are a step wide at most
const SPAN_MS = 4000, KEPT = 8192; // the strip holds so many milliseconds at least, and so many bars at most

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
    this.#bars.splice(0, this.#bars.length - KEPT);
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

  /** The newest tokens that `room` pixels hold, as their times and as bars { x, step, ms, mode }: those that share one of a screen's
   *  pixels are one bar of their mean. */
  #fit(room, ratio) {
    const wide = (bar) => (bar ? Math.min(STEP, (bar.ms * room) / SPAN_MS) : STEP), snap = (x) => Math.round(x * ratio) / ratio;
    let first = this.#bars.length, end = 0;
    for (let used = 0; first && (used += wide(this.#bars[first - 1])) <= room; ) first--;
    const bars = [], shown = this.#bars.slice(first);
    for (const bar of shown) {
      const x = snap(end), step = Math.max(1 / ratio, snap((end += wide(bar))) - x), last = bars.at(-1);
      if (!bar) continue;
      if (last?.x === x && sameMode(last.mode, bar.mode)) Object.assign(last, { step, ms: last.ms + (bar.ms - last.ms) / ++last.count });
      else bars.push({ x, step, ms: bar.ms, mode: bar.mode, count: 1 });
    }
    return { bars, tokens: shown.filter(Boolean).map((bar) => bar.ms) };
  }

  #paint() {
    const { clientWidth: width, clientHeight: height } = this.#canvas;
    const ratio = devicePixelRatio, css = getComputedStyle(this.#canvas), color = (name) => css.getPropertyValue(name);
    this.#canvas.width = width * ratio;
    this.#canvas.height = height * ratio;
    const pen = this.#canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = `11px ${css.fontFamily}`;
    const { bars, tokens } = this.#fit(width - LEFT, ratio);
    const top = roundUp(Math.max(0.1, this.#floor ?? 0, 1.1 * (percentile(bars.map((bar) => bar.ms), 0.98) ?? 10)));
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
    for (const bar of bars) {
      const x = LEFT + bar.x, wide = bar.step > 2 * GAP ? bar.step - GAP : bar.step, tall = bar.ms > top;
      if (!before || !sameMode(before, bar.mode)) {
        if (before) {
          const name = modeName(bar.mode);
          pen.clearRect(x - 1, 0, pen.measureText(name).width + 8, TOP - 2); // the newer name stands over the older
          pen.fillStyle = color("--ink");
          pen.fillRect(x - 1, 0, 1, base);
          pen.fillText(name, x + 4, 10);
        }
        pen.fillStyle = color(`--${bar.mode.ops}-${bar.mode.graph}`);
      }
      pen.fillRect(x, tall ? TOP : y(bar.ms), wide, base - (tall ? TOP : y(bar.ms)));
      if (tall) pen.clearRect(x, TOP + 6, wide, 3); // a broken bar goes on past the top
      before = bar.mode;
    }
    if (this.#floor) {
      pen.strokeStyle = pen.fillStyle = color("--ink");
      pen.setLineDash([3, 3]);
      pen.beginPath();
      pen.moveTo(LEFT, y(this.#floor));
      pen.lineTo(width, y(this.#floor));
      pen.stroke();
    }
    const said = tokens.length ? `${tokens.length} tokens; the middle one took ${show(percentile(tokens, 0.5))} ms` : "No tokens yet";
    this.#canvas.setAttribute("aria-label", said);
  }
}
