// An iteration: its stages and their arrays, returns by task, what adaptation did.

import { card, choice, command, drawing, facts, folded, h, quiet, table } from "./dom.js";
import { get, link, outputLink } from "./api.js";
import { COLORS, draw, picture } from "./charts.js";
import { bytes, number, seconds, short } from "./format.js";
import { plain } from "./traces.js";

const BEFORE = "#d55e00";
const AFTER = "#0072b2";
const LOOK = 2000;

export async function iterationPage(here, run, { iteration }) {
  const page = await get(["run", run, "iteration", iteration], {}, here.signal);
  const returns = h("div", {});
  const adaptation = h("div", {}, quiet("Reading adaptation …"));
  let stored = page.stages.length;
  if (!page.complete) {
    here.every(LOOK, async () => {
      const now = await get(["run", run, "iteration", iteration], {}, here.signal).catch(() => null);
      if (now && now.stages.length !== stored) { stored = now.stages.length; window.dispatchEvent(new Event("hashchange")); }
    });
  }
  here.attempt(returns, () => byTask(here, run, page, returns));
  here.attempt(adaptation, () => adapted(here, run, page, adaptation));
  const metrics = page.metrics.problem ? here.problem(page.metrics.problem)
    : folded("Metrics", false, facts(Object.entries(page.metrics).map(([name, value]) => [name, number(value)])));
  return [
    heading(run, page), ...page.problems.map(here.problem), returns, adaptation,
    h("h2", {}, "Stages"), h("div", { class: "stages" }, card(drawing(page.graph)), stageTable(run, page)),
    classes(here, page), h("h2", {}, "More"), metrics, folded("Commands", true, page.commands.map(command)),
  ];
}

function heading(run, page) {
  const near = (i, text) => (i >= 0 && i <= page.last ? h("a", { href: link(run, "iteration", i) }, text) : h("span", { class: "quiet" }, text));
  return [
    h("h1", {}, `Iteration ${page.iteration}`, page.complete ? "" : " (under way)"),
    h("div", { class: "row" }, near(page.iteration - 1, "← before"), near(page.iteration + 1, "next →"),
      h("a", { href: link(run) }, "the run")),
  ];
}

function stageTable(run, page) {
  return card(table(["stage", ">time", ">size", "digest", "arrays"], page.stages.map((stage) => {
    const ref = { ...stage, iteration: page.iteration };
    return [
      h("a", { href: outputLink(run, ref) }, stage.label), seconds(stage.seconds), stage.thinned ? "thinned" : bytes(stage.bytes),
      h("code", {}, short(stage.digest)), arrayLinks(run, ref, stage),
    ];
  })));
}

function arrayLinks(run, ref, stage) {
  if (stage.thinned) return h("span", { class: "quiet" }, "thinned");
  return h("span", {}, stage.arrays.map((array, n) => [n ? ", " : "", arrayLink(run, ref, array)]));
}

export function arrayLink(run, ref, array) {
  if (array.problem) return h("span", { class: "quiet", title: array.problem }, `${array.name} (damaged)`);
  const href = `${link(run, "array", ref.iteration, ref.stage, ref.step)}?${new URLSearchParams({ array: `${array.group}/${array.name}` })}`;
  return h("a", { href, title: `${array.description} [${array.shape.join(", ")}] ${array.dtype}` }, array.name);
}

function classes(here, page) {
  const rows = page.class_returns.rows;
  if (page.class_returns.problem) return here.problem(page.class_returns.problem);
  if (!rows?.length) return "";
  return [h("h2", {}, "Returns by class of task"), card(h("p", { class: "note" }, "mean over the tasks of a class, ± its standard error over tasks"),
    table(["inner step", "class", ">tasks", ">average return", ">± standard error"],
      rows.map((row) => [row.step, row.class, row.num_tasks, number(row.average_return), number(row.standard_error)])))];
}

const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);

async function byTask(here, run, page, into) {
  const { returns } = page;
  if (returns.problem) return [h("h2", {}, "Returns by task"), here.problem(returns.problem)];
  const steps = Object.keys(returns.steps).map(Number).sort((a, b) => a - b);
  if (!steps.length) return "";
  const means = h("div", { class: "chart" });
  const episodes = h("div", { class: "chart" });
  const stage = (k) => page.stages.find((one) => one.output === "EpisodeBatch" && one.step === k && one.arrays.some((a) => a.group === `rollouts_${k}`))
    ?? page.stages.find((one) => one.output === "EpisodeBatch" && one.step === k);
  let chosen = steps.at(-1);
  const pick = steps.length > 1 ? choice("episodes of inner step", steps.map((k) => [k, `${k}${k === 0 ? ", before adaptation" : k === steps.at(-1) ? ", after adaptation" : ""}`]), chosen,
    (value) => { chosen = Number(value); fill(); }) : "";
  const several = returns.steps[chosen].returns.length > 1;
  const trials = returns.trial > 1 ? returns.steps[chosen].returns[0].length / returns.trial : 0;
  into.replaceChildren(h("h2", {}, several ? "Returns by task" : "Returns"), h("div", { class: several ? "grid" : "" },
    several && card(h("h3", {}, trials ? "First and last episodes of trials" : steps.length > 1 ? "Before and after adaptation" : "Mean return of each task"),
      h("p", { class: "note" }, `dot: mean over ${trials ? "these" : "the"} episodes of a task; sorted by ${trials || steps.length > 1 ? "the last" : "it"}${trials ? "" : returns.unshown}`), means),
    card(h("div", { class: "row" }, h("h3", {}, "Every episode"), h("span", { class: "push" }, pick)),
      h("p", { class: "note" }, `a click opens the episode, with its film${trials === 1 ? "; columns are the episodes of a trial" : trials ? `; the first ${trials} columns are the first episodes of ${trials} trials, the next ${trials} their second ones` : ""}`), episodes)));
  if (several) await dumbbells(means, returns, trials ? endsOfTrials(returns, steps[0]) : afterSteps(returns));
  await fill();
  episodes.on("plotly_click", (event) => {
    const { x, y } = event.points[0];
    location.hash = `${link(run, "episode", page.iteration, stage(chosen).stage, chosen)}?task=${y}&episode=${x}`.slice(1);
  });
  return null;

  async function fill() {
    const rows = returns.steps[chosen].returns;
    const widest = Math.max(...rows.map((row) => row.length));
    const full = rows.map((row) => [...row, ...Array(widest - row.length).fill(null)]);
    await picture(episodes, full, "episode", "task", { height: several ? 340 : 150,
      xaxis: { dtick: Math.ceil(widest / 12), gridcolor: "#fff", zeroline: false },
      yaxis: { dtick: Math.ceil(rows.length / 12), gridcolor: "#fff", zeroline: false }, trace: {
      hovertemplate: "task %{y}, episode %{x}<br>%{text}<br>return %{z:.4g}<extra></extra>", text: rows.map((_, b) => Array(widest).fill(about(returns, b))) } });
  }
}

const about = (returns, b) => plain([
  ...(returns.classes ? [returns.classes[b]] : []),
  ...Object.entries(returns.tasks ?? {}).slice(0, 4).map(([name, values]) => `${name} ${number(values[b])}`),
].join(", "));

const afterSteps = (returns) => returns.shown.map(({ step, label, color }) => (
  { name: label, color, means: returns.steps[step].returns.map(mean) }));

// The episodes of a task lie as its trials' first ones, their second ones, and so on.
const endsOfTrials = (returns, k) => [["first episodes", BEFORE, 0], ["last episodes", AFTER, returns.trial - 1]].map(([name, color, place]) => ({
  name, color, means: returns.steps[k].returns.map((row) => {
    const trials = row.length / returns.trial;
    return mean(row.slice(place * trials, (place + 1) * trials));
  }),
}));

async function dumbbells(element, returns, groups) {
  const means = groups.map((group) => group.means);
  const order = means[0].map((_, b) => b).sort((a, b) => means.at(-1)[a] - means.at(-1)[b]);
  const places = order.map((_, n) => n);
  const lines = order.map((b, n) => [[n, n, null], [means[0][b], means.at(-1)[b], null]]);
  const traces = groups.length > 1 ? [{ x: lines.flatMap((l) => l[0]), y: lines.flatMap((l) => l[1]), mode: "lines",
    line: { color: "#c4c9ce", width: 1.5 }, hoverinfo: "skip", showlegend: false }] : [];
  groups.forEach(({ name, color }, n) => {
    traces.push({ x: places, y: order.map((b) => means[n][b]), mode: "markers", marker: { size: 7, color }, name,
      text: order.map((b) => `task ${b}${about(returns, b) ? `: ${about(returns, b)}` : ""}`), hovertemplate: "%{text}<br>%{y:.4g}<extra></extra>" });
  });
  await draw(element, traces, "tasks, by their return", "mean return",
    { height: 340, xaxis: { showticklabels: false, gridcolor: "#fff", zeroline: false }, showlegend: groups.length > 1 });
}

async function adapted(here, run, page, into) {
  const found = await get(["run", run, "adaptation", page.iteration], {}, here.signal);
  if (!found.ways && !found.policies) return "";
  const ways = h("div", { class: "grid" });
  const policies = h("div", { class: "chart" });
  const parts = [];
  if (found.ways?.problem) parts.push(here.problem(found.ways.problem));
  else if (found.ways) parts.push(ways);
  if (found.policies?.problem) parts.push(here.problem(found.policies.problem));
  else if (found.policies) {
    const { from_learner: own, parameters, shares } = found.policies;
    parts.push(h("div", { class: "grid" }, card(h("h3", {}, "Where adaptation took every task"),
      h("p", { class: "note" }, `the two principal components of ${own ? "the differences from the learner (cross)" : "what was inferred, about its mean"}, `
        + `of ${number(parameters)} parameters; they show ${shares.map((s) => `${(100 * s).toFixed(0)}%`).join(" and ")} of the squared differences; one point per task`), policies)));
  }
  into.replaceChildren(h("h2", {}, "Adaptation"), ...parts);
  if (found.ways && !found.ways.problem) await drawWays(ways, found.ways, page);
  if (found.policies && !found.policies.problem) await drawPolicies(policies, found.policies, page);
  return null;
}

// The colours that classes of tasks have in the curves.
const palette = (page) => (name) => page.returns.colors?.[name] ?? COLORS[0];

// A name for every task by which tasks share a colour: its class; else one colour for all.
const kinds = (page, count) => page.returns.classes ?? Array(count).fill("tasks");

async function drawWays(grid, ways, page) {
  const charts = ways.rounds.map((round) => {
    const element = h("div", { class: "chart" });
    grid.append(card(h("h3", {}, round.label === "return" ? "Paths" : `Paths ${round.label}`), h("p", { class: "note" }, "line: positions in an episode, up to three of each task; dot: start; star: goal"), element));
    return element;
  });
  const every = ways.rounds.flatMap((round) => round.tasks.flat().flatMap(([x, y]) => x.map((value, n) => [value, y[n]])));
  const edges = [0, 1].map((axis) => {
    const all = [...every.map((point) => point[axis]), ...(ways.goals || []).map((goal) => goal[axis])].filter((value) => value != null);
    const [low, high] = [all.reduce((a, b) => Math.min(a, b)), all.reduce((a, b) => Math.max(a, b))];
    return [low - 0.05 * (high - low) - 1e-9, high + 0.05 * (high - low) + 1e-9];
  });
  for (const [n, round] of ways.rounds.entries()) {
    const names = kinds(page, round.tasks.length);
    const color = palette(page);
    const traces = [...new Set(names)].map((kind) => {
      const of = round.tasks.flatMap((task, b) => (names[b] === kind ? task.map((way) => [way, b]) : []));
      return { type: "scatter", mode: "lines", name: plain(kind), line: { width: 1, color: color(kind) }, opacity: 0.65,
        x: of.flatMap(([way]) => [...way[0], null]), y: of.flatMap(([way]) => [...way[1], null]),
        text: of.flatMap(([way, b]) => [...way[0].map((_, t) => `task ${b}, step ${t}`), ""]), hovertemplate: "%{text}<extra></extra>" };
    });
    traces.push({ type: "scatter", mode: "markers", showlegend: false, hoverinfo: "skip", marker: { size: 3, color: "#24292f" },
      x: round.tasks.flat().map(([x]) => x[0]), y: round.tasks.flat().map(([, y]) => y[0]) });
    if (ways.goals) traces.push({ type: "scatter", mode: "markers", name: "goal", marker: { symbol: "star", size: 12, line: { width: 1, color: "#24292f" },
      color: ways.goals.map((_, b) => color(names[b])) }, showlegend: false,
      x: ways.goals.map((goal) => goal[0]), y: ways.goals.map((goal) => goal[1]), text: ways.goals.map((_, b) => `goal of task ${b}`), hovertemplate: "%{text}<extra></extra>" });
    await draw(charts[n], traces, `x (${ways.unit})`, `y (${ways.unit})`, { height: 420, showlegend: new Set(names).size > 1,
      xaxis: { range: edges[0], zeroline: false }, yaxis: { range: edges[1], scaleanchor: "x", zeroline: false } });
  }
}

async function drawPolicies(element, policies, page) {
  const names = kinds(page, policies.points[0].length);
  const color = palette(page);
  const last = policies.points.at(-1);
  const traces = [];
  if (policies.from_learner) {
    const way = last.flatMap((_, b) => [[0, 0], ...policies.points.map((step) => step[b]), [null, null]]);
    traces.push({ type: "scatter", mode: "lines", line: { color: "#d0d7de", width: 1 }, hoverinfo: "skip", showlegend: false, x: way.map((p) => p[0]), y: way.map((p) => p[1]) });
    traces.push({ type: "scatter", mode: "markers", name: "learner", marker: { symbol: "x", size: 10, color: "#24292f" }, x: [0], y: [0] });
  }
  for (const kind of new Set(names)) {
    const of = last.map((point, b) => [point, b]).filter(([, b]) => names[b] === kind);
    traces.push({ type: "scatter", mode: "markers", name: plain(kind), marker: { size: 8, color: color(kind) }, x: of.map(([p]) => p[0]), y: of.map(([p]) => p[1]),
      text: of.map(([, b]) => `task ${b}${about(page.returns, b) ? `: ${about(page.returns, b)}` : ""}${policies.distances ? `<br>moved by ${number(policies.distances.at(-1)[b])}` : ""}`),
      hovertemplate: "%{text}<extra></extra>" });
  }
  // A direction and a distance are true only where both axes have one scale.
  await draw(element, traces, "first component", "second component",
    { height: 420, showlegend: new Set(names).size > 1 || policies.from_learner, yaxis: { scaleanchor: "x" } });
}
