// A run: how it stands, its curves, its newest iteration, settings and what it was made with.

import { card, choice, command, drawing, facts, folded, h, problem, quiet, state, tiles } from "./dom.js";
import { get, link } from "./api.js";
import { COLORS, curves } from "./charts.js";
import { bytes, moment, number, spans } from "./format.js";

const LOOK = 2000;

export async function runPage(here, run) {
  const head = h("div", {});
  const iterations = h("div", {});
  const charts = h("div", {}, quiet("Reading curves …"));
  const graph = h("div", {});
  const about = h("div", {});
  const shown = { against: "env_steps", metrics: [], data: null, live: null, found: null };

  // What is read fast comes first, and is all that a run which cannot be opened says.
  shown.live = await get(["run", run, "live"], {}, here.signal);
  head.append(...heading(run, shown.live));
  update();
  here.every(LOOK, look);
  drawCurves().then(() => here.attempt(about, async () => {
    shown.found = await get(["run", run], {}, here.signal);
    update();
    return details(shown.found);
  }));
  return [head, iterations, charts, graph, about];

  async function look() {
    await here.attempt(head, async () => {
      const live = await get(["run", run, "live"], {}, here.signal);
      const before = shown.live;
      shown.live = live;
      if (before.iterations_done !== live.iterations_done || !before.newest !== !live.newest) update();
      if (before.iterations_done !== live.iterations_done) await readCurves();
      return heading(run, live, shown.found);
    });
  }

  function update() {
    const { live, found } = shown;
    // A number that is being typed, or a link that has the focus, stays.
    if (!iterations.contains(document.activeElement)) iterations.replaceChildren(picker(run, live, found));
    if (found && live.iterations_done) here.attempt(graph, () => newest(live.iterations_done - 1));
  }

  async function newest(iteration) {
    const page = await get(["run", run, "iteration", iteration], {}, here.signal);
    return [h("h2", {}, "Stages of ", h("a", { href: link(run, "iteration", iteration) }, `iteration ${iteration}`)),
      card(quiet("Time, size and digest of every output, and what it was made from; dashed: from earlier iterations. "
        + "A click opens the record."), drawing(page.graph))];
  }

  async function drawCurves() {
    await here.attempt(charts, async () => {
      shown.data = await get(["run", run, "curves"], {}, here.signal);
      shown.drawn = new Map();
      return page();
    });
    await redraw();
  }

  async function readCurves() {
    const keys = (data) => data?.charts.map((chart) => chart.title).join("|");
    const before = keys(shown.data);
    shown.data = await get(["run", run, "curves"], {}, here.signal).catch(() => shown.data);
    if (keys(shown.data) !== before) charts.replaceChildren(...page());
    await redraw();
  }

  function page() {
    const { data } = shown;
    const problems = data.problems.map(({ iteration, message }) => problem(`iteration ${iteration} left out: ${message}`));
    if (!data.iterations.length) return [...problems, quiet("No complete iteration yet.")];
    const headings = [...new Set(data.charts.map((chart) => chart.section))];
    const note = data.every > 1 ? [quiet(`One of ${data.every} iterations is shown.`)] : [];
    const axis = choice("against", [["env_steps", "environment steps"], ["iterations", "iterations"]], shown.against,
      (value) => { shown.against = value; redraw(); });
    shown.drawn = new Map();
    return [...problems, h("div", { class: "row" }, axis, h("span", { class: "quiet" }, "A click on a point opens its iteration.")),
      ...note, ...headings.map((heading) => [h("h2", {}, heading), grid(data.charts.filter((c) => c.section === heading))]),
      h("h2", {}, "Any metric"), anyMetric()].flat();
  }

  function grid(some) {
    return h("div", { class: "grid" }, some.map((chart) => {
      const element = h("div", { class: "chart" });
      shown.drawn.set(chart.title, element);
      return card(h("h3", {}, chart.title), h("p", { class: "note" }, chart.note), element);
    }));
  }

  function anyMetric() {
    const names = Object.keys(shown.data.metrics);
    const element = h("div", { class: "chart", role: "group", "aria-label": "chosen metrics" });
    shown.any = element;
    const select = h("select", { multiple: true, size: 9, "aria-label": "metrics", onchange: () => {
      shown.metrics = [...select.selectedOptions].map((option) => option.value);
      redraw();
    } }, names.map((name) => h("option", { selected: shown.metrics.includes(name) }, name)));
    return card(h("div", { class: "beside" }, h("div", {}, quiet("Ctrl or ⌘ chooses several."), select), element));
  }

  async function redraw() {
    const { data } = shown;
    if (!data?.iterations.length || here.signal.aborted) return;
    const open = (iteration) => { location.hash = link(run, "iteration", iteration); };
    for (const chart of data.charts) await curves(shown.drawn.get(chart.title), chart, shown.against, open);
    const series = shown.metrics.map((name, n) => ({ label: name, color: COLORS[n % COLORS.length], values: data.metrics[name] }));
    const chosen = { y_label: series.length === 1 ? series[0].label : "", band: "", panels: [{ series }],
      iterations: data.iterations, x: data.env_steps ?? data.iterations, x_label: data.env_steps ? "" : "iteration" };
    if (series.length) await curves(shown.any, chosen, shown.against, open);
  }
}

function heading(run, live, found) {
  const under = live.newest ? `iteration ${live.newest.iteration}: ${live.newest.label} is stored` : "";
  const sizes = found?.info.bytes;
  return [
    h("h1", {}, run, " ", state(live.state)),
    h("p", { class: "quiet" }, `${live.path}, created ${moment(live.created)} UTC${live.writer ? `, written by ${live.writer}` : ""}`),
    ...(found?.info.problem ? [problem(found.info.problem)] : []),
    tiles([
      ["iterations done", `${number(live.iterations_done)} of ${number(live.iterations)}`],
      ["under way", live.state === "training" ? under : ""],
      ["algorithm", live.algorithm], ["environment", live.env], ["seed", live.seed],
      ["on disk", sizes ? bytes(Object.values(sizes).reduce((a, b) => a + b, 0)) : null],
    ]),
  ];
}

function picker(run, live, found) {
  const done = live.iterations_done;
  const last = done + (live.newest ? 1 : 0) - 1;
  if (last < 0) return quiet("Nothing is stored yet.");
  const input = h("input", { type: "number", min: 0, max: last, value: Math.max(0, done - 1) });
  const open = () => { location.hash = link(run, "iteration", input.value); };
  input.addEventListener("keydown", (event) => { if (event.key === "Enter") open(); });
  return h("div", { class: "row" }, h("label", {}, "open iteration ", input), h("button", { onclick: open }, "open"),
    h("a", { href: link(run, "iteration", 0) }, "first"), done ? h("a", { href: link(run, "iteration", done - 1) }, "last complete") : "",
    live.newest ? h("a", { href: link(run, "iteration", live.newest.iteration) }, "under way") : "", found ? kept(found) : "");
}

// What of the run is no longer there, or lies in few files.
function kept(found) {
  if (found.thinned.problem) return problem(found.thinned.problem);
  const thinned = found.thinned.spans.length ? `thinned: ${spans(found.thinned.spans)}; their arrays are gone, records, tables and metrics are there` : "";
  const packed = found.packed.length ? `packed: ${spans(found.packed)}` : "";
  return h("span", { class: "quiet" }, [thinned, packed].filter(Boolean).join("; "));
}

function details(found) {
  const { info } = found;
  const parent = info.parent ? [folded("Forked from", true, facts(Object.entries(info.parent).map(([name, value]) => [name, text(value)])))] : [];
  const quarantine = info.quarantine?.length ? [folded(`In quarantine (${info.quarantine.length})`, true,
    info.quarantine.map((entry) => problem(`iteration ${entry.iteration}, ${entry.stage} k=${entry.step}: ${entry.message}`)))] : [];
  const sessions = (info.sessions || []).map((change) => [`session ${change.session}, ${moment(change.started)}`, text(change.changed)]);
  const made = [...entries(info.versions), ...entries(info.environment), ...entries(info.system)];
  return [
    h("h2", {}, "About the run"), ...parent, ...quarantine,
    folded("Commands", true, found.commands.map(command)),
    folded(`Settings (${found.settings.length})`, false, facts(found.settings)),
    info.bytes ? folded("On disk, by what it is", false, facts(Object.entries(info.bytes).map(([name, count]) => [name, bytes(count)]))) : "",
    sessions.length ? folded("Sessions with other versions, sources or hardware", false, facts(sessions)) : "",
    folded("Made with", false, facts(made)),
  ];
}

const text = (value) => (typeof value === "string" ? value : JSON.stringify(value));
const entries = (mapping) => Object.entries(mapping || {}).map(([name, value]) => [name, text(value)]);
