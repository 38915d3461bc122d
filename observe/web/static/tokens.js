// The tokens of a trajectory, shaded by what the log has of each: log-prob, ratio, mask, advantage.
// Shades go from light to dark, so that they read without colour; what is below is underlined.

import { branches } from "./contexts.js";
import { h, region, show } from "./dom.js";

const SHADES = 6;

const MODES = {
  logprob: {
    name: "log-prob", note: "Darker: less likely under the policy that sampled it.",
    value: (tokens, at) => tokens.logprob[at], shade: (value) => level(-value, [0.01, 0.1, 0.5, 1, 2.5]),
  },
  ratio: {
    name: "ratio", note: "Policy over what was drawn from (temperature, top-p, ...), as the log " +
      "has both. Darker: further from 1; underlined: below 1. The ratio of the step that trained " +
      "it stands under “What it did to the weights”.",
    value: (tokens, at) => (tokens.logprob[at] === null ? null :
      Math.exp(tokens.logprob[at] - tokens.sampler[at])),
    shade: (value) => level(Math.abs(Math.log(value)), [0.001, 0.01, 0.05, 0.2, 0.7]),
    below: (value) => value < 0.999,
  },
  mask: {
    name: "mask", note: "Dark: the policy sampled it, and it is trained.",
    value: (tokens, at) => tokens.mask[at], shade: (value) => (value ? 4 : 0),
  },
  advantage: {
    name: "advantage", note: "Of the whole trajectory, on the tokens it trains. Darker: larger; " +
      "underlined: negative.",
    value: (tokens, at, row) => (row && row.advantage !== null && tokens.mask[at] ?
      row.advantage : null),
    shade: (value) => level(Math.abs(value), [0.05, 0.25, 0.75, 1.5, 2.5]),
    below: (value) => value < 0,
  },
};

function level(value, edges) {
  const found = edges.findIndex((edge) => value < edge);
  return found < 0 ? SHADES - 1 : found;
}

function textOf(tokens, at) {
  if (tokens.text) return tokens.text[at];
  return tokens.ids ? `${tokens.ids[at]} ` : "▒ ";
}

function visible(text) {
  return text.replaceAll("\n", "↵\n").replaceAll("\t", "⇥");
}

export function tokensOf(trajectory, found) {
  const tokens = found.record.tokens;
  const place = region("tokens", { class: "tokens" });
  const note = h("p", { class: "note", id: "shading" });
  const chosen = h("p", { role: "status", id: "chosen", class: "chosen" },
    "Choose a token to see its figures.");
  const draw = (mode) => {
    const { value, shade, below, note: said } = MODES[mode];
    note.textContent = said;
    const spans = tokens.mask.map((_, at) => {
      const own = value(tokens, at, found.contribution);
      const none = own === null || own === undefined;
      const classes = ["t", none ? "none" : `s${shade(own)}`, !none && below && below(own) ? "u" : ""];
      return h("span", { class: classes.join(" ").trim(), "data-at": at }, visible(textOf(tokens, at)));
    });
    const { tree, segments } = found.record;
    place.replaceChildren(...(tree ? [branches(tree, segments, tokens, spans, textOf)] : spans));
  };
  const tell = (event) => {
    const at = event.target.dataset.at;
    if (at !== undefined) chosen.textContent = figuresOf(tokens, Number(at), found.contribution);
  };
  place.addEventListener("click", tell);
  place.addEventListener("mouseover", tell);
  place.addEventListener("keydown", (event) => walk(event, place, tokens, chosen, found));
  draw("logprob");
  const radios = Object.entries(MODES).map(([mode, { name }]) => h("label", null,
    h("input", { type: "radio", name: "shade", value: mode, checked: mode === "logprob",
      onchange: () => draw(mode) }), ` ${name}`));
  const shades = h("span", { class: "shades", "aria-hidden": "true" }, "light ",
    Array.from({ length: SHADES }, (_, one) => h("span", { class: `t s${one}` }, "  ")), " dark");
  return h("div", null,
    h("fieldset", { class: "modes" }, h("legend", null, "Shade tokens by"), radios, shades),
    note, found.redacted ? h("p", { class: "note" }, "Texts are hidden (--redact).") : null,
    place, chosen, parts(trajectory, tokens), listed(tokens, found.contribution));
}

function figuresOf(tokens, at, row) {
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

// Arrow keys go from token to token.
function walk(event, place, tokens, chosen, found) {
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
  chosen.textContent = figuresOf(tokens, at, found.contribution);
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
  const data = h("details", { "data-key": "tokens" }, h("summary", null, "Table: tokens"));
  data.addEventListener("toggle", () => {
    if (!data.open || data.children.length > 1) return;
    const rows = tokens.mask.map((mask, at) => h("tr", null, [
      tokens.from + at, tokens.text ? JSON.stringify(tokens.text[at]) : "",
      tokens.ids ? tokens.ids[at] : "", mask, tokens.logprob[at], tokens.sampler[at],
      MODES.ratio.value(tokens, at, row)].map((one) => h("td", null, show(one)))));
    data.append(region("tokens and their figures", { class: "scroll" },
      h("table", null, h("thead", null, h("tr", null, ["token", "text", "id", "mask", "log-prob",
        "sampler's log-prob", "ratio"].map((one) => h("th", { scope: "col" }, one)))),
      h("tbody", null, rows))));
  });
  return data;
}
