// An episode step by step: its film beside observations, actions, rewards and advantages.

import { card, choice, h, problem, quiet } from "./dom.js";
import { film, get, link } from "./api.js";
import { COLORS, align, draw } from "./charts.js";
import { number } from "./format.js";
import { plain } from "./traces.js";

const FIRST = ["rewards", "observations", "actions", "advantages", "returns", "values"];
const FRAME_MILLISECONDS = 50;
const MOST_LINES = 24;

export async function episodePage(here, run, ref) {
  const task = Number(here.query.get("task"));
  const index = Number(here.query.get("episode"));
  const at = ["run", run, "episode", ref.iteration, ref.stage, ref.step];
  const found = await get(at, { task, episode: index }, here.signal);
  const iteration = await get(["run", run, "iteration", ref.iteration], {}, here.signal);
  const steps = iteration.stages.filter((stage) => stage.stage === ref.stage).map((stage) => stage.step);
  const go = (k, b, e) => { location.hash = `${link(run, "episode", ref.iteration, ref.stage, k)}?task=${b}&episode=${e}`; };
  const shown = { t: 0, film: null, playing: false };
  const charts = [];
  const now = h("table", { class: "now" });
  const range = h("input", { type: "range", min: 0, max: found.length, value: 0, "aria-label": "step" });
  const place = h("b", {}, "step 0");
  const canvas = h("canvas", { width: 320, height: 320, hidden: true });
  const filmed = h("div", { class: "film" });
  const play = h("button", {}, "▶ play");

  function seek(t) {
    shown.t = Math.max(0, Math.min(found.length, t));
    range.value = shown.t;
    place.textContent = `step ${shown.t} of ${found.length}`;
    for (const { chart, cursor } of charts) moveCursor(chart, cursor, shown.t);
    now.replaceChildren(...valuesAt(found, shown.t));
    if (shown.film) paint(canvas, shown.film, shown.t);
  }

  range.addEventListener("input", () => seek(Number(range.value)));
  play.addEventListener("click", () => {
    shown.playing = !shown.playing;
    play.textContent = shown.playing ? "❚❚ pause" : "▶ play";
    if (shown.playing && shown.t >= found.length) seek(0);
  });
  here.every(FRAME_MILLISECONDS, () => {
    if (!shown.playing) return;
    if (shown.t >= found.length) return play.click();
    return seek(shown.t + (shown.film?.every ?? 1));
  });

  const button = h("button", { onclick: () => here.attempt(filmed, async () => {
    filmed.replaceChildren(quiet("Simulating and drawing … this takes some seconds."));
    shown.film = await film(run, ref, { task, episode: index }, here.signal);
    canvas.hidden = false;
    paint(canvas, shown.film, shown.t);
    return [canvas, h("p", { class: "note" }, shown.film.message)];
  }) }, "Show the film");
  filmed.append(button, h("p", { class: "note" }, "The episode is simulated again from its seed and stored actions, by `metaloom video`."));

  const named = (signal) => { const place = FIRST.indexOf(signal.name); return place < 0 ? FIRST.length : place; };
  const signals = found.signals.toSorted((a, b) => named(a) - named(b));
  const right = h("div", {}, found.problems.map(problem), signals.map((signal) => {
    const chart = h("div", { class: "chart" });
    const cursor = h("div", { class: "cursor" });
    return [card(h("h2", {}, signal.name), h("p", { class: "note" }, signal.description), chart), [signal, chart, cursor]];
  }).map(([element, drawn]) => { charts.push({ signal: drawn[0], chart: drawn[1], cursor: drawn[2] }); return element; }));

  requestAnimationFrame(async () => {
    for (const { signal, chart } of charts) {
      if (here.signal.aborted) return;
      await lines(chart, signal, found.length);
    }
    await align(charts.map(({ chart }) => chart));
    for (const { chart, cursor } of charts) {
      chart.append(cursor);
      chart.on("plotly_click", (event) => seek(Math.round(event.points[0].x)));
      chart.on("plotly_afterplot", () => moveCursor(chart, cursor, shown.t));
      moveCursor(chart, cursor, shown.t);
    }
  });
  seek(0);

  const episodes = found.episodes[task];
  return [
    h("h1", {}, `Task ${task}, episode ${index}`, ref.step ? `, after ${ref.step} inner step${ref.step > 1 ? "s" : ""}` : steps.length > 1 ? ", before adaptation" : ""),
    h("p", { class: "quiet" }, `return ${number(found.return)}, ${number(found.length)} steps${taskText(iteration, task)}`),
    h("div", { class: "row" },
      choice("inner step", steps.map((k) => [k, k]), ref.step, (k) => go(k, task, index)),
      choice("task", numbered(found.tasks), task, (b) => go(ref.step, b, 0)),
      choice("episode", numbered(episodes), index, (e) => go(ref.step, task, e)),
      h("a", { href: link(run, "iteration", ref.iteration) }, "the iteration")),
    h("div", { class: "beside" },
      h("div", { class: "aside" }, card(filmed, h("div", { class: "row" }, play, range), place, h("div", { class: "table scrolled" }, now))), right),
  ];
}

const numbered = (count) => Array.from({ length: count }, (_, n) => [n, n]);

function taskText(iteration, task) {
  const { tasks, classes } = iteration.returns;
  const parts = Object.entries(tasks || {}).slice(0, 6).map(([name, values]) => `${name} ${number(values[task])}`);
  return [...(classes ? [classes[task]] : []), ...parts].map((part) => `, ${part}`).join("");
}

async function lines(chart, signal, length) {
  const few = signal.values.slice(0, MOST_LINES);
  const traces = few.map((values, n) => ({ y: values, x: values.map((_, t) => t), type: "scatter", mode: "lines", name: plain(signal.labels[n]),
    line: { width: 1.5, color: COLORS[n % COLORS.length] }, hovertemplate: `${few.length > 1 ? "%{fullData.name}, " : ""}step %{x}: %{y:.5g}<extra></extra>` }));
  await draw(chart, traces, few.length < signal.values.length ? `step (the first ${MOST_LINES} of ${signal.values.length} components)` : "step", "",
    { height: few.length > 4 ? 320 : few.length > 1 ? 210 : 180, showlegend: few.length > 1, margin: { l: 52, r: 14, t: 6, b: 40 },
      xaxis: { range: [-0.5, length + 0.5], zeroline: false, automargin: false } });
}

function moveCursor(chart, cursor, t) {
  const axis = chart._fullLayout?.xaxis;
  if (!axis) return;
  const size = chart._fullLayout._size;
  const x = axis.l2p(t);
  cursor.hidden = x < 0 || x > axis._length;
  cursor.style.left = `${size.l + x}px`;
  cursor.style.top = `${size.t}px`;
  cursor.style.height = `${size.h}px`;
}

function valuesAt(found, t) {
  return found.signals.flatMap((signal) => signal.values.slice(0, MOST_LINES).map((values, n) => h("tr", {},
    h("td", {}, signal.values.length > 1 ? `${signal.name}: ${signal.labels[n]}` : signal.name), h("td", { class: "number" }, t < values.length ? number(values[t]) : "–"))));
}

function paint(canvas, sheet, t) {
  const n = Math.min(Math.ceil(t / sheet.every), sheet.frames - 1);
  const width = sheet.image.width / sheet.columns;
  const height = sheet.image.height / Math.ceil(sheet.frames / sheet.columns);
  if (canvas.width !== width || canvas.height !== height) [canvas.width, canvas.height] = [width, height];
  canvas.getContext("2d").drawImage(sheet.image, (n % sheet.columns) * width, Math.floor(n / sheet.columns) * height, width, height, 0, 0, width, height);
}
