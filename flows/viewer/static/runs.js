// The list of runs.

import { choice, command, h, problem, quiet, refill, state, table } from "./dom.js";
import { get, link } from "./api.js";
import { spark } from "./charts.js";
import { bytes, moment, number } from "./format.js";

const LOOK = 3000;

export async function runsPage(here) {
  const sparks = new Map();
  const list = h("div", { class: "card" });
  const search = h("input", { type: "search", placeholder: "find a run", "aria-label": "find a run", oninput: () => fill() });
  const place = await get(["place"], {}, here.signal);
  let found = [];
  let wanted = "";

  const cell = (row) => {
    const known = sparks.get(row.name);
    // Asked again only when the run has gone on.
    if (!["damaged", "unreadable"].includes(row.state) && known?.done !== row.iterations_done) {
      const entry = { done: row.iterations_done, element: h("span", {}, known?.element ?? "") };
      sparks.set(row.name, entry);
      get(["run", row.name, "spark"], {}, here.signal)
        .then(({ values }) => entry.element.replaceChildren(spark(values) ?? "")).catch(() => {});
    }
    return sparks.get(row.name)?.element;
  };

  function fill() {
    const text = search.value.toLowerCase();
    const rows = found.filter((row) => (!wanted || row.state === wanted)
      && [row.name, row.algorithm, row.env].some((part) => (part || "").toLowerCase().includes(text)));
    if (!found.length) return list.replaceChildren(quiet("No runs here yet. This trains one in a minute, and it appears:"), command(place.train));
    if (!rows.length) return list.replaceChildren(quiet("No run matches."));
    return refill(list, table(
      ["run", "state", ">iterations", ">last return", "returns", "algorithm", "environment", ">size", "started (UTC)"],
      rows.map((row) => [
        h("a", { href: link(row.name) }, row.name), state(row.state),
        ...(row.problem ? ["", "", "", h("span", { class: "quiet" }, row.problem), "", bytes(row.bytes), ""] : [
          `${number(row.iterations_done)} of ${number(row.iterations)}`, [number(row.last_return), h("div", { class: "note" }, row.last_return_is)], cell(row),
          row.algorithm, row.env, bytes(row.bytes), moment(row.started)]),
      ])));
  }

  const trouble = h("div", {});
  async function look() {
    try {
      found = (await get(["runs"], {}, here.signal)).runs;
      trouble.replaceChildren();
      fill();
    } catch (error) {
      if (error.name !== "AbortError") trouble.replaceChildren(problem(error.message));
    }
  }
  await look();
  here.every(LOOK, look);
  const states = [["", "all"], ...["training", "complete", "stopped", "damaged", "unreadable"].map((name) => [name, name])];
  return [
    h("h1", {}, "Runs"),
    h("div", { class: "row" }, search, choice("state", states, wanted, (value) => { wanted = value; fill(); })),
    trouble, list,
  ];
}
