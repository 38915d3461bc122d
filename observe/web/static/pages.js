// Pages of one step, group, version and trajectory, with their lineage.

import { get } from "./data.js";
import { fold, folds, h, rowsTable, show, table, tiles } from "./dom.js";
import { bars } from "./charts.js";
import { callsOf } from "./contexts.js";
import { browser, heading } from "./lists.js";
import { conversation } from "./read.js";

const LIMIT = 24;

function link(page, id, text) {
  return h("a", { href: `#/${page}/${id}` }, text);
}

function listLink(name, fields, text) {
  return h("a", { href: `#/${name}?${new URLSearchParams(fields)}` }, text);
}

function title(text) {
  return h("h1", { tabindex: -1 }, text);
}

// The trajectories that match, with their texts.
async function readable(fields) {
  const asked = new URLSearchParams(fields);
  const answer = await get(`trajectories?${asked}&limit=${LIMIT}`);
  const own = await browser(answer, new URLSearchParams({ ...fields, limit: LIMIT }),
    heading("trajectories", asked));
  return answer.total > answer.rows.length ? [own, h("p", null, listLink("trajectories", fields,
    `All ${show(answer.total)} trajectories`))] : own;
}

export async function stepPage(id) {
  const answer = await get(`step/${id}`), own = answer.row, number = own.step;
  return {
    title: `Step ${number}`,
    body: [
      title(`Step ${number}`),
      h("nav", { class: "turns", "aria-label": "neighbouring steps" },
        number > 0 ? link("step", number - 1, `Step ${number - 1}`) : null,
        number < answer.newest ? link("step", number + 1, `Step ${number + 1}`) : null),
      tiles([["reward", show(own.reward), own.invalid ? `${own.invalid} invalid` : null],
        ["loss", show(own.loss)], ["gradient norm", show(own.grad_norm)],
        ["tokens", show(own.tokens), `${show(own.groups)} groups`],
        ["step time", `${show(own.seconds)} s`, `${show(own.waited_s)} s waiting`],
        ["staleness", show(own.staleness)]]),
      lineage([
        ["sampled from", answer.versions.map(([version, count], at) => [at ? ", " : "",
          link("version", version, `version ${version}`), ` (${count} groups)`])],
        ["trained in", `step ${number}`],
        ["produced", link("version", number + 1, `version ${number + 1}`)],
        ["used for", listLink("groups", { version: number + 1 }, `${show(answer.sampled_from)} groups`)],
      ]),
      h("h2", null, "Trajectories"), await readable({ step: number, outcome: "trained" }),
      folds(answer.sections, ["parts", "groups", "metrics", "step", "weights", "settings"]),
    ],
  };
}

function lineage(items) {
  return h("ol", { class: "lineage", "aria-label": "lineage" }, items.map(([name, what]) =>
    h("li", null, h("span", { class: "what" }, name), h("span", null, what))));
}

function madeBy(version) {
  return version ? link("step", version - 1, `step ${version - 1}`) : "the initial model";
}

function cameFrom(own, here) {
  const items = [["produced by", madeBy(own.version)],
    ["version", link("version", own.version, String(own.version))], ["sampled", here]];
  if (own.step !== null) {
    items.push(["trained in", link("step", own.step, `step ${own.step}`)],
      ["produced", link("version", own.step + 1, `version ${own.step + 1}`)],
      ["used for", listLink("groups", { version: own.step + 1 }, `${show(own.sampled_from)} groups`)]);
  }
  return lineage(items);
}

export async function groupPage(id) {
  const answer = await get(`group/${id}`), own = answer.row;
  return {
    title: `Group ${own.group}`,
    body: [
      title(`Group ${own.group}`),
      tiles([["reward", show(own.reward)], ["outcome", own.outcome, own.end_reason],
        ["trajectories", show(own.trajectories)], ["tokens", show(own.tokens)],
        ["staleness", show(own.staleness), `deadline step ${show(own.deadline)}`]]),
      cameFrom(answer.lineage, `group ${own.group}`),
      h("h2", null, "Trajectories"), await readable({ q: own.group }),
      folds(answer.sections, ["group", "samples", "outcome"]),
    ],
  };
}

export async function versionPage(id) {
  const answer = await get(`version/${id}`), number = answer.version;
  const steps = answer.steps.map(([step, count], at) =>
    [at ? ", " : "", link("step", step, `step ${step}`), ` (${count})`]);
  return {
    title: `Version ${number}`,
    body: [
      title(`Version ${number}`),
      tiles(answer.evaluations.map(([name, reward, valid, count]) =>
        [`evaluation ${name}`.trim(), show(reward), `${valid} of ${count} valid`])),
      lineage([["produced by", madeBy(number)], ["version", String(number)],
        ["trained in", steps.length ? steps : "no step yet"]]),
      h("h2", null, "Groups"),
      rowsTable(answer.outcomes, { caption: "Groups by outcome", none: "No group was sampled from it." }),
      h("p", null, listLink("groups", { version: number }, "Groups of this version"), " · ",
        listLink("trajectories", { version: number }, "Trajectories of this version")),
      h("h2", null, "Workers"),
      rowsTable(answer.served, { caption: "Workers", none: "No worker served it." }),
    ],
  };
}

export async function trajectoryPage(id, fields) {
  const from = new URLSearchParams(fields).get("from") || "0";
  const answer = await get(`trajectory/${id}${from === "0" ? "" : `?from=${from}`}`);
  const { row, record, sections } = answer;
  return {
    title: `Trajectory ${row.trajectory}`,
    body: [
      title(`Trajectory ${row.trajectory}`),
      tiles([["reward", show(row.reward), row.error], ["outcome", row.outcome],
        ["tokens", show(row.tokens), row.finish && `finish ${row.finish}`],
        ["staleness", show(row.staleness)], ["worker", show(row.worker),
          row.attempts > 1 ? `${row.attempts} attempts` : null]]),
      cameFrom(answer.lineage, [link("group", sections.group.group, `group ${sections.group.group}`)]),
      h("h2", { class: "unseen" }, "Text"),
      record.missing ? h("p", { class: "note" }, record.missing) : conversation(answer),
      sections.errors ? [h("h2", null, "Errors"), h("ul", { class: "warnings" },
        sections.errors.map(({ what }) => h("li", { class: "bad" }, what)))] : null,
      sections.calls ? [h("h2", null, "Calls"), callsOf(record.tree, sections.calls)] : null,
      record.missing ? null : h("div", { class: "charts" }, course(sections.times)),
      folds(sections, ["contribution", "attempts", "records", "result", "scored together", "group", "outcome"]),
      record.missing ? null : fold("segments", "Segments", table(record.segments, { caption: "Segments" })),
    ],
  };
}

const STAGES = { "waiting for a slot": "started", "first token": "first token", generation: "finished",
  reward: "rewarded" };

function course(times) {
  const stages = Object.entries(STAGES).map(([name, end]) => [name, times[`${end} after ms`]])
    .filter(([, at]) => at !== null);
  const seconds = stages.map(([, at], index) => Math.max(0, at - (index ? stages[index - 1][1] : 0)) / 1000);
  return bars({ title: "Time on the worker", note: "Measured from the last scheduling decision.", unit: "seconds",
    rows: stages.length ? [{ name: "seconds", values: seconds }] : [],
    parts: stages.map(([name]) => name), without: "The record has no times." });
}
