// Charts as SVG. Colours come from the style sheet; every chart has a table.

import { h, s, show, table } from "./dom.js";

export const COLOURS = Array.from({ length: 7 }, (_, at) => `var(--s${at})`);
const RIGHT = 10, TOP = 12;
let serial = 0;

// Round numbers between two bounds, at most `most`.
export function ticks(low, high, most, whole = false) {
  if (!(high > low)) return [low];
  const raw = (high - low) / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(raw));
  let step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= raw);
  if (whole) step = Math.max(1, Math.round(step));
  const values = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) {
    values.push(Number(at.toPrecision(12)));
  }
  return values;
}

export function scale(low, high, from, to) {
  const width = high - low || 1;
  return (value) => from + ((value - low) / width) * (to - from);
}

const known = (value) => value !== null && value !== undefined;

function extent(values, floor = null, ceiling = null) {
  const there = values.filter(known);
  let low = there.length ? Math.min(...there) : 0;
  let high = there.length ? Math.max(...there) : 1;
  if (floor !== null) low = Math.min(low, floor);
  if (ceiling !== null) high = Math.max(high, ceiling);
  if (high > low) return [low, high];
  return low ? [Math.min(0, 2 * low), Math.max(0, 2 * low)] : [0, 1];
}

function rounded([low, high], most) {
  const [first, second] = ticks(low, high, most);
  const step = second - first;
  if (!(step > 0)) return [low, high];
  return [Math.floor(low / step + 1e-9) * step, Math.ceil(high / step - 1e-9) * step];
}

// A figure that is drawn to its width, and again when that changes. `under` follows the drawing.
export function figure(title, note, draw, tableOf, { under = null, small = false, value = null } = {}) {
  const place = h("div", { class: "drawing" });
  const data = tableOf ? h("details", { "data-key": `table ${title}` },
    h("summary", { "aria-label": `Table: ${title}` }, "Table")) : null;
  if (data) {
    data.addEventListener("toggle", () => {
      if (data.open && data.children.length === 1) {
        data.append(...[small && note ? h("p", { class: "note" }, note) : null, tableOf()].filter(Boolean));
      }
    });
  }
  const whole = h("figure", { class: small ? "small" : null }, h("figcaption", null,
    h("h2", { title: small ? note : null }, title), value,
    note && !small ? h("p", { class: "note" }, note) : null), place, under, data);
  let drawn = 0;
  const again = () => {
    const width = Math.floor(place.clientWidth);
    if (width < 60 || width === drawn) return;
    drawn = width;
    place.replaceChildren(draw(width));
  };
  new ResizeObserver(again).observe(place);
  requestAnimationFrame(again);
  return whole;
}

function frame(width, height, label) {
  return s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": label });
}

function axes(svg, { x, y, xTicks, yTicks, left, bottom, width, height, xLabel, yLabel, format }) {
  for (const at of yTicks) {
    svg.append(s("line", { x1: left, x2: width - RIGHT, y1: y(at), y2: y(at), class: "grid" }),
      s("text", { x: left - 6, y: y(at) + 4, "text-anchor": "end" }, format(at)));
  }
  for (const at of xTicks) {
    svg.append(s("text", { x: x(at), y: height - bottom + 14, "text-anchor": "middle" }, show(at)));
  }
  svg.append(s("line", { x1: left, x2: width - RIGHT, y1: height - bottom, y2: height - bottom,
    class: "axis" }));
  if (bottom > 30) svg.append(s("text", { x: (left + width - RIGHT) / 2, y: height - 3,
    "text-anchor": "middle", class: "label" }, [yLabel && `${yLabel}, `, `by ${xLabel}`]));
}

function path(points) {
  let d = "", pen = false;
  for (const [x, y] of points) {
    if (y === null) { pen = false; continue; }
    d += `${pen ? "L" : "M"}${x.toFixed(1)},${y.toFixed(1)}`;
    pen = true;
  }
  return d;
}

function bandPath(xs, low, high, x, y) {
  const pieces = [[]];
  xs.forEach((at, place) => {
    if (!known(low[place]) || !known(high[place])) pieces.push([]);
    else pieces[pieces.length - 1].push([at, low[place], high[place]]);
  });
  return pieces.filter((one) => one.length > 1).map((there) => {
    const up = there.map(([at, , top]) => `${x(at).toFixed(1)},${y(top).toFixed(1)}`);
    const down = there.reverse().map(([at, bottom]) => `${x(at).toFixed(1)},${y(bottom).toFixed(1)}`);
    return `M${[...up, ...down].join("L")}Z`;
  }).join("");
}

// Vertical lines of changed settings, stops and lost roles, by place.
function marksBy(marks, span, of) {
  const places = new Map();
  for (const one of marks) {
    const at = one[of];
    if (!known(at) || at < span[0] || at > span[1]) continue;
    places.set(at, [...(places.get(at) || []), one]);
  }
  return places;
}

function marked(svg, places, x, bottom) {
  for (const [at, own] of places) {
    const kind = own.some((one) => one.kind !== "setting") ? "mark lost" : "mark";
    svg.append(s("g", { class: kind }, s("title", null, own.map((one) => one.text).join("\n")),
      s("line", { x1: x(at), x2: x(at), y1: TOP - 10, y2: bottom }),
      s("path", { d: `M${x(at)},${TOP - 10} h8 l-8,7 z` })));
  }
}

function nearest(values, x) {
  let best = -1;
  values.forEach((one, at) => {
    if (best < 0 || Math.abs(one - x) < Math.abs(values[best] - x)) best = at;
  });
  return best;
}

// Lines over one x. A series: {name, y, x?, colour?, dash?, points?, thick?}; a band: {name, low,
// high}. The legend shows the values under the pointer; `link(x)` is the page that a click opens.
export function lines(spec) {
  const { title, note = "", xs, series, marks = [], band = null, xLabel, yLabel = "" } = spec;
  const { floor = 0, ceiling = null, small = false, link = null, format = show } = spec;
  const named = series.map((one, at) => ({ colour: COLOURS[at % COLOURS.length], ...one }));
  const every = [...named.flatMap((one) => one.y), ...(band ? [...band.low, ...band.high] : [])];
  if (!every.some(known)) return empty(title, spec.without || "No data yet.");
  const alone = named.length === 1 && !band;
  const values = named.map(() => h("b"));
  const at = h("span", { class: "value" });
  const keys = alone ? null : h("ul", { class: "keys" }, named.map((one, place) =>
    key(one.name, one.colour, one.dash, values[place])),
  band ? key(band.name, "var(--s0)", null, null, true) : null);
  const read = (x) => {
    named.forEach((one, place) => {
      const own = one.x || xs;
      const there = own.map((_, index) => index).filter((index) => known(one.y[index]));
      const index = x === null ? there[there.length - 1] : there[nearest(there.map((i) => own[i]), x)];
      values[place].textContent = index === undefined ? "–" : format(one.y[index]);
      if (alone) at.textContent = (x === null ? "" : `${xLabel} ${show(own[index])}: `) +
        values[place].textContent;
    });
    if (!alone) at.textContent = x === null ? "" : `${xLabel} ${show(x)}`;
  };
  read(null);
  const draw = (width) => {
    const height = small ? 104 : spec.height || 220, bottom = small ? 18 : 34, left = small ? 46 : 54;
    const svg = frame(width, height, `${title}. ${summary(named, xLabel)}`);
    const all = [...new Set([...xs, ...named.flatMap((one) => one.x || [])])].sort((a, b) => a - b);
    const span = extent(all, spec.time ? 0 : null), many = small ? 3 : 5;
    const [y0, y1] = rounded(extent(every, floor, ceiling), many);
    const x = scale(...span, left, width - RIGHT), y = scale(y0, y1, height - bottom, TOP);
    axes(svg, { x, y, width, height, left, bottom, xLabel, yLabel, format, yTicks: ticks(y0, y1, many),
      xTicks: ticks(...span, Math.max(2, Math.floor(width / 90)), !spec.time) });
    if (band && xs.length > 2) svg.append(s("path", { d: bandPath(xs, band.low, band.high, x, y),
      class: "band" }));
    for (const one of named) {
      const own = one.x || xs;
      const points = own.map((value, place) => [x(value), known(one.y[place]) ? y(one.y[place]) : null]);
      svg.append(s("path", { d: path(points), fill: "none", stroke: one.colour,
        "stroke-width": own.length > width / 4 ? 1 : one.thick ? 2.2 : 1.6, "stroke-dasharray": one.dash }));
      const dots = points.filter(([, py]) => py !== null);
      if (one.points || dots.length === 1) dots.forEach(([px, py]) =>
        svg.append(s("circle", { cx: px, cy: py, r: 3, fill: one.colour })));
    }
    const of = spec.time ? "at" : ["step", "version"].includes(xLabel) ? "step" : null;
    if (of) marked(svg, marksBy(marks, span, of), x, height - bottom);
    const hair = s("line", { y1: TOP, y2: height - bottom, class: "hair" });
    svg.append(hair);
    const under = (event) => {
      const box = svg.getBoundingClientRect();
      return all[nearest(all.map(x), (event.clientX - box.left) * width / (box.width || width))];
    };
    svg.addEventListener("pointermove", (event) => {
      const value = under(event);
      hair.setAttribute("x1", x(value));
      hair.setAttribute("x2", x(value));
      hair.classList.add("on");
      read(value);
    });
    svg.addEventListener("pointerleave", () => { hair.classList.remove("on"); read(null); });
    if (link) {
      svg.classList.add("link");
      svg.addEventListener("click", (event) => {
        const address = link(under(event));
        if (address) location.hash = address;
      });
    }
    return svg;
  };
  return figure(title, note, draw, () => linesTable(title, xLabel, xs, named, band),
    { small, value: at, under: keys });
}

function summary(named, xLabel) {
  return named.map((one) => {
    const there = one.y.filter(known);
    if (!there.length) return `${one.name}: none`;
    return `${one.name}: from ${show(there[0])} to ${show(there[there.length - 1])}, ` +
      `lowest ${show(Math.min(...there))}, highest ${show(Math.max(...there))}`;
  }).join("; ") + `; by ${xLabel}`;
}

function linesTable(title, xLabel, xs, named, band) {
  const shared = named.filter((one) => !one.x), apart = named.filter((one) => one.x);
  const columns = [xLabel, ...shared.map((one) => one.name),
    ...(band ? [`${band.name}: low`, `${band.name}: high`] : [])];
  const rows = xs.map((at, place) => [at, ...shared.map((one) => one.y[place]),
    ...(band ? [band.low[place], band.high[place]] : [])]);
  return h("div", { class: "tables" }, rows.length ? table({ columns, rows }, { caption: title }) : null,
    apart.map((one) => table({ columns: [xLabel, one.name],
      rows: one.x.map((at, place) => [at, one.y[place]]) },
    { caption: one.name, name: `${title}: ${one.name}` })));
}

export function key(name, colour, dash = null, value = null, area = false) {
  return h("li", null, s("svg", { width: 18, height: 10, "aria-hidden": "true" },
    area ? s("rect", { width: 18, height: 10, class: "band" }) :
      s("line", { x1: 0, x2: 18, y1: 5, y2: 5, stroke: colour, "stroke-width": 3,
        "stroke-dasharray": dash })), ` ${name} `, value);
}

export function empty(title, why) {
  return h("figure", null, h("figcaption", null, h("h2", null, title)), h("p", { class: "note" }, why));
}

// Stacked bars, one per row: rows [{name, values, after?}], parts name the values.
export function bars(spec) {
  const { title, note = "", rows, parts, unit, colours = COLOURS } = spec;
  if (!rows.length) return empty(title, spec.without || "No data yet.");
  const total = (row) => row.values.reduce((sum, one) => sum + (one || 0), 0);
  const most = Math.max(...rows.map(total), 1e-9);
  const said = rows.map((row) => `${row.name}: ` + parts.map((one, place) =>
    row.values[place] ? `${one} ${show(row.values[place])}` : "").filter(Boolean).join(", "));
  const draw = (width) => {
    const left = 76, right = 64, line = 24, height = rows.length * line + 34;
    const svg = frame(width, height, `${title}. ${said.join("; ")}`);
    const x = scale(0, most, left, width - right);
    for (const at of ticks(0, most, Math.max(2, Math.floor(width / 110)))) {
      svg.append(s("line", { x1: x(at), x2: x(at), y1: 2, y2: height - 32, class: "grid" }),
        s("text", { x: x(at), y: height - 19, "text-anchor": "middle" }, show(at)));
    }
    rows.forEach((row, place) => {
      const y = place * line + 4;
      svg.append(s("text", { x: left - 6, y: y + 12, "text-anchor": "end" }, row.name));
      let at = 0;
      row.values.forEach((value, part) => {
        if (!value) return;
        svg.append(s("rect", { x: x(at), y, width: Math.max(0.5, x(at + value) - x(at)), height: 16,
          fill: colours[part % colours.length], class: "piece" },
        s("title", null, `${row.name}: ${parts[part]} ${show(value)}`)));
        at += value;
      });
      svg.append(s("text", { x: x(at) + 5, y: y + 12 }, row.after || ""));
    });
    svg.append(s("text", { x: (left + width - right) / 2, y: height - 3, "text-anchor": "middle",
      class: "label" }, unit));
    return svg;
  };
  const columns = [spec.rowsAre || "row", ...parts, ...(spec.afterIs ? [spec.afterIs] : [])];
  const tabled = () => table({ columns, rows: rows.map((row) =>
    [row.name, ...row.values, ...(spec.afterIs ? [row.after] : [])]) }, { caption: title });
  return figure(title, note, draw, tabled, { under: parts.length < 2 ? null : h("ul",
    { class: "keys" }, parts.map((one, part) => key(one, colours[part % colours.length]))) });
}

const NARROW = 4;

// Neighbours too narrow to draw become one piece, with the last version that it names.
function joinedPieces(pieces, x) {
  const merged = [];
  for (const [from, ready, until, version] of pieces) {
    const last = merged[merged.length - 1];
    const narrow = x(until) - x(from) < NARROW;
    if (narrow && last && last.several && x(last.until) - x(last.from) < 10 * NARROW) {
      Object.assign(last, { until, last: version });
    } else merged.push({ from, ready, until, version, last: version, several: narrow });
  }
  return merged;
}

// A row per worker: the versions that it served. Two tones alternate; loading is hatched.
export function timeline(spec) {
  const { title, note, data } = spec;
  if (!data.rows.length) return empty(title, "No worker has joined yet.");
  const span = [data.from, data.until > data.from ? data.until : data.from + 1];
  const said = data.rows.map((row) => `${row.worker}: versions ` +
    `${row.pieces.length ? row.pieces[0][3] : "none"} to ` +
    `${row.pieces.length ? row.pieces[row.pieces.length - 1][3] : "none"}`);
  const draw = (width) => {
    const left = 58, line = 28, trainer = data.trainer || [];
    const count = data.rows.length + (trainer.length ? 1 : 0), height = count * line + 46;
    const svg = frame(width, height, `${title}. ${said.join("; ")}`);
    svg.setAttribute("class", "timeline");
    const hatch = `hatch${serial += 1}`;
    svg.append(s("defs", null, s("pattern", { id: hatch, width: 6, height: 6,
      patternUnits: "userSpaceOnUse" }, s("path", { d: "M0,6 L6,0", class: "hatch" }))));
    const x = scale(...span, left, width - RIGHT), bottom = count * line + 10;
    for (const at of ticks(...span, Math.max(2, Math.floor(width / 90)))) {
      svg.append(s("line", { x1: x(at), x2: x(at), y1: 8, y2: bottom, class: "grid" }),
        s("text", { x: x(at), y: bottom + 15, "text-anchor": "middle" }, show(at)));
    }
    data.rows.forEach((row, place) => served(svg, x, row, place * line + 10, left, hatch));
    if (trainer.length) stripes(svg, x, trainer, data.rows.length * line + 10, left);
    marked(svg, marksBy(spec.marks || [], span, "at"), x, bottom);
    svg.append(s("text", { x: (left + width) / 2, y: height - 3, "text-anchor": "middle",
      class: "label" }, "seconds of the run"));
    return svg;
  };
  const columns = ["worker", "from s", "ready s", "until s", "version"];
  const rows = data.rows.flatMap((row) => row.pieces.map((one) => [row.worker, ...one]));
  const work = ["from s", "waited s", "until s", "part", "step", "groups", "tokens"];
  return figure(title, note, draw, () => h("div", { class: "tables" },
    table({ columns, rows }, { caption: title }),
    data.trainer && table({ columns: work, rows: data.trainer },
      { caption: "Trainer", name: `${title}: trainer` })));
}

function tone(number) {
  return number < 0 ? "many" : `tone${number % 2}`;
}

// The trainer's row: a piece per step or part of a batch.
function stripes(svg, x, pieces, y, left) {
  svg.append(s("text", { x: left - 6, y: y + 14, "text-anchor": "end" }, "trainer"));
  for (const [from, waited, until, part, step, groups, tokens] of pieces) {
    const several = part === -1;
    const what = several ? "several parts" : `step ${step}, ${part === null ? "whole batch" :
      `part ${part}`}: ${groups} groups, ${tokens} tokens, after a wait of ${show(waited)} s`;
    svg.append(s("rect", { x: x(from), y, width: Math.max(0.6, x(until) - x(from)), height: 20,
      class: `stripe ${several ? "many" : tone(step)}` },
    s("title", null, `trainer, ${from} s to ${until} s: ${what}`)));
  }
}

function served(svg, x, row, y, left, hatch) {
  svg.append(s("text", { x: left - 6, y: y + 14, "text-anchor": "end" }, row.worker));
  for (const { from, ready, until, version, last, several } of joinedPieces(row.pieces, x)) {
    const wide = Math.max(0.6, x(until) - x(from));
    const what = version < 0 ? "several versions" : version === last ? `version ${version}, loaded in ` +
      `${show(Number((ready - from).toFixed(3)))} s` : `versions ${version} to ${last}`;
    svg.append(s("rect", { x: x(from), y, width: wide, height: 20,
      class: several || version < 0 ? "many" : tone(version) },
    s("title", null, `${row.worker}, ${from} s to ${until} s: ${what}`)));
    if (x(ready) - x(from) > 1 && !several) {
      svg.append(s("rect", { x: x(from), y, width: x(ready) - x(from), height: 20, class: "loading" }),
        s("rect", { x: x(from), y, width: x(ready) - x(from), height: 20, fill: `url(#${hatch})` }));
    }
    if (version >= 0 && !several && wide > String(version).length * 7 + 8) {
      svg.append(s("text", { x: x(from) + wide / 2, y: y + 14, "text-anchor": "middle",
        class: `version ${tone(version)}` }, version));
    }
  }
  for (const [at, why] of row.gone) {
    svg.append(s("path", { d: `M${x(at) - 5},${y + 5} l10,10 m0,-10 l-10,10`, class: "gone" },
      s("title", null, `gone at ${at} s: ${why}`)));
  }
}
