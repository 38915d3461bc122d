// The pages of one step, group, version and trajectory, with links to where each came from and to
// what became of it.

import { get, has } from "./data.js";
import { facts, h, show, table } from "./dom.js";
import { bars } from "./charts.js";
import { callsOf } from "./contexts.js";
import { tokensOf } from "./tokens.js";

function link(page, id, text) {
  const address = `#/${page}/${id}`;
  return has(address) ? h("a", { href: address }, text) : text;
}

function listLink(name, fields, text) {
  return h("a", { href: `#/${name}?${new URLSearchParams(fields)}` }, text);
}

export async function stepPage(id) {
  const found = await get(`step/${id}`);
  const number = found.step.step;
  const { step, reward, ...rest } = found.step;
  return {
    title: `Step ${number}`,
    body: [
      h("h1", { tabindex: -1 }, `Step ${number}`),
      h("nav", { class: "turns", "aria-label": "neighbouring steps" },
        number > 0 ? link("step", number - 1, `Step ${number - 1}`) : null,
        link("step", number + 1, `Step ${number + 1}`)),
      lineage([
        ["sampled from", found.versions.map(([version, count], at) => [at ? ", " : "",
          link("version", version, `version ${version}`), ` (${count} groups)`])],
        ["this step", `step ${number}: ${rest.groups} groups`],
        ["made", link("version", number + 1, `version ${number + 1}`)],
        ["from which", [listLink("groups", { version: number + 1 },
          `${show(found.sampled_from)} groups`), " were sampled"]],
      ]),
      facts({ reward, ...rest, ...found.facts }, has),
      h("p", null, listLink("trajectories", { step: number }, "Its trajectories as a list")),
      ...(found.parts ? [h("h2", null, "Parts of the batch"),
        table(found.parts, { caption: `Parts of step ${number}`, has })] : []),
      h("h2", null, "Groups of the batch"),
      table(found.groups, { caption: `Groups of step ${number}`, has }),
      h("h2", null, "Figures"), facts(found.figures),
      h("details", { "data-key": "settings" }, h("summary", null, "Settings in force"),
        facts(found.settings)),
    ],
  };
}

function lineage(items) {
  return h("ol", { class: "lineage", "aria-label": "lineage" }, items.map(([name, what]) =>
    h("li", null, h("span", { class: "what" }, name), h("span", null, what))));
}

function cameFrom(own, here) {
  const items = [
    ["made by", own.made_by === null ? "the model the run started with" :
      link("step", own.made_by, `step ${own.made_by}`)],
    ["version", link("version", own.version, `version ${own.version}`)],
    ["sampled", here],
  ];
  if (own.step !== null) {
    items.push(["trained in", link("step", own.step, `step ${own.step}`)],
      ["which made", link("version", own.makes, `version ${own.makes}`)],
      ["from which", [listLink("groups", { version: own.makes },
        `${show(own.sampled_from_it)} groups`), " were sampled"]]);
  }
  return lineage(items);
}

export async function groupPage(id) {
  const found = await get(`group/${id}`);
  const { group, ...rest } = found.group;
  return {
    title: `Group ${group}`,
    body: [
      h("h1", { tabindex: -1 }, `Group ${group}`),
      cameFrom(found.lineage, `group ${group}`),
      facts({ ...rest, ...found.facts }, has),
      h("h2", null, "Siblings"),
      table(found.siblings, { caption: `Siblings of ${group}`, has }),
    ],
  };
}

export async function versionPage(id) {
  const found = await get(`version/${id}`);
  const number = found.version;
  return {
    title: `Version ${number}`,
    body: [
      h("h1", { tabindex: -1 }, `Version ${number}`),
      lineage([
        ["made by", found.made_by === null ? "the model the run started with" :
          link("step", found.made_by, `step ${found.made_by}`)],
        ["this version", `version ${number}`],
        ["its groups were trained in", found.steps.length ? found.steps.map(([step, count], at) =>
          [at ? ", " : "", link("step", step, `step ${step}`), ` (${count})`]) : "no step yet"],
      ]),
      h("p", null, listLink("groups", { version: number }, "Groups that were sampled from it")),
      h("h2", null, "What became of its groups"), facts(found.fates),
      h("h2", null, "Who hosted it"), table(found.hosts, { caption: "Hosts" }),
    ],
  };
}

export async function trajectoryPage(id, fields) {
  const from = new URLSearchParams(fields).get("from") || "0";
  const found = await get(`trajectory/${id}${from === "0" ? "" : `?from=${from}`}`);
  const { trajectory, ...rest } = found.row;
  const record = found.record;
  return {
    title: `Trajectory ${trajectory}`,
    body: [
      h("h1", { tabindex: -1 }, `Trajectory ${trajectory}`),
      cameFrom(found.lineage, [link("group", found.group, `group ${found.group}`),
        `, ${trajectory}`]),
      facts({ ...rest, ...found.facts }, has),
      record.tree ? [h("h2", null, "Calls of its agent"), callsOf(record.tree)] : null,
      h("h2", null, record.tree ? "Contexts" : "Tokens"),
      record.missing ? h("p", { class: "note" }, record.missing) :
        tokensOf(trajectory, found),
      record.missing ? null : [
        h("div", { class: "charts" }, course(record, found)),
        h("h2", null, "Its record"), facts(recordFacts(record)),
        table(record.segments, { caption: "Segments", has }),
      ],
      h("h2", null, "What it did to the weights"), contribution(found.contribution),
      h("h2", null, "Attempts"), table(found.attempts, { caption: "Attempts", has }),
      found.errors.length ? [h("h2", null, "Errors"),
        h("ul", null, found.errors.map((one) => h("li", null, one)))] : null,
    ],
  };
}

function recordFacts(record) {
  const { place, bytes, reward_raw, reward_error, error, moves, prompt_tokens, prefills } = record;
  const parts = Object.entries(record.reward_parts).map(([name, value]) => `${name} ${show(value)}`);
  return { place, bytes, "raw reward": reward_raw, "parts of the reward": parts.join(", "),
    answer: record.reward_answer, "no valid reward because": reward_error, error, moves, "prompt tokens": prompt_tokens,
    "prefilled at": prefills.join(", ") };
}

function course(record) {
  const names = { started: "for a slot", first_token: "to the first token",
    finished: "to the last token", rewarded: "to the reward" };
  let before = 0;
  const parts = record.times.map(([name, at]) => {
    const own = Math.max(0, at - before);
    before = at;
    return [names[name] || name, own / 1000];
  });
  return bars({ title: "Where its time went", note: "From its last placement on.", unit: "seconds",
    rows: parts.length ? [{ name: "this one", values: parts.map(([, value]) => value) }] : [],
    parts: parts.map(([name]) => name), without: "Its record says no times." });
}

function contribution(row) {
  if (!row) return h("p", { class: "note" }, "It was not trained, or the file is not in the store.");
  const { trajectory, group, ...rest } = row;
  return facts(rest);
}
