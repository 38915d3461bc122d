// The text of a trajectory as chat, with tokens colored by what the log contains of each.

import { branches } from "./contexts.js";
import { get } from "./data.js";
import { fold, h, region, show } from "./dom.js";

const SHADES = 6;

const MODES = {
  none: { name: "nothing", note: "Choose a token to see its metrics.", value: () => null },
  logprob: {
    name: "log-prob", note: "Darker: less likely under the policy that sampled it.",
    value: (tokens, at) => tokens.logprob[at], shade: (value) => level(-value, [0.01, 0.1, 0.5, 1, 2.5]),
  },
  ratio: {
    name: "ratio", note: "Policy over sampling distribution (temperature, top-p). Darker: further " +
      "from 1; underlined: below 1.",
    value: (tokens, at) => (tokens.logprob[at] === null ? null :
      Math.exp(tokens.logprob[at] - tokens.sampler[at])),
    shade: (value) => level(Math.abs(Math.log(value)), [0.001, 0.01, 0.05, 0.2, 0.7]),
    below: (value) => value < 0.999,
  },
  mask: {
    name: "mask", note: "Dark: the policy sampled the token, and it is trained.",
    value: (tokens, at) => tokens.mask[at], shade: (value) => (value ? 4 : 0),
  },
  advantage: {
    name: "advantage", note: "Of the whole trajectory, on the tokens it trains. Darker: larger; " +
      "underlined: negative.",
    value: (tokens, at, row) => (tokens.mask[at] ? row.advantage : null),
    shade: (value) => level(Math.abs(value), [0.05, 0.25, 0.75, 1.5, 2.5]),
    below: (value) => value < 0,
  },
};

function level(value, edges) {
  const index = edges.findIndex((edge) => value < edge);
  return index < 0 ? SHADES - 1 : index;
}

function textOf(tokens, at) {
  if (tokens.text) return tokens.text[at];
  return tokens.ids ? `${tokens.ids[at]} ` : "▒ ";
}

function spansOf(answer, mode) {
  const { value, shade, below } = MODES[mode];
  const tokens = answer.record.tokens;
  return tokens.mask.map((_, at) => {
    const own = value(tokens, at, answer.sections.contribution);
    const none = own === null || own === undefined;
    const classes = ["t", none ? "" : `s${shade(own)}`, !none && below && below(own) ? "u" : ""];
    return h("span", { class: classes.filter(Boolean).join(" "), "data-at": at },
      textOf(tokens, at).replaceAll("\t", "⇥"));
  });
}

const OPEN = ["<|im_start|>", "<|start_header_id|>"];

// Messages of a segment by the markers of ChatML and Llama 3: [role, from, to]; else one message.
export function messagesIn(kind, from, to, text) {
  const messages = [[kind, from, from]];
  for (let at = from; at < to; at += 1) {
    if (OPEN.includes(text(at).trim())) {
      let role = "", next = at + 1;
      while (next < to && next < at + 6 && !/\n|<\|end_header_id\|>/.test(text(next))) {
        role += text(next);
        next += 1;
      }
      messages.push([role.trim() || kind, at, at]);
      at = next;
    }
    messages[messages.length - 1][2] = at + 1;
  }
  return messages.filter(([, start, end]) => end > start);
}

// Segments; neighbors of one turn and version are one.
function runs(rows) {
  const merged = [];
  for (const row of rows) {
    const last = merged[merged.length - 1];
    if (last && last[0] === row[0] && last[1] === row[1] && last[5] === row[5]) last[3] = row[3];
    else merged.push([...row]);
  }
  return merged;
}

const SIDES = { model: "model", assistant: "model" };

// Bubbles of a conversation: prompt and environment on one side, the model on the other.
function bubbles(record, spans) {
  const { tokens, segments } = record;
  const text = (at) => textOf(tokens, at - tokens.from);
  const end = tokens.from + tokens.mask.length;
  const turns = segments.rows.some(([kind, turn]) => kind === "model" && turn > 0);
  return runs(segments.rows).flatMap(([kind, turn, from, to, , version]) => {
    const low = Math.max(from, tokens.from), high = Math.min(to, end);
    if (high <= low) return [];
    const split = tokens.text && kind !== "model" ? messagesIn(kind, low, high, text) : [[kind, low, high]];
    return split.map(([role, start, stop]) => h("div", { class: `said ${SIDES[kind] || SIDES[role] || "other"}` },
      h("span", { class: "role" }, role, kind === "model" ? `${turns ? `, turn ${turn}` : ""}, version ${version}` : ""),
      h("div", { class: "words" }, spans.slice(start - tokens.from, stop - tokens.from))));
  });
}

// A conversation with its choice of color; `small` is one of two side by side.
export function conversation(answer, small = false) {
  const { record } = answer, { tokens, tree, segments } = record;
  const own = answer.row.trajectory;
  const place = region(`text of ${answer.row.trajectory}`, { class: "tokens" });
  const note = h("p", { class: "note shading" });
  const chosen = h("p", { role: "status", class: "chosen" });
  const shades = h("span", { class: "shades", "aria-hidden": "true" },
    Array.from({ length: SHADES }, (_, one) => h("span", { class: `t s${one}` }, "  ")));
  const draw = (mode) => {
    const spans = spansOf(answer, mode);
    note.textContent = MODES[mode].note;
    shades.hidden = mode === "none";
    place.replaceChildren(...(tree ? [branches(tree, answer.sections.calls || [], segments, tokens, spans, textOf)] :
      bubbles(record, spans)));
  };
  const tell = (event) => {
    const at = event.target.dataset.at;
    if (at !== undefined) chosen.textContent = metricsOf(tokens, Number(at), answer.sections.contribution);
  };
  place.addEventListener("click", tell);
  place.addEventListener("mouseover", tell);
  place.addEventListener("keydown", (event) => walk(event, place, tokens, chosen, answer));
  draw("none");
  const choice = h("select", { id: `color-${own}`, class: "shade",
    onchange: (event) => draw(event.target.value) },
  Object.entries(MODES).filter(([mode]) => mode !== "advantage" || "advantage" in answer.sections.contribution)
    .map(([mode, { name }]) => h("option", { value: mode }, name)));
  return h("div", null, h("p", { class: "inline" },
    h("label", { for: `color-${own}` }, "Color tokens by "), choice, shades),
  answer.redacted ? h("p", { class: "note" }, "Texts are hidden (--redact).") : null,
  place, chosen, note, small ? null : parts(answer.row.trajectory, tokens),
  small ? null : listed(tokens, answer.sections.contribution));
}

function metricsOf(tokens, at, row) {
  const part = [`token ${tokens.from + at}`];
  if (tokens.text) part.push(JSON.stringify(tokens.text[at]));
  if (tokens.ids) part.push(`id ${tokens.ids[at]}`);
  part.push(tokens.mask[at] ? "sampled" : "not sampled");
  for (const [mode, { name, value }] of Object.entries(MODES)) {
    const own = mode === "mask" ? null : value(tokens, at, row);
    if (own !== null && own !== undefined) part.push(`${name} ${show(own)}`);
  }
  return part.join(", ");
}

// Arrow keys move from token to token.
function walk(event, place, tokens, chosen, answer) {
  const way = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!way) return;
  event.preventDefault();
  const last = place.querySelector(".on");
  const at = last ? Number(last.dataset.at) + way : 0;
  const next = place.querySelector(`[data-at="${at}"]`);
  if (!next) return;
  if (last) last.classList.remove("on");
  next.classList.add("on");
  next.scrollIntoView({ block: "nearest" });
  chosen.textContent = metricsOf(tokens, at, answer.sections.contribution);
}

function parts(trajectory, tokens) {
  const size = tokens.mask.length, end = tokens.from + size;
  if (!tokens.from && end >= tokens.total) return null;
  const at = (from, text) => h("a", { href: `#/trajectory/${trajectory}?from=${from}` }, text);
  return h("nav", { class: "turns", "aria-label": "parts of the sequence" },
    tokens.from ? at(Math.max(0, tokens.from - size), "Earlier tokens") : null,
    h("span", null, `tokens ${tokens.from} to ${end} of ${tokens.total}`),
    end < tokens.total ? at(end, "Later tokens") : null);
}

function listed(tokens, row) {
  const data = fold("tokens", "Table of tokens");
  data.addEventListener("toggle", () => {
    if (!data.open || data.children.length > 1) return;
    const rows = tokens.mask.map((mask, at) => h("tr", null, [
      tokens.from + at, tokens.text ? JSON.stringify(tokens.text[at]) : "",
      tokens.ids ? tokens.ids[at] : "", mask, tokens.logprob[at], tokens.sampler[at],
      MODES.ratio.value(tokens, at, row)].map((one) => h("td", null, show(one)))));
    data.append(region("tokens and their metrics", { class: "scroll plain" },
      h("table", null, h("thead", null, h("tr", null, ["token", "text", "id", "mask", "log-prob",
        "sampling log-prob", "ratio"].map((one) => h("th", { scope: "col" }, one)))),
      h("tbody", null, rows))));
  });
  return data;
}

// Two trajectories side by side; `show` adds one and replaces the older.
export function reader() {
  const place = h("div", { class: "panes" });
  const names = [];
  const draw = async () => {
    const panes = await Promise.all(names.map(pane));
    place.replaceChildren(...panes);
  };
  return { place, names, toggle(name) {
    const at = names.indexOf(name);
    if (at >= 0) names.splice(at, 1);
    else names.push(name);
    if (names.length > 2) names.shift();
    return draw();
  } };
}

async function pane(name) {
  const head = h("h2", null, h("a", { href: `#/trajectory/${name}` }, name));
  try {
    const answer = await get(`trajectory/${name}`), { row, record } = answer;
    return h("article", { class: "pane" }, head, h("p", { class: "note" },
      `reward ${show(row.reward)} · ${show(row.tokens)} tokens · ${row.outcome}`,
      row.finish ? ` · ${row.finish}` : ""),
    record.missing ? h("p", { class: "note" }, record.missing) : conversation(answer, true));
  } catch (error) {
    return h("article", { class: "pane" }, head, h("p", { class: "note" }, error.message));
  }
}
