// The output of a stage: its record, what it was made from, what was made from it.

import { card, command, facts, folded, h, quiet, table } from "./dom.js";
import { get, link, outputLink } from "./api.js";
import { arrayLink } from "./iteration.js";
import { bytes, moment, seconds, short } from "./format.js";

export async function outputPage(here, run, ref) {
  const found = await get(["run", run, "output", ref.iteration, ref.stage, ref.step], {}, here.signal);
  return [
    h("h1", {}, `${found.label}, iteration ${found.iteration}`),
    found.thinned ? h("p", { class: "quiet" }, "Thinned: its arrays were removed on purpose. The record tells how to get them back: ",
      h("code", {}, "metaloom replay --materialise")) : "",
    h("div", { class: "grid" }, card(h("h2", {}, "Made from"), madeFrom(run, found)), card(h("h2", {}, "What was made from it"), readBy(run, found))),
    h("h2", {}, "Replay this stage"), card(quiet("Runs it again from its stored inputs and compares every array, bit for bit."), found.commands.map(command)),
    h("h2", {}, "Arrays"), card(arrays(run, ref, found)),
    h("h2", {}, "Record"), card(facts([
      ["digest", h("span", { class: "mono" }, found.digest)], ["type", found.output], ["computed", `${moment(found.started)} UTC, in ${seconds(found.seconds)}`],
      ["on disk", bytes(found.bytes)], ["seed position", found.seed_position.join(", ")], ["position in the history", String(found.sequence)],
      ["session", String(found.session)], ["digest of the configuration", h("span", { class: "mono" }, found.config_digest)],
      ["hash of the record", h("span", { class: "mono" }, found.sha256)], ["of the record before", h("span", { class: "mono" }, found.previous)],
    ])),
    folded("Computed with", false, facts([...Object.entries(found.versions), ...found.environment])),
  ];
}

function madeFrom(run, found) {
  const inputs = found.inputs.map((item) => [
    item.stored ? h("a", { href: outputLink(run, item) }, item.label) : item.label, item.iteration, h("span", { class: "mono" }, short(item.digest))]);
  const spans = found.spans.map((span) => [
    span.stages.join(" and "), h("span", {}, h("a", { href: link(run, "iteration", span.first.iteration) }, String(span.first.iteration)), " to ",
      h("a", { href: link(run, "iteration", span.last.iteration) }, String(span.last.iteration))), `${span.outputs} outputs, ${short(span.digest)}`]);
  if (!inputs.length && !spans.length) return quiet("Nothing: of settings and seed alone.");
  return table(["output", "iteration", "digest"], [...inputs, ...spans]);
}

function readBy(run, found) {
  if (!found.read_by.length) return quiet("Nothing in this iteration or the next.");
  return table(["output", "iteration"], found.read_by.map((item) => [h("a", { href: outputLink(run, item) }, item.label), item.iteration]));
}

function arrays(run, ref, found) {
  if (!found.arrays.length) return quiet("None.");
  const episodes = found.output === "EpisodeBatch" && !found.thinned
    ? h("p", {}, h("a", { href: `${link(run, "episode", ref.iteration, ref.stage, ref.step)}?task=0&episode=0` }, "Episodes, step by step")) : "";
  return [episodes, table(["array", "axes", "dtype", "unit", "what it is"], found.arrays.map((array) => (array.problem
    ? [array.name, array.problem] : [
      found.thinned ? array.name : arrayLink(run, ref, array),
      array.dims.map((dim, n) => `${dim} ${array.shape[n]}`).join(" × ") || "a number", array.dtype, array.unit, array.description])))];
}
