// Pages of one step, group, version and trajectory, with their lineage.

import { get } from "./data.js";
import { facts, fold, h, show, table, tiles } from "./dom.js";
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
  const answer = await get(`step/${id}`), own = answer.step, number = own.step;
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
      ...(answer.parts ? [h("h2", null, "Parts of the batch"),
        table(answer.parts, { caption: `Parts of step ${number}` })] : []),
      fold("groups", `Groups (${answer.groups.rows.length})`,
        table(answer.groups, { caption: `Groups of step ${number}` })),
      fold("metrics", "Metrics", facts(answer.metrics)),
      fold("commit", "Commit", facts(answer.facts, true)),
      fold("settings", "Settings in force", facts(answer.settings)),
    ],
  };
}

function lineage(items) {
  return h("ol", { class: "lineage", "aria-label": "lineage" }, items.map(([name, what]) =>
    h("li", null, h("span", { class: "what" }, name), h("span", null, what))));
}

function madeBy(step) {
  return step === null ? "the initial model" : link("step", step, `step ${step}`);
}

function cameFrom(own, here) {
  const items = [["produced by", madeBy(own.made_by)],
    ["version", link("version", own.version, `version ${own.version}`)], ["sampled", here]];
  if (own.step !== null) {
    items.push(["trained in", link("step", own.step, `step ${own.step}`)],
      ["produced", link("version", own.makes, `version ${own.makes}`)],
      ["used for", listLink("groups", { version: own.makes }, `${show(own.sampled_from_it)} groups`)]);
  }
  return lineage(items);
}

export async function groupPage(id) {
  const answer = await get(`group/${id}`), own = answer.group;
  return {
    title: `Group ${own.group}`,
    body: [
      title(`Group ${own.group}`),
      tiles([["reward", show(own.reward)], ["outcome", own.outcome, own.end_reason],
        ["trajectories", show(own.trajectories)], ["tokens", show(own.tokens)],
        ["staleness", show(own.staleness), `deadline step ${show(own.deadline)}`]]),
      cameFrom(answer.lineage, `group ${own.group}`),
      h("h2", null, "Trajectories"), await readable({ q: own.group }),
      fold("facts", "Dispatch", facts(answer.facts, true)),
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
      tiles(answer.evaluations.rows.map(([name, reward, valid, count]) => [
        name === "default" ? "evaluation" : `evaluation ${name}`, show(reward), `${valid} of ${count} valid`])),
      lineage([["produced by", madeBy(answer.made_by)], ["version", String(number)],
        ["trained in", steps.length ? steps : "no step yet"]]),
      h("h2", null, "Groups"),
      table(answer.outcomes, { caption: "Groups by outcome", none: "No group was sampled from it." }),
      h("p", null, listLink("groups", { version: number }, "Groups of this version"), " · ",
        listLink("trajectories", { version: number }, "Trajectories of this version")),
      h("h2", null, "Workers"),
      table(answer.served, { caption: "Workers", none: "No worker served it." }),
    ],
  };
}

export async function trajectoryPage(id, fields) {
  const from = new URLSearchParams(fields).get("from") || "0";
  const answer = await get(`trajectory/${id}${from === "0" ? "" : `?from=${from}`}`);
  const { row, record } = answer;
  return {
    title: `Trajectory ${row.trajectory}`,
    body: [
      title(`Trajectory ${row.trajectory}`),
      tiles([["reward", show(row.reward), row.error], ["outcome", row.outcome],
        ["tokens", show(row.tokens), row.finish && `finish ${row.finish}`],
        ["staleness", show(row.staleness)], ["worker", show(row.worker),
          row.attempts > 1 ? `${row.attempts} attempts` : null]]),
      cameFrom(answer.lineage, [link("group", answer.group, `group ${answer.group}`)]),
      h("h2", { class: "unseen" }, "Text"),
      record.missing ? h("p", { class: "note" }, record.missing) : conversation(answer),
      answer.errors.length ? [h("h2", null, "Errors"),
        h("ul", { class: "warnings" }, answer.errors.map((text) => h("li", { class: "bad" }, text)))] : null,
      record.tree ? [h("h2", null, "Calls"), callsOf(record.tree)] : null,
      record.missing ? null : h("div", { class: "charts" }, course(record)),
      fold("contribution", "Contribution to the step", contribution(answer.contribution)),
      fold("attempts", `Attempts (${answer.attempts.rows.length})`,
        table(answer.attempts, { caption: "Attempts" })),
      record.missing ? null : fold("record", "Record", facts(recordFacts(record)),
        table(record.segments, { caption: "Segments" })),
      fold("facts", "Group", facts(answer.facts, true)),
    ],
  };
}

function recordFacts(record) {
  const { position, bytes, reward_raw, reward_error, error, migrations, prompt_tokens, prefills } = record;
  const parts = Object.entries(record.reward_parts).map(([name, value]) => `${name} ${show(value)}`);
  return { position, bytes, "raw reward": reward_raw, "reward components": parts.join(", "),
    answer: record.reward_answer, "reward error": reward_error, error, migrations,
    "prompt tokens": prompt_tokens, "prefilled at token": prefills.join(", ") };
}

function course(record) {
  const names = { started: "waiting for a slot", first_token: "first token",
    finished: "generation", rewarded: "reward" };
  let before = 0;
  const parts = record.times.map(([name, at]) => {
    const own = Math.max(0, at - before);
    before = at;
    return [names[name] || name, own / 1000];
  });
  return bars({ title: "Time on the worker", note: "Measured from the last scheduling decision.", unit: "seconds",
    rows: parts.length ? [{ name: "seconds", values: parts.map(([, value]) => value) }] : [],
    parts: parts.map(([name]) => name), without: "The record has no times." });
}

function contribution(row) {
  if (!row) return h("p", { class: "note" }, "Not trained, or the store has no contributions of the step.");
  const { trajectory, group, ...rest } = row;
  return facts(rest);
}
