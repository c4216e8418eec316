/* Owns the drawing of one layer: each fused launch beside the unfused ones whose work it does, as wide as the bytes it moves. */

import { $, el, say } from "./dom.js";
import { showBytes } from "./meter.js";

const time = ({ us_predicted: us }) => (us === null ? "" : us < 0.05 ? "<0.1 µs" : `${us.toFixed(1)} µs`);

function bar(launch, most) {
  const element = el("div", { className: "bar" });
  element.style.setProperty("--share", launch.bytes / most);
  return element;
}

/** Fill the table once for what GET /v1/runtime told. */
export function drawLayer(table, runtime) {
  const { fused, unfused } = runtime.launches;
  const most = Math.max(...[...fused, ...unfused].map((launch) => launch.bytes));
  const head = (ops, count, span) => el("th", { scope: "colgroup", colSpan: span, "data-ops": ops }, `${ops}: ${count} launches`);
  const rest = [...unfused];
  /** The unfused launches whose work a fused one does, with those that only make its weights dense. */
  const alone = (launch) => launch.fuses.flatMap(() => rest.splice(0, 1 + rest.findIndex(({ name }) => name !== "make dense")));
  const rows = fused.flatMap((launch) => alone(launch).map((each, i, all) => el("tr", { className: i ? "" : "first" },
    ...(i ? [] : [
      el("td", { rowSpan: all.length, "data-ops": "fused" },
        el("div", { className: "block" }, el("b", {}, launch.name), el("span", {}, [showBytes(launch.bytes), time(launch)].filter(Boolean).join(" · ")),
          bar(launch, most))),
    ]),
    el("th", { scope: "row", "data-ops": "unfused" }, each.name),
    el("td", { className: "wide", "data-ops": "unfused" }, bar(each, most)),
    el("td", { className: "number", "data-ops": "unfused" }, showBytes(each.bytes)),
    el("td", { className: "number", "data-ops": "unfused" }, time(each)),
  )));
  const heads = el("tr", {}, head("fused", fused.length, 1), head("unfused", unfused.length, 4));
  table.replaceChildren(el("thead", {}, heads), el("tbody", {}, ...rows));
  const rate = runtime.datasheet_gbps;
  const predicted = rate
    ? `Microseconds are predicted: bytes over the datasheet's ${rate.toLocaleString("en")} GB/s, nothing for the launch itself.`
    : "No microseconds are predicted: no datasheet's memory rate is known for this device.";
  const stored = runtime.weights === "bf16" ? "" : `, weights in ${runtime.weights}`;
  say($("layer-note"), `One of ${runtime.layers}${stored}, at ${runtime.launches_context} positions of context. Width is bytes moved. ${predicted}`);
}
