// Charts by plotly.js, which is loaded with the first of them.

import { h } from "./dom.js";

let loading = null;
function plotly() {
  loading ??= new Promise((resolve, reject) => {
    const script = h("script", { src: "plotly.min.js", onload: () => resolve(window.Plotly),
      onerror: () => reject(new Error("plotly.min.js cannot be loaded")) });
    document.head.append(script);
  });
  return loading;
}

// Where nothing can hover, plotly.js would leave its buttons on top of legends.
const CONFIG = { displaylogo: false, responsive: true, displayModeBar: matchMedia("(hover: hover)").matches ? "hover" : false,
  modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };
export const COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8250a8", "#57606a"];
const MARKED_POINTS = 40;
const SIGNED = [[0, "#b2182b"], [0.25, "#f4a582"], [0.5, "#f7f7f7"], [0.75, "#92c5de"], [1, "#2166ac"]];

function layout(x, y, more = {}) {
  const axis = { gridcolor: "#e6e8eb", zerolinecolor: "#c4c9ce", linecolor: "#8c959f", automargin: true };
  return {
    height: 300, margin: { l: 56, r: 14, t: 10, b: 44 }, font: { size: 12, color: "#24292f" },
    paper_bgcolor: "#fff", plot_bgcolor: "#fff", hovermode: "closest",
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" },
    xaxis: { ...axis, title: { text: x } }, yaxis: { ...axis, title: { text: y } }, ...more,
  };
}

export async function draw(element, traces, x, y, more = {}) {
  const drawn = await plotly();
  await drawn.react(element, traces, layout(x, y, more), CONFIG);
  return element;
}

// Lines with their bands, as the server describes them; a click tells the iteration.
export async function curves(element, chart, against, clicked) {
  const steps = against === "env_steps" && chart.env_steps.every((value) => value != null);
  const x = steps ? chart.env_steps : chart.iterations;
  const mode = x.length <= MARKED_POINTS ? "lines+markers" : "lines";
  const bands = chart.series.filter((series) => series.low).flatMap((series) => band(series, x));
  const lines = chart.series.map((series) => ({
    x, y: series.values, name: series.label, mode, type: "scatter", customdata: chart.iterations,
    line: { color: series.color, width: 1.8 }, marker: { size: 4.5, color: series.color },
    hovertemplate: `iteration %{customdata}<br>${steps ? "%{x:,} steps<br>" : ""}%{y:.4g}`,
  }));
  // What a band is stands in the legend.
  const key = bands.length && chart.band ? [{ x: [null], y: [null], name: chart.band, mode: "markers", type: "scatter",
    marker: { symbol: "square", size: 13, color: "rgba(36,41,47,.18)" }, hoverinfo: "skip" }] : [];
  const x_label = steps ? "environment steps" : "iteration";
  await draw(element, [...bands, ...lines, ...key], x_label, chart.y_label,
    { showlegend: lines.length + key.length > 1, uirevision: against, ...(chart.height ? { height: chart.height } : {}) });
  if (clicked && !element.dataset.listens) {
    element.dataset.listens = "yes";
    element.on("plotly_click", (event) => clicked(event.points[0].customdata));
  }
}

function band(series, x) {
  const [red, green, blue] = [1, 3, 5].map((n) => parseInt(series.color.slice(n, n + 2), 16));
  const fill = `rgba(${red},${green},${blue},.17)`;
  const base = { type: "scatter", mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false };
  // Gaps would be filled across: each stretch without one is a band of its own.
  const stretches = [];
  series.low.forEach((low, n) => {
    if (low == null || series.high[n] == null) return stretches.push([]);
    if (!stretches.length) stretches.push([]);
    return stretches.at(-1).push(n);
  });
  return stretches.filter((places) => places.length).map((places) => ({ ...base, fill: "toself", fillcolor: fill,
    x: [...places.map((n) => x[n]), ...places.toReversed().map((n) => x[n])],
    y: [...places.map((n) => series.low[n]), ...places.toReversed().map((n) => series.high[n])] }));
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
