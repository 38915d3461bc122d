// Elements, numbers and links. Text is set as text only, never as markup.

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

// A short number with thousands separators; a dash for a missing value.
export function show(value) {
  if (value === null || value === undefined || value === "") return "–";
  if (value === true) return "yes";
  if (value === false) return "no";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  if (size !== 0 && size < 0.001) return Number(value.toPrecision(3)).toExponential();
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

// The address of an id's page, or null.
export function addressOf(id) {
  for (const [pattern, page] of IDS) {
    const match = pattern.exec(id);
    if (match) return `#/${page}/${match[1] || id}`;
  }
  return null;
}

export const LINKED = {
  step: "step", group: "group", trajectory: "trajectory", version: "version", subject: "",
};

// A value as text; of a digest the first characters.
function brief(value) {
  const digest = /[0-9a-f]{52}(?![0-9a-f])/;
  return digest.test(value) ? h("code", { title: value }, value.replace(digest, "…")) : show(value);
}

function cell(column, value) {
  if (value instanceof Node) return value;
  if (value === null || value === undefined || !(column in LINKED)) return brief(value);
  const page = LINKED[column];
  const address = page ? `#/${page}/${value}` : addressOf(String(value));
  if (!address || (page === "" && /^\d+$/.test(String(value)))) {
    return typeof value === "number" && page ? String(value) : show(value);
  }
  return h("a", { href: address }, String(value));
}

const regionNames = new Set();

// Called before a page is drawn: region names are unique per page.
export function newPage() {
  regionNames.clear();
}

// A part that scrolls by itself, with a unique name for screen readers.
export function region(name, attributes, ...children) {
  let own = name;
  for (let at = 2; regionNames.has(own); at += 1) own = `${name} (${at})`;
  regionNames.add(own);
  return h("div", { ...attributes, tabindex: 0, role: "region", "aria-label": own }, ...children);
}

const SAME_MIN = 3;

// Columns with one value in all rows, except the first: shown once above the table.
function constant({ columns, rows }) {
  if (rows.length < SAME_MIN) return new Set();
  return new Set(columns.map((_, at) => at).filter((at) => at &&
    rows.every((row) => !(row[at] instanceof Node) && row[at] === rows[0][at])));
}

// A table; rows become cards on narrow screens.
export function table(listed, { caption = "", name = caption || "table",
  headers = null, none = "None." } = {}) {
  const { columns, rows } = listed;
  if (!rows.length) return h("p", { class: "note" }, none);
  const same = constant(listed), own = columns.map((_, at) => at).filter((at) => !same.has(at));
  const label = (at) => columns[at].replaceAll("_", " ");
  const numeric = columns.map((_, at) =>
    rows.every((row) => row[at] === null || typeof row[at] === "number"));
  const wide = columns.map((_, at) =>
    rows.some((row) => typeof row[at] === "string" && row[at].length > 20));
  const said = [...same].filter((at) => ![null, undefined, ""].includes(rows[0][at]));
  const head = own.map((at) => h("th", { scope: "col", class: numeric[at] ? "n" : null },
    headers ? headers(columns[at]) : label(at)));
  const body = rows.map((row) => h("tr", null, own.map((at) =>
    h("td", { class: numeric[at] ? "n" : wide[at] ? "w" : null, "data-label": label(at) },
      h("span", null, cell(columns[at], row[at]))))));
  return h("div", null, said.length ? h("p", { class: "note same" }, `All ${rows.length} rows: `,
    said.map((at, place) => [place ? " · " : "", `${label(at)} `,
      h("b", null, cell(columns[at], rows[0][at]))])) : null,
  region(name, { class: "scroll" }, h("table", null,
    caption ? h("caption", { class: "unseen" }, caption) : null,
    h("thead", null, h("tr", null, head)), h("tbody", null, body))));
}

export function facts(pairs, linked = false) {
  const known = Object.entries(pairs).filter(([, value]) => ![null, undefined, ""].includes(value));
  return h("dl", { class: "facts" }, known.map(([name, value]) => {
    const address = linked && !/^\d+$/.test(String(value)) && addressOf(String(value));
    return h("div", null, h("dt", null, name.replaceAll("_", " ")),
      h("dd", null, address ? h("a", { href: address }, value) : brief(value)));
  }));
}

// Key numbers: [label, value, note, level].
export function tiles(items) {
  return h("dl", { class: "tiles" }, items.filter(Boolean).map(([label, value, note, level]) =>
    h("div", { class: level || null }, h("dt", null, label),
      h("dd", null, value, note ? h("small", null, note) : null))));
}

export function fold(key, summary, ...children) {
  return h("details", { "data-key": key }, h("summary", null, summary), ...children);
}

// Rows of a description, as a table.
export function rowsTable(rows, options) {
  const columns = [...new Set(rows.flatMap(Object.keys))];
  return table({ columns, rows: rows.map((row) => columns.map((name) => row[name] ?? null)) }, options);
}

// The named sections of a description: pairs, or rows.
export function folds(sections, names) {
  return names.filter((name) => name in sections).map((name) => {
    const own = sections[name], head = name[0].toUpperCase() + name.slice(1);
    return Array.isArray(own) ? fold(name, `${head} (${own.length})`, rowsTable(own, { caption: head })) :
      fold(name, head, facts(own, true));
  });
}
