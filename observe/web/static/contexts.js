// Context tree of a trajectory and the calls of its agent over time.

import { COLOURS, figure, scale, ticks } from "./charts.js";
import { h, rowsTable, s, show } from "./dom.js";

const NAMES = 92, EDGE = 14, CALLS_HIGH = 26, AXIS_HIGH = 36;
const DRAWN_MAX = 100;

// Contexts in tree order with their depth: [number, depth].
export function inOrder(contexts) {
  const children = new Map();
  contexts.forEach(([parent], number) => {
    children.set(parent, [...(children.get(parent) || []), number]);
  });
  const order = [];
  const left = [...(children.get(null) || [])].reverse().map((number) => [number, 0]);
  while (left.length) {
    const [number, depth] = left.pop();
    order.push([number, depth]);
    const own = children.get(number) || [];
    left.push(...[...own].reverse().map((one) => [one, depth + 1]));
  }
  return order;
}

function callersIn(rows) {
  return [...new Set(rows.map((row) => row.caller))];
}

function callerName(caller) {
  return caller || "unnamed";
}

// A row per context, a bar per call.
export function callsOf(tree, rows) {
  const who = callersIn(rows), all = inOrder(tree.contexts).map(([number]) => number);
  const order = all.slice(0, DRAWN_MAX);
  const end = Math.max(...rows.map((row) => row["asked ms"] + row["took ms"]));
  const idle = rows.reduce((sum, row) => sum + row["idle before ms"], 0);
  const note = `${show(rows.length)} calls in ${show(tree.contexts.length)} contexts. For ` +
    `${show(Number((idle / 1000).toPrecision(3)))} s before them the agent had no open call.${all.length > DRAWN_MAX ?
      ` The first ${DRAWN_MAX} contexts are drawn.` : ""}`;
  const draw = (width) => {
    const height = order.length * CALLS_HIGH + AXIS_HIGH;
    const svg = s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img",
      "aria-label": `Calls over time. ${who.map((one) => `${callerName(one)}: ${
        rows.filter((row) => row.caller === one).length}`).join(", ")}` });
    const x = scale(0, end / 1000, NAMES, width - EDGE);
    order.forEach((number, place) => svg.append(
      s("line", { x1: NAMES, x2: width - EDGE, y1: (place + 1) * CALLS_HIGH, y2: (place + 1) * CALLS_HIGH,
        class: "grid" }),
      s("text", { x: NAMES - 8, y: place * CALLS_HIGH + CALLS_HIGH / 2 + 4, "text-anchor": "end" },
        `context ${number}`)));
    for (const at of ticks(0, end / 1000, Math.max(2, Math.floor(width / 90)))) {
      svg.append(s("text", { x: x(at), y: height - AXIS_HIGH + 16, "text-anchor": "middle" },
        show(at)));
    }
    svg.append(s("text", { x: (NAMES + width - EDGE) / 2, y: height - 4, "text-anchor": "middle",
      class: "label" }, "seconds after the scheduling decision"));
    for (const row of rows.filter((one) => order.includes(one.context))) svg.append(...callBar(row, order, who, x));
    return svg;
  };
  const keys = h("ul", { class: "keys" }, who.map((one, at) => h("li", null,
    s("svg", { width: 18, height: 12, "aria-hidden": "true" }, callBox(0, 1, 18, 10, at)), " ",
    callerName(one))));
  return h("div", null, figure("Calls over time", note, draw, null, { under: keys }),
    rowsTable(rows, { caption: "Calls" }));
}

function callBox(x, y, width, height, at) {
  return s("rect", { x, y, width, height, fill: COLOURS[at % COLOURS.length], "fill-opacity": 0.3,
    stroke: COLOURS[at % COLOURS.length] });
}

function callBar(row, order, who, x) {
  const { call: number, context, caller, "asked ms": asked, "took ms": took } = row;
  const from = x(asked / 1000), wide = Math.max(2, x((asked + took) / 1000) - from);
  const y = order.indexOf(context) * CALLS_HIGH + 4;
  const words = [`${number}`, `${number}: ${callerName(caller)}`].filter((one) => one.length * 7 < wide);
  return [callBox(from, y, wide, CALLS_HIGH - 8, who.indexOf(caller)),
    words.length ? s("text", { x: from + 4, y: y + CALLS_HIGH - 13 }, words.pop()) : null].filter(Boolean);
}

// The tree: each context with its own turns; the shared prefix is folded.
export function branches(tree, rows, segments, tokens, spans, textOf) {
  const calls = new Map(tree.starts.map((start, at) => [start, rows[at]]));
  const drawn = new Map();
  const whole = h("ul", { class: "contexts" });
  for (const [number, depth] of inOrder(tree.contexts)) {
    const [parent, shared, start, end] = tree.contexts[number];
    const own = segments.rows.filter(([, , from, to]) => from >= start && to <= end &&
      (to > from || from < end));
    const inner = h("ul", { class: "contexts" });
    drawn.set(number, inner);
    const item = h("li", { class: "context", id: `context-${number}`, tabindex: -1 },
      h("h3", null, `Context ${number}`, h("span", { class: "what" },
        ` ${show(shared + end - start)} tokens${parent === null ? "" : `, ${show(end - start)} of its own`}`)),
      parent === null ? null : sharedPart(tree, number, tokens, textOf),
      own.map((one) => turnOf(one, calls.get(one[2]), tokens, spans)), inner);
    (depth ? drawn.get(parent) : whole).append(item);
  }
  for (const inner of drawn.values()) if (!inner.children.length) inner.remove();
  return whole;
}

function sharedPart(tree, number, tokens, textOf) {
  const [parent, shared] = tree.contexts[number];
  const go = h("button", { type: "button", onclick: () => {
    const there = document.getElementById(`context-${parent}`);
    there.scrollIntoView({ block: "nearest" });
    there.focus();
  } }, `To context ${parent}`);
  const text = tree.shared[number].flatMap(([from, to]) => Array.from({ length: to - from },
    (_, at) => from + at - tokens.from)).map((at) => (at >= 0 && at < tokens.mask.length ?
    textOf(tokens, at) : "…")).join("").replace(/…{2,}/g, "…");
  return h("details", { class: "shared" },
    h("summary", null, `shares the first ${show(shared)} tokens of context ${parent}`),
    go, h("p", { class: "prefix" }, text));
}

function turnOf([kind, number, from, to, , , ms], call, tokens, spans) {
  if (from === to) return null;
  const words = [kind, kind === "prompt" ? null : `turn ${number}`,
    kind === "model" && call ? `call ${call.call} by ${callerName(call.caller)}` : null,
    kind === "model" && ms ? `${show(ms)} ms` : null].filter(Boolean);
  const own = spans.slice(Math.max(0, from - tokens.from), Math.max(0, to - tokens.from));
  const rest = to - from - own.length;
  return h("div", { class: "turn" }, h("span", { class: "what" }, words.join(", ")), " ", own,
    rest > 0 ? h("span", { class: "none" }, ` ${show(rest)} tokens on other pages`) : null);
}
