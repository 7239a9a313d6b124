// Any array as a picture or as lines: two axes are shown, the others are at an index.

import { card, choice, h, problem, quiet, refill, slider } from "./dom.js";
import { Problem, get, outputLink, values } from "./api.js";
import { COLORS, draw, picture } from "./charts.js";
import { number } from "./format.js";
import { plain } from "./traces.js";

const MOST_LINES = 40;
const TIME = ["t", "t_with_final"];
const NONE = "-1";

export async function arrayPage(here, run, ref) {
  const path = here.query.get("array");
  const at = ["run", run, "output", ref.iteration, ref.stage, ref.step];
  const [output, { names }] = await Promise.all([get(at, {}, here.signal),
    get(["run", run, "array", ref.iteration, ref.stage, ref.step], { array: path }, here.signal)]);
  const spec = output.arrays.find((array) => `${array.group}/${array.name}` === path);
  if (!spec || spec.problem) throw new Problem(spec?.problem ?? `there is no array ${path}`);
  const { dims, shape } = spec;
  const unit = ["1", "mixed"].includes(spec.unit) ? "" : spec.unit;
  const shown = { ...standard(dims, shape), at: shape.map(() => 0) };
  const controls = h("div", {});
  const trouble = h("div", {});
  const chart = h("div", { class: "chart" });
  let asked = null;

  function control() {
    const axes = dims.map((dim, n) => [n, `${dim} (${shape[n]})`]);
    const change = (what) => (value) => {
      shown[what] = Number(value);
      if (shown.rows === shown.columns) shown[what === "rows" ? "columns" : "rows"] = what === "rows" ? axes.find(([n]) => n !== shown.rows)?.[0] ?? 0 : -1;
      control();
      fill();
    };
    const how = (kind, text) => h("button", { class: shown.kind === kind ? "chosen" : "", "aria-pressed": String(shown.kind === kind), onclick: () => { shown.kind = kind; control(); fill(); } }, text);
    refill(controls,
      h("div", { class: "row" }, how("picture", "picture"), how("lines", "lines"),
        dims.length ? choice("left to right", axes, shown.columns, change("columns")) : "",
        dims.length ? choice(shown.kind === "lines" ? "a line for each" : "top to bottom", [[NONE, "one row"], ...axes], shown.rows, change("rows")) : ""),
      ...dims.map((dim, n) => ([shown.rows, shown.columns].includes(n) || shape[n] < 2 ? ""
        : slider(named(dim), shape[n] - 1, shown.at[n], (index) => { shown.at[n] = index; fill(); }))));
  }

  const named = (dim) => (names[dim] ? `${dim} (0 is ${names[dim][0]})` : dim);

  async function fill() {
    asked?.abort();
    asked = new AbortController();
    const { signal } = asked;
    here.signal.addEventListener("abort", () => asked.abort());
    try {
      const query = { array: path, at: shown.at.join(","), columns: shown.columns, ...(shown.rows >= 0 ? { rows: shown.rows } : {}) };
      const found = await values(run, ref, query, signal);
      trouble.replaceChildren();
      await (shown.kind === "picture" ? asPicture(found) : asLines(found));
    } catch (error) {
      if (error.name !== "AbortError") trouble.replaceChildren(problem(error.message));
    }
  }

  const label = (axis) => (axis < 0 ? "" : dims[axis] ?? "");
  const places = (count, every) => Array.from({ length: count }, (_, n) => n * every);
  const short = (axis) => axis >= 0 && names[dims[axis]] && shape[axis] <= 60;
  const ticks = (axis) => (short(axis) ? { tickmode: "array", tickvals: names[dims[axis]].map((_, n) => n), ticktext: names[dims[axis]].map(plain) } : {});

  async function asPicture({ rows, every }) {
    const axis = { gridcolor: "#fff", zeroline: false };
    trouble.replaceChildren(...skipped(every));
    await picture(chart, rows, label(shown.columns), label(shown.rows), {
      height: Math.max(220, Math.min(640, 90 + 18 * rows.length)), trace: { x: places(rows[0]?.length ?? 0, every[1]), y: places(rows.length, every[0]),
        hovertemplate: `${plain(label(shown.rows))} %{y}, ${plain(label(shown.columns))} %{x}<br>%{z:.6g}<extra></extra>` },
      xaxis: { ...axis, ...ticks(shown.columns) }, yaxis: { ...axis, autorange: "reversed", ...ticks(shown.rows) } });
  }

  async function asLines({ rows, every }) {
    const few = rows.slice(0, MOST_LINES);
    trouble.replaceChildren(...skipped(every), ...(few.length < rows.length ? [quiet(`The first ${MOST_LINES} of ${rows.length} lines.`)] : []));
    const x = places(rows[0]?.length ?? 0, every[1]);
    const traces = few.map((row, n) => ({ x, y: row, type: "scatter", mode: row.length < 60 ? "lines+markers" : "lines", line: { width: 1.4, color: COLORS[n % COLORS.length] },
      marker: { size: 4 }, name: plain(short(shown.rows) ? names[dims[shown.rows]][n] : `${label(shown.rows)} ${n * every[0]}`) }));
    await draw(chart, traces, label(shown.columns), unit || spec.name,
      { height: 460, showlegend: few.length > 1, xaxis: ticks(shown.columns) });
  }

  control();
  fill();
  const single = !dims.length ? quiet(`A single number.`) : "";
  return [
    h("h1", {}, `${spec.name} of ${output.label}, iteration ${ref.iteration}`),
    h("p", { class: "quiet" }, `${spec.description}; ${dims.map((dim, n) => `${dim} ${shape[n]}`).join(" × ")}; ${spec.dtype}`
      + `${unit ? `; unit: ${unit}` : ""}. Padding behind the end of an episode is left out. `,
    h("a", { href: outputLink(run, ref) }, "Record")),
    card(controls, trouble, chart, single),
  ];
}

function skipped(every) {
  const most = Math.max(...every);
  return most > 1 ? [quiet(`One of ${number(most)} entries is shown.`)] : [];
}

// Time from left to right where there is time, components from top to bottom where they are few.
function standard(dims, shape) {
  const last = dims.length - 1;
  const time = dims.findIndex((dim) => TIME.includes(dim));
  if (time >= 0 && time < last) return { columns: time, rows: last, kind: shape[last] <= 8 ? "lines" : "picture" };
  if (time >= 0) return { columns: time, rows: time > 0 ? time - 1 : -1, kind: "picture" };
  return { columns: Math.max(last, 0), rows: last > 0 ? last - 1 : -1, kind: last > 0 && shape[last] > 1 ? "picture" : "lines" };
}
