// Draws the charts of a report with plotly.js, which the page holds compressed. Follows traces.js in one script.

const BARS = { margin: { l: 10, r: 90, t: 10, b: 44 } };
const COLUMNS = 4;
const ABOVE = { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" };

async function plotlyText() {
  const packed = atob(document.getElementById("plotly").textContent);
  const bytes = Uint8Array.from(packed, (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

function drawn(chart, against) {
  const steps = !chart.iterations || against === "x";
  const x = steps ? chart.x : chart.iterations;
  const x_label = steps || chart.kind === "layers" ? chart.x_label : "iteration";
  const unit = steps && chart.x_label.startsWith("environment steps") ? "steps" : "";
  const [panel] = chart.panels;
  if (chart.kind === "bars") return bars(chart, panel.series);
  if (chart.kind === "layers") return layers(chart, panel.series);
  if (chart.kind === "points") return points(chart, panel.series, x, x_label, unit);
  const key = bandKey(panel.series, chart.band);
  if (chart.panels.length > 1) return facets(chart, x, x_label, unit, key);
  const traces = [...lineTraces(panel.series, x, chart.iterations, unit), ...key];
  return [traces, layout(x_label, chart.y_label, { showlegend: traces.length > 1, height: chart.wide ? 420 : 300 })];
}

function points(chart, all, x, x_label, unit) {
  const which = chart.iterations ? "iteration %{customdata}<br>" : "";
  const told = chart.diagonal ? "before %{x:.4g}<br>after %{y:.4g}" : `${which}${unit ? `%{x:,} ${unit}<br>` : ""}%{y:.4g}`;
  const traces = all.map((series) => ({ x, y: series.values, name: plain(series.label), mode: "markers", type: "scatter",
    customdata: chart.iterations, marker: { color: series.color, size: chart.diagonal ? 8 : 4, opacity: 0.7 },
    hovertemplate: told }));
  const shapes = chart.diagonal ? [diagonal(x)] : [];
  // Against the diagonal a distance is true only where both axes have one scale.
  return [traces, layout(x_label, chart.y_label, { shapes, showlegend: all.length > 1, height: chart.diagonal ? 440 : 340,
    legend: { ...ABOVE, itemsizing: "constant" }, yaxis: chart.diagonal ? { scaleanchor: "x" } : {} })];
}

// One by one: a call takes no more arguments than its stack has room for.
function diagonal(x) {
  const known = x.filter((value) => value !== null);
  const low = known.reduce((a, b) => Math.min(a, b), Infinity), high = known.reduce((a, b) => Math.max(a, b), -Infinity);
  return { type: "line", x0: low, y0: low, x1: high, y1: high, layer: "below",
    line: { color: "#8c959f", width: 1, dash: "dash" } };
}

function layers(chart, all) {
  const one = chart.x.length === 1;
  const traces = all.map((series) => ({ x: chart.x, y: series.values.map((value) => value ?? 0), name: plain(series.label),
    ...(one ? { type: "bar", marker: { color: series.color } }
      : { type: "scatter", mode: "lines", stackgroup: "time", line: { width: 0, color: series.color }, fillcolor: series.color }),
    hovertemplate: "iteration %{x}<br>%{y:.4g} s" }));
  const legend = { ...(NARROW.matches ? ABOVE : {}), traceorder: "reversed", font: { size: 11 } };
  return [traces, layout(chart.x_label, chart.y_label, { barmode: "stack", legend })];
}

function bars(chart, all) {
  const trace = { type: "bar", orientation: "h", x: all.map((series) => series.values[0]),
    y: all.map((series) => plain(series.label)), marker: { color: all.map((series) => series.color) },
    text: chart.texts, textposition: "outside", cliponaxis: false, hoverinfo: "skip" };
  const text = NARROW.matches ? chart.x_label.replace(" (", "<br>(") : chart.x_label;
  return [[trace], layout("", "", { ...BARS, showlegend: false, height: 110 + 26 * all.length, xaxis: { title: { text } },
    yaxis: { autorange: "reversed", showgrid: false, ticks: "" } })];
}

// One panel per class, with axes that zoom together.
function facets(chart, x, x_label, unit, key) {
  const columns = NARROW.matches ? 1 : Math.min(COLUMNS, chart.panels.length), rows = Math.ceil(chart.panels.length / columns);
  const height = 60 + 210 * rows;
  const of = layout("", "", { height, margin: { l: 56, r: 14, t: 62, b: 44 }, annotations: [],
    legend: { orientation: "h", x: 0, y: 1 + 34 / (height - 106), yanchor: "bottom" } });
  const traces = chart.panels.flatMap((panel, n) => {
    const id = n ? `${n + 1}` : "", row = Math.floor(n / columns), column = n % columns;
    const [wide, high] = [1 / columns, 1 / rows];
    const domain = [column * wide + (column ? 0.018 : 0), (column + 1) * wide - 0.004];
    const top = 1 - row * high - (row ? 0.07 : 0);
    const below = n + columns >= chart.panels.length;
    of[`xaxis${id}`] = { ...axis(below ? x_label : ""), domain, anchor: `y${id}`, matches: n ? "x" : undefined, showticklabels: below };
    of[`yaxis${id}`] = { ...axis(column ? "" : chart.y_label), domain: [1 - (row + 1) * high, top], anchor: `x${id}`,
      matches: n ? "y" : undefined, showticklabels: !column };
    of.annotations.push({ text: plain(panel.title), showarrow: false, xref: "paper", yref: "paper", x: (domain[0] + domain[1]) / 2,
      y: top, xanchor: "center", yanchor: "bottom", font: { size: 13 } });
    const more = { xaxis: `x${id}`, yaxis: `y${id}` };
    return lineTraces(panel.series, x, chart.iterations, unit, more).map((trace) => ({ ...trace,
      legendgroup: trace.name, showlegend: trace.showlegend !== false && n === 0 }));
  });
  return [[...traces, ...key], of];
}

async function main() {
  const text = await plotlyText();
  // As an inline script: the page allows those two that it names by their digests, and none else.
  const script = document.createElement("script");
  script.textContent = text;
  document.head.append(script);
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const against = document.getElementById("against");
  const draw = async () => {
    for (const chart of charts) {
      const [traces, of] = drawn(chart, against.value);
      await render(window.Plotly, document.getElementById(`chart-${chart.name}`), traces, of);
    }
  };
  against.addEventListener("change", draw);
  NARROW.addEventListener("change", draw);
  await draw();
}

main().catch((error) => {
  const note = document.getElementById("trouble");
  note.hidden = false;
  note.append(String(error));
});
