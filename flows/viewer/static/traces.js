// What plotly.js draws of the curves that Python describes: on the page over runs, and in reports, which hold this file.

// Where nothing can hover, plotly.js would leave its buttons on top of legends. Buttons are listed by name, because its
// own choice has one that uploads the chart; without an address there is nowhere to upload it to.
const CONFIG = { displaylogo: false, responsive: true, plotlyServerURL: "",
  displayModeBar: matchMedia("(hover: hover)").matches ? "hover" : false,
  modeBarButtons: [["toImage"], ["zoom2d", "pan2d"], ["zoomIn2d", "zoomOut2d", "resetScale2d"]] };
const MARKED_POINTS = 40;
const LEGEND_ROW = 19;
export const NARROW = matchMedia("(max-width: 640px)");

// plotly.js reads a few tags in every text, links among them.
export const plain = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

export function axis(text) {
  return { gridcolor: "#e6e8eb", zerolinecolor: "#c4c9ce", linecolor: "#8c959f", automargin: true, title: { text: plain(text) } };
}

export function layout(x, y, more = {}) {
  return {
    height: 300, margin: { l: 56, r: 14, t: 10, b: 44 }, font: { size: 12, color: "#24292f" },
    paper_bgcolor: "#fff", plot_bgcolor: "#fff", hovermode: "closest",
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" },
    ...more, xaxis: { ...axis(x), ...more.xaxis }, yaxis: { ...axis(y), ...more.yaxis },
  };
}

// In a narrow window a legend above a chart wraps, and would take its rows from the chart.
function withRoomForLegend(traces, of) {
  const entries = traces.filter((trace) => trace.name && trace.showlegend !== false).length;
  if (!NARROW.matches || of.showlegend === false || of.legend.orientation !== "h" || entries < 2) return of;
  return { ...of, height: of.height + LEGEND_ROW * entries };
}

// Draw a chart; its legend, which plotly.js made for the mouse, works by keyboard too.
export async function render(plotly, element, traces, of) {
  const sized = withRoomForLegend(traces, of);
  // A window of another size makes plotly.js forget the height of the layout and take the element's.
  element.style.height = `${sized.height}px`;
  await plotly.react(element, traces, sized, CONFIG);
  nameParts(element);
  if (element.dataset.keys) return;
  element.dataset.keys = "yes";
  element.on("plotly_afterplot", () => nameParts(element));
  element.addEventListener("keydown", (event) => {
    if (!event.target.matches(".legendtoggle") || !["Enter", " "].includes(event.key)) return;
    event.preventDefault();
    // As a click, which plotly.js keeps when it draws newer data; two in quick succession are its double-click.
    if (!event.repeat) for (const kind of ["mousedown", "mouseup"]) event.target.dispatchEvent(new MouseEvent(kind));
  });
}

function nameParts(chart) {
  const attributes = (element, all) => Object.entries(all).forEach(([name, value]) => element.setAttribute(name, value));
  const heading = chart.closest(".card").querySelector("h2, h3") ?? document.querySelector("h1");
  attributes(chart, { role: "group", "aria-label": chart.getAttribute("aria-label") ?? heading.textContent });
  for (const entry of chart.querySelectorAll(".legendtoggle")) {
    const [{ trace }] = entry.__data__;
    attributes(entry, { tabindex: 0, role: "button", "aria-label": entry.parentNode.textContent, "aria-pressed": trace.visible === true });
  }
}

// Lines with their bands; `unit` follows x where it is no iteration.
export function lineTraces(all, x, iterations, unit, more = {}) {
  const mode = x.length <= MARKED_POINTS ? "lines+markers" : "lines";
  const which = iterations ? "iteration %{customdata}<br>" : "";
  const bands = all.filter((series) => series.low).flatMap((series) => band(series, x));
  const lines = all.map((series) => ({
    x, y: series.values, name: plain(series.label), mode, type: "scatter", customdata: iterations,
    line: { color: series.color, width: 1.8 }, marker: { size: 4.5, color: series.color },
    hovertemplate: `${which}${unit ? `%{x:,} ${unit}<br>` : ""}%{y:.4g}`,
  }));
  return [...bands, ...lines].map((trace) => ({ ...trace, ...more }));
}

// What a band is stands in the legend.
export function bandKey(all, words) {
  return words && all.some((series) => series.low) ? [{ x: [null], y: [null], name: words, mode: "markers",
    type: "scatter", marker: { symbol: "square", size: 13, color: "rgba(36,41,47,.18)" }, hoverinfo: "skip" }] : [];
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
