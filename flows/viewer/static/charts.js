// Charts by plotly.js, which is loaded with the first of them.

import { h } from "./dom.js";
import { bandKey, layout, lineTraces, render } from "./traces.js";

let loading = null;
function plotly() {
  loading ??= new Promise((resolve, reject) => {
    const script = h("script", { src: "plotly.min.js", onload: () => resolve(window.Plotly),
      onerror: () => reject(new Error("plotly.min.js cannot be loaded")) });
    document.head.append(script);
  });
  return loading;
}

export const COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8250a8", "#57606a"];
const SIGNED = [[0, "#b2182b"], [0.25, "#f4a582"], [0.5, "#f7f7f7"], [0.75, "#92c5de"], [1, "#2166ac"]];

export async function draw(element, traces, x, y, more = {}) {
  const drawn = await plotly();
  // Outside the page an element has no width that a chart could take.
  if (!element.isConnected) await new Promise(requestAnimationFrame);
  await render(drawn, element, traces, layout(x, y, more));
  return element;
}

// Give charts one left edge, that of the widest numbers, so that one x is at one place in all of them.
export async function align(elements) {
  const drawn = await plotly();
  const left = Math.max(...elements.map((element) => element._fullLayout._size.l));
  for (const element of elements) await drawn.relayout(element, { "margin.l": left, "yaxis.automargin": false });
}

// Lines with their bands, as the server describes them; a click tells the iteration.
export async function curves(element, chart, against, clicked) {
  const steps = against === "env_steps" && chart.x_label !== "iteration" && chart.x.every((value) => value != null);
  const x = steps ? chart.x : chart.iterations;
  const [{ series }] = chart.panels;
  const traces = lineTraces(series, x, chart.iterations, steps ? "steps" : "");
  const key = bandKey(series, chart.band);
  const x_label = steps ? "environment steps" : "iteration";
  await draw(element, [...traces, ...key], x_label, chart.y_label,
    { showlegend: series.length + key.length > 1, uirevision: against });
  if (clicked && !element.dataset.listens) {
    element.dataset.listens = "yes";
    element.on("plotly_click", (event) => clicked(event.points[0].customdata));
  }
}

export function picture(element, rows, x, y, more = {}) {
  let [low, high] = [Infinity, -Infinity];
  for (const row of rows) for (const value of row) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  const signed = low < 0 && high > 0;
  const most = Math.max(-low, high);
  const scale = signed ? { colorscale: SIGNED, zmin: -most, zmax: most } : { colorscale: "Viridis" };
  const bar = { thickness: 12, outlinewidth: 0 };
  const { trace = {}, ...rest } = more;
  return draw(element, [{ type: "heatmap", z: rows, ...scale, colorbar: bar, hoverongaps: false, ...trace }], x, y, rest);
}

// A small line of a few numbers, without axes.
export function spark(values) {
  const known = values.filter((value) => value != null);
  if (known.length < 2) return null;
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const at = (value, n) => `${(150 * n) / (values.length - 1)},${27 - (24 * (value - low)) / (high - low || 1)}`;
  const points = values.map((value, n) => (value == null ? null : at(value, n))).filter(Boolean).join(" ");
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("class", "spark");
  svg.setAttribute("viewBox", "0 0 150 30");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  for (const [name, value] of [["points", points], ["fill", "none"], ["stroke", "#0072b2"], ["stroke-width", "1.5"]]) {
    line.setAttribute(name, value);
  }
  svg.append(line);
  return svg;
}
