// The address behind the "#" says which page is shown.

import { h, problem, quiet } from "./dom.js";
import { Problem, get, link } from "./api.js";
import { runsPage } from "./runs.js";
import { runPage } from "./run.js";
import { iterationPage } from "./iteration.js";
import { outputPage } from "./output.js";
import { arrayPage } from "./array.js";
import { episodePage } from "./episode.js";

const PAGES = { iteration: iterationPage, output: outputPage, array: arrayPage, episode: episodePage };
let shown = new AbortController();

// What a page has at hand: its element, the signal that it has been left, and a clock that stops then.
function surroundings(element, signal) {
  const every = (milliseconds, look) => {
    const timer = setInterval(() => { if (!document.hidden) look(); }, milliseconds);
    signal.addEventListener("abort", () => clearInterval(timer));
  };
  // One fault may keep several parts of a page from being read, and is shown once.
  const seen = new Set();
  const once = (text) => (seen.has(text) ? quiet("Cannot be read, as said above.") : seen.add(text) && problem(text));
  return { element, signal, every, problem: once, attempt: (into, work) => attempt(into, work, signal) };
}

// Fill an element, or put the reason why that failed in its place, and `more`.
async function attempt(into, work, signal, more = []) {
  try {
    const made = await work();
    if (!signal.aborted && made != null) into.replaceChildren(...[made].flat(Infinity).filter(Boolean));
  } catch (error) {
    if (signal.aborted || error.name === "AbortError") return;
    if (!(error instanceof Problem)) console.error(error);
    into.replaceChildren(problem(error.message), ...more);
  }
}

function trail(parts) {
  const all = [["runs", "#/"], ...parts];
  document.getElementById("trail").replaceChildren(
    ...all.map(([text, href], n) => (n < all.length - 1 ? h("a", { href }, text) : h("span", {}, text))));
  document.title = `${parts.length ? parts.map(([text]) => text).join(" › ") : "runs"} – metaloom view`;
}

async function show() {
  shown.abort();
  shown = new AbortController();
  const { signal } = shown;
  const [path, query] = location.hash.slice(1).split("?");
  const parts = path.split("/").filter(Boolean).map(decodeURIComponent);
  const element = document.getElementById("page");
  element.replaceChildren(quiet("Reading …"));
  const here = { ...surroundings(element, signal), query: new URLSearchParams(query || "") };
  const elsewhere = h("p", {}, h("a", { href: "#/" }, "All runs"));
  await attempt(element, async () => {
    trail([]);
    if (!parts.length) return runsPage(here);
    const [first, run, kind, iteration, stage, step] = parts;
    const page = kind == null ? runPage : PAGES[kind];
    if (first === "run" && kind != null) elsewhere.append(", ", h("a", { href: link(run) }, run));
    if (first !== "run" || !run || !page || !/^\d*$/.test(iteration ?? "")) throw new Problem(`there is no page ${path}`);
    const names = [[run, link(run)]];
    if (iteration != null) names.push([`iteration ${iteration}`, link(run, "iteration", iteration)]);
    if (stage != null) names.push([`${stage} k=${step}`, link(run, "output", iteration, stage, step)]);
    if (kind === "array") names.push([here.query.get("array"), ""]);
    if (kind === "episode") names.push([`task ${here.query.get("task")}, episode ${here.query.get("episode")}`, ""]);
    trail(names);
    return page(here, run, { iteration: Number(iteration), stage, step: Number(step) });
  }, signal, [elsewhere]);
}

window.addEventListener("hashchange", show);
const asked = await get(["place"]).catch(() => null);
if (asked) {
  document.getElementById("place").textContent = asked.place;
  if (asked.only && !location.hash) location.replace(link(asked.only));
}
show();
