// Elements, numbers and links. Text is only ever set as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(4)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}

export function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function s(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

// A number as people read it: short, with thousands apart; a dash for what is not there.
export function show(value) {
  if (value === null || value === undefined || value === "") return "–";
  if (value === true) return "yes";
  if (value === false) return "no";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  if (size !== 0 && size < 0.001) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

export function span(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 120) return `${show(Number(seconds.toPrecision(3)))} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 120) return `${minutes} min ${Math.round(seconds % 60)} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function bucket(row) {
  return row.low === row.high ? String(row.low) : `${row.low}–${row.high}`;
}

const IDS = [
  [/^[ge]\d{10}-\d{3}$/, "trajectory"],
  [/^[ge]\d{10}$/, "group"],
  [/^(?:step[- ]?)?(\d+)$/, "step"],
  [/^v(?:ersion)?[- ]?(\d+)$/, "version"],
];

// The address of the page of an id; null where it is none.
export function addressOf(id) {
  for (const [pattern, page] of IDS) {
    const found = pattern.exec(id);
    if (found) return `#/${page}/${found[1] || id}`;
  }
  return null;
}

export const LINKED = {
  step: "step", group: "group", trajectory: "trajectory", version: "version", subject: "",
};

function cell(column, value, has) {
  if (value === null || value === undefined || !(column in LINKED)) return show(value);
  const page = LINKED[column];
  const address = page ? `#/${page}/${value}` : addressOf(String(value));
  if (!address || (page === "" && /^\d+$/.test(String(value))) || !has(address)) {
    return typeof value === "number" && page ? String(value) : show(value);
  }
  return h("a", { href: address }, String(value));
}

const regionNames = new Set();

// Before a page is drawn: no name is taken yet.
export function newPage() {
  regionNames.clear();
}

// A part that scrolls by itself, under a name that no other part of the page has: readers who go
// from part to part hear nothing else of it.
export function region(name, attributes, ...children) {
  let own = name;
  for (let at = 2; regionNames.has(own); at += 1) own = `${name} (${at})`;
  regionNames.add(own);
  return h("div", { ...attributes, tabindex: 0, role: "region", "aria-label": own }, ...children);
}

// A table that scrolls by itself; `has` says which pages there are, `name` what the caption leaves out.
export function table(listed, { caption = "", name = caption || "table",
  has = () => true, headers = null } = {}) {
  const numeric = listed.columns.map((_, at) =>
    listed.rows.every((row) => row[at] === null || typeof row[at] === "number"));
  const wide = listed.columns.map((_, at) =>
    listed.rows.some((row) => typeof row[at] === "string" && row[at].length > 26));
  const kind = (at) => (numeric[at] ? "n" : wide[at] ? "w" : null);
  const head = listed.columns.map((column, at) =>
    h("th", { scope: "col", class: numeric[at] ? "n" : null },
      headers ? headers(column) : column.replaceAll("_", " ")));
  const body = listed.rows.map((row) => h("tr", null, row.map((value, at) =>
    h("td", { class: kind(at) }, cell(listed.columns[at], value, has)))));
  return region(name, { class: "scroll" },
    h("table", null, caption ? h("caption", null, caption) : null,
      h("thead", null, h("tr", null, head)), h("tbody", null, body)));
}

export function facts(pairs, has = null) {
  return h("dl", { class: "facts" }, Object.entries(pairs).map(([name, value]) => {
    const address = has && addressOf(String(value));
    const linked = address && !/^\d+$/.test(String(value)) && has(address);
    return h("div", null, h("dt", null, name.replaceAll("_", " ")),
      h("dd", null, linked ? h("a", { href: address }, value) : show(value)));
  }));
}
