// Lists with filters: steps, groups, trajectories, log; trajectories are read side by side.

import { get } from "./data.js";
import { fold, h, show, table } from "./dom.js";
import { reader } from "./read.js";

const OUTCOMES = ["", "open", "trained", "filtered", "failed", "cancelled", "evaluated"];
const COMMON = [["q", "id contains"], ["outcome", "outcome", OUTCOMES],
  ["purpose", "purpose", ["", "train", "eval"]], ["version", "version", "number"],
  ["step", "step", "number"], ["staleness", "staleness", "number"]];
const FIELDS = {
  steps: [],
  groups: COMMON,
  trajectories: [...COMMON, ["worker", "worker"],
    ["finish", "finish", ["", "stop", "length", "environment", "error"]],
    ["valid", "reward is valid", ["", "yes", "no"]], ["reward_min", "reward from", "number"],
    ["reward_max", "reward to", "number"], ["tokens_min", "tokens from", "number"],
    ["tokens_max", "tokens to", "number"], ["attempts_min", "attempts from", "number"]],
  decisions: [["kind", "kind", null], ["q", "subject or reason contains"]],
};
const TITLES = { steps: "Steps", groups: "Groups", trajectories: "Trajectories", decisions: "Log" };
const SHOWN = ["trajectory", "reward", "tokens", "outcome", "finish", "version", "step"];

// A heading sorts by its column: descending first, then ascending.
export function heading(name, asked) {
  return (column) => {
    const now = asked.get("sort"), next = new URLSearchParams(asked);
    next.set("sort", now === `-${column}` ? column : `-${column}`);
    next.delete("offset");
    const mark = now === column ? " \u2191" : now === `-${column}` ? " \u2193" : "";
    return h("a", { href: `#/${name}?${next}` }, column.replaceAll("_", " ") + mark);
  };
}

export async function listPage(name, fields) {
  const asked = new URLSearchParams(fields);
  const list = await get(`${name}?${asked}`);
  const last = Math.min(list.offset + list.rows.length, list.total);
  const range = list.total ? `${show(list.offset + 1)} to ${show(last)} of ${show(list.total)}` :
    "none";
  const headers = heading(name, asked);
  return {
    title: TITLES[name],
    body: [
      h("h1", { tabindex: -1 }, TITLES[name], " ", h("span", { class: "state", role: "status",
        id: "range" }, range)),
      FIELDS[name].length ? filters(name, asked, list) : null,
      name === "trajectories" ? await browser(list, asked, headers) :
        table(list, { caption: TITLES[name], headers }),
      turns(name, asked, list),
      name === "decisions" ? counts(list.counts) : null,
    ],
  };
}

// The trajectories of a page with their texts; two of them are open.
export async function browser(list, asked, headers = null) {
  const at = Object.fromEntries(list.columns.map((name, place) => [name, place]));
  const texts = await get(`texts?${asked}`);
  const used = new Set([...SHOWN, (asked.get("sort") || "").replace("-", ""),
    ...[...asked.keys()].map((one) => one.replace(/_(min|max)$/, ""))]);
  const columns = list.columns.filter((one) => used.has(one));
  const open = reader();
  const buttons = new Map();
  const press = (name) => open.toggle(name).then(() => buttons.forEach((button, own) =>
    button.setAttribute("aria-pressed", open.names.includes(own))));
  const rows = list.rows.map((row) => {
    const name = row[at.trajectory], [prompt, response] = texts[name] || [null, null];
    const button = h("button", { type: "button", "aria-pressed": "false", "aria-label": `Read ${name}`,
      onclick: () => press(name) }, "Read");
    buttons.set(name, button);
    const clip = (text) => (text === null ? null : h("span", { class: "clip" }, text));
    return [...columns.map((one) => row[at[one]]), clip(prompt), clip(response), button];
  });
  for (const name of contrast(list.rows.map((row) => [row[at.trajectory], row[at.reward]]))) {
    await press(name);
  }
  const listed = { columns: [...columns, "prompt", "response", "read"], rows };
  const drawn = headers && ((one) => (["prompt", "response", "read"].includes(one) ? one : headers(one)));
  return h("div", { class: "browser" }, open.place,
    table(dropped(listed, ["prompt", "response"]), { caption: "Trajectories", headers: drawn }));
}

// The best and the worst trajectory of the first group whose rewards differ; else the first two.
function contrast(rewarded) {
  const groups = new Map();
  for (const [name, reward] of rewarded) {
    const group = name.slice(0, name.lastIndexOf("-"));
    if (reward !== null) groups.set(group, [...(groups.get(group) || []), [name, reward]]);
  }
  for (const own of groups.values()) {
    const sorted = [...own].sort(([, a], [, b]) => b - a), last = sorted[sorted.length - 1];
    if (sorted[0][1] > last[1]) return [sorted[0][0], last[0]];
  }
  return rewarded.slice(0, 2).map(([name]) => name);
}

// Without the columns of these names that are empty, or equal in all rows.
function dropped({ columns, rows }, names) {
  const texts = (at) => new Set(rows.map((row) => row[at] && row[at].textContent));
  const keep = columns.map((_, at) => at).filter((at) => !names.includes(columns[at]) ||
    texts(at).size > 1 || (rows.length === 1 && rows[0][at]));
  return { columns: keep.map((at) => columns[at]), rows: rows.map((row) => keep.map((at) => row[at])) };
}

function filters(name, asked, list) {
  const go = (event) => {
    event.preventDefault();
    const chosen = new URLSearchParams();
    for (const [field, value] of new FormData(event.target)) {
      if (String(value).trim()) chosen.set(field, String(value).trim());
    }
    location.hash = `#/${name}?${chosen}`;
  };
  const orders = ["", ...list.columns.flatMap((one) => [`-${one}`, one])];
  const fields = [...FIELDS[name], ["sort", "sort by", orders]];
  const active = [...asked].filter(([field]) => fields.some(([own]) => own === field));
  return h("div", { class: "filtering" }, fold("filters", active.length ?
    `Filters: ${active.map(([field, value]) => `${field} ${value}`).join(", ")}` : "Filters",
  h("form", { class: "filters", onsubmit: go, role: "search" },
    fields.map(([field, label, kind]) => {
      const options = field === "kind" ? ["", ...Object.keys(list.counts)
        .filter((one) => one !== "dispatch" && one !== "schedule")] : kind;
      const now = asked.get(field) || "";
      const input = Array.isArray(options) ?
        h("select", { name: field, id: `f-${field}` }, options.map((one) => h("option",
          { value: one, selected: one === now }, one.replaceAll("_", " ") || "any"))) :
        h("input", { name: field, id: `f-${field}`, value: now,
          type: kind === "number" ? "number" : "text", step: "any", maxlength: 200 });
      return h("div", null, h("label", { for: `f-${field}` }, label), input);
    }),
    h("div", { class: "buttons" }, h("button", { type: "submit" }, "Filter")))),
  active.length ? h("a", { href: `#/${name}` }, "Clear") : null);
}

function turns(name, asked, list) {
  const limit = Number(asked.get("limit") || 50);
  const at = (offset) => {
    const next = new URLSearchParams(asked);
    next.set("offset", Math.max(0, offset));
    return `#/${name}?${next}`;
  };
  const before = list.offset > 0, after = list.offset + list.rows.length < list.total;
  if (!before && !after) return null;
  return h("nav", { class: "turns", "aria-label": "pages of the list" },
    before ? h("a", { href: at(list.offset - limit) }, "Previous") : null,
    after ? h("a", { href: at(list.offset + limit) }, "Next") : null);
}

function counts(all) {
  return fold("counts", "Counts by kind",
    table({ columns: ["kind", "count"], rows: Object.entries(all) }, { caption: "By kind" }));
}
