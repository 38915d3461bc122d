// Lists with their filters: steps, groups, trajectories, decisions.

import { embedded, get, has } from "./data.js";
import { h, show, table } from "./dom.js";

const FATE_CHOICES = ["", "open", "trained", "filtered", "failed", "cancelled", "evaluated"];
const FIELDS = {
  steps: [],
  groups: [
    ["q", "id contains"], ["fate", "fate", FATE_CHOICES], ["purpose", "purpose", ["", "train", "eval"]],
    ["version", "version", "number"], ["step", "step", "number"],
    ["staleness", "staleness", "number"],
  ],
  trajectories: [
    ["q", "id contains"], ["fate", "fate", FATE_CHOICES], ["purpose", "purpose", ["", "train", "eval"]],
    ["version", "version", "number"], ["step", "step", "number"],
    ["staleness", "staleness", "number"], ["worker", "worker"],
    ["finish", "finish", ["", "stop", "length", "environment", "error"]],
    ["valid", "reward is valid", ["", "yes", "no"]], ["reward_min", "reward from", "number"],
    ["reward_max", "reward to", "number"], ["tokens_min", "tokens from", "number"],
    ["tokens_max", "tokens to", "number"], ["attempts_min", "attempts from", "number"],
  ],
  decisions: [["kind", "kind", null], ["q", "subject or reason contains"]],
};
const TITLES = {
  steps: "Steps", groups: "Groups", trajectories: "Trajectories", decisions: "Decisions",
};

// A column of the trajectories that has no field above gets one.
function fieldsOf(name, found) {
  if (name !== "trajectories") return FIELDS[name];
  const known = new Set(FIELDS[name].map(([field]) => field.replace(/_(min|max)$/, "")));
  const rest = found.columns.slice(1).filter((one) => !known.has(one));
  return [...FIELDS[name], ...rest.flatMap((one) => {
    const words = one.replaceAll("_", " ");
    return found.numbers.includes(one) ? [[`${one}_min`, `${words} from`, "number"],
      [`${one}_max`, `${words} to`, "number"]] : [[one, words]];
  })];
}

// A heading sorts by its column: descending first, then ascending.
function heading(name, asked) {
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
  const found = await get(`${name}?${asked}`);
  const last = Math.min(found.offset + found.rows.length, found.total);
  const range = found.total ? `${show(found.offset + 1)} to ${show(last)} of ${show(found.total)}` :
    "none";
  return {
    title: TITLES[name],
    body: [
      h("h1", { tabindex: -1 }, TITLES[name]),
      embedded && found.of > found.total ? h("p", { class: "note" },
        `This file holds a sample of ${show(found.kept)} of ${show(found.of)}.`) : null,
      FIELDS[name].length ? filters(name, asked, found) : null,
      h("p", { role: "status", id: "range" }, `${TITLES[name]}: ${range}`),
      table(found, { caption: TITLES[name], has, headers: heading(name, asked) }),
      turns(name, asked, found),
      name === "decisions" ? counts(found.counts) : null,
    ],
  };
}

function filters(name, asked, found) {
  const go = (event) => {
    event.preventDefault();
    const chosen = new URLSearchParams();
    if (asked.get("sort")) chosen.set("sort", asked.get("sort"));
    for (const [field, value] of new FormData(event.target)) {
      if (String(value).trim()) chosen.set(field, String(value).trim());
    }
    location.hash = `#/${name}?${chosen}`;
  };
  return h("form", { class: "filters", onsubmit: go, role: "search" },
    fieldsOf(name, found).map(([field, label, kind]) => {
      const options = field === "kind" ? ["", ...Object.keys(found.counts)
        .filter((one) => one !== "dispatch" && one !== "place")] : kind;
      const now = asked.get(field) || "";
      const input = Array.isArray(options) ?
        h("select", { name: field, id: `f-${field}` }, options.map((one) => h("option",
          { value: one, selected: one === now }, one || "any"))) :
        h("input", { name: field, id: `f-${field}`, value: now,
          type: kind === "number" ? "number" : "text", step: "any", maxlength: 200 });
      return h("div", null, h("label", { for: `f-${field}` }, label), input);
    }),
    h("div", { class: "buttons" }, h("button", { type: "submit" }, "Filter"),
      h("a", { href: `#/${name}` }, "Clear")));
}

function turns(name, asked, found) {
  const limit = Number(asked.get("limit") || 50);
  const at = (offset) => {
    const next = new URLSearchParams(asked);
    next.set("offset", Math.max(0, offset));
    return `#/${name}?${next}`;
  };
  const before = found.offset > 0, after = found.offset + found.rows.length < found.total;
  if (!before && !after) return null;
  return h("nav", { class: "turns", "aria-label": "pages of the list" },
    before ? h("a", { href: at(found.offset - limit) }, "Newer") : h("span", null, "Newer"),
    after ? h("a", { href: at(found.offset + limit) }, "Older") : h("span", null, "Older"));
}

function counts(all) {
  return h("details", { "data-key": "counts" }, h("summary", null, "How many of each kind"),
    table({ columns: ["kind", "count"], rows: Object.entries(all) }, { caption: "By kind" }));
}
