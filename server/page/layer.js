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
  const most = Math.max(...fused.map((launch) => launch.bytes));
  const head = (ops, count, span) => el("th", { scope: "colgroup", colSpan: span, "data-ops": ops }, `${ops}: ${count} launches`);
  const rows = [];
  let next = 0;
  for (const launch of fused) {
    launch.fuses.forEach((_, i) => {
      const alone = unfused[next++];
      const cells = i ? [] : [
        el("td", { rowSpan: launch.fuses.length, "data-ops": "fused" },
          el("div", { className: "block" }, el("b", {}, launch.name), el("span", {}, [showBytes(launch.bytes), time(launch)].filter(Boolean).join(" · ")),
            bar(launch, most))),
      ];
      cells.push(
        el("th", { scope: "row", "data-ops": "unfused" }, alone.name),
        el("td", { className: "wide", "data-ops": "unfused" }, bar(alone, most)),
        el("td", { className: "number", "data-ops": "unfused" }, showBytes(alone.bytes)),
        el("td", { className: "number", "data-ops": "unfused" }, time(alone)),
      );
      rows.push(el("tr", { className: i ? "" : "first" }, ...cells));
    });
  }
  const heads = el("tr", {}, head("fused", fused.length, 1), head("unfused", unfused.length, 4));
  table.replaceChildren(el("thead", {}, heads), el("tbody", {}, ...rows));
  const rate = runtime.datasheet_gbps;
  const predicted = rate
    ? `Microseconds are predicted: bytes over the datasheet's ${rate.toLocaleString("en")} GB/s, nothing for the launch itself.`
    : "No microseconds are predicted: no datasheet's memory rate is known for this device.";
  say($("layer-note"), `One of ${runtime.layers}, at ${runtime.launches_context} positions of context. Width is bytes moved. ${predicted}`);
}
