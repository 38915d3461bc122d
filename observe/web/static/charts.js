// Charts as SVG. Every series differs in colour (Okabe-Ito), in dash and in its mark, every area in
// colour and pattern, so that nothing rests on colour alone; every chart has its table.

import { h, s, show, table } from "./dom.js";

export const COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442"];
const DASHES = [null, "7 3", "2 3", "9 3 2 3"];
const MARKS = ["circle", "square", "triangle", "diamond"];
const LEFT = 66, RIGHT = 14, TOP = 10, BOTTOM = 36;
let serial = 0;

// Where the ticks of an axis are: round numbers, at most so many.
export function ticks(low, high, most, whole = false) {
  if (!(high > low)) return [low];
  const raw = (high - low) / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(raw));
  let step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= raw);
  if (whole) step = Math.max(1, Math.round(step));
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) {
    found.push(Number(at.toPrecision(12)));
  }
  return found;
}

export function scale(low, high, from, to) {
  const width = high - low || 1;
  return (value) => from + ((value - low) / width) * (to - from);
}

function extent(values, floor = null, ceiling = null) {
  const there = values.filter((one) => one !== null && one !== undefined);
  let low = there.length ? Math.min(...there) : 0;
  let high = there.length ? Math.max(...there) : 1;
  if (floor !== null) low = Math.min(low, floor);
  if (ceiling !== null) high = Math.max(high, ceiling);
  if (high > low) return [low, high];
  return low ? [Math.min(0, 2 * low), Math.max(0, 2 * low)] : [0, 1];
}

// A range that ends at ticks.
function rounded([low, high]) {
  const [first, second] = ticks(low, high, 5);
  const step = second - first;
  if (!(step > 0)) return [low, high];
  return [Math.floor(low / step + 1e-9) * step, Math.ceil(high / step - 1e-9) * step];
}

// The patterns of areas: plain, diagonals, dots, level lines, upright lines, a grid.
function pattern(id, colour, kind) {
  const ink = { stroke: "#000", "stroke-width": 1.4, "stroke-opacity": 0.5 };
  const drawn = [
    [],
    [s("path", { d: "M-2,2 L2,-2 M0,8 L8,0 M6,10 L10,6", ...ink })],
    [s("circle", { cx: 4, cy: 4, r: 1.4, "fill-opacity": 0.55 })],
    [s("path", { d: "M0,4 H8", ...ink })],
    [s("path", { d: "M4,0 V8", ...ink })],
    [s("path", { d: "M0,4 H8 M4,0 V8", ...ink })],
  ][kind];
  return s("pattern", { id, width: 8, height: 8, patternUnits: "userSpaceOnUse" },
    s("rect", { width: 8, height: 8, fill: colour }), drawn);
}

// Fills for one drawing: `fill(colour, kind)` names a pattern that stands in `defs`.
function fills() {
  const defs = s("defs");
  const known = new Map();
  const own = ++serial;
  return { defs, fill(colour, kind) {
    if (kind === 0) return colour;
    const key = `${colour.slice(1)}-${kind}`;
    if (!known.has(key)) {
      const id = `p${own}-${key}`;
      known.set(key, id);
      defs.append(pattern(id, colour, kind));
    }
    return `url(#${known.get(key)})`;
  } };
}

function mark(kind, x, y, colour) {
  const at = { fill: colour, stroke: "#000", "stroke-width": 0.6 };
  if (kind === "square") return s("rect", { x: x - 3, y: y - 3, width: 6, height: 6, ...at });
  if (kind === "triangle") return s("path", { d: `M${x - 4},${y + 3} h8 l-4,-7 z`, ...at });
  if (kind === "diamond") return s("path", { d: `M${x},${y - 4} l4,4 l-4,4 l-4,-4 z`, ...at });
  return s("circle", { cx: x, cy: y, r: 3, ...at });
}

// A figure that draws itself as wide as it may be, again whenever that changes.
export function figure(title, note, draw, tableOf, key) {
  const place = h("div", { class: "drawing" });
  const data = tableOf ? h("details", { "data-key": `table ${key || title}` },
    h("summary", null, `Table: ${title}`)) : null;
  if (data) {
    const fill = () => {
      if (data.open && data.children.length === 1) data.append(tableOf());
    };
    data.addEventListener("toggle", fill);
  }
  const whole = h("figure", null, h("figcaption", null, h("h2", null, title),
    note ? h("p", { class: "note" }, note) : null), place, data);
  let drawn = 0;
  const again = () => {
    const width = Math.floor(place.clientWidth);
    if (width < 60 || width === drawn) return;
    drawn = width;
    place.replaceChildren(...[draw(width)].flat());
  };
  new ResizeObserver(again).observe(place);
  requestAnimationFrame(again);
  return whole;
}

function frame(width, height, label) {
  return s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": label });
}

function axes(svg, { x, y, xTicks, yTicks, width, height, xLabel, yLabel }) {
  for (const at of yTicks) {
    svg.append(s("line", { x1: LEFT, x2: width - RIGHT, y1: y(at), y2: y(at), class: "grid" }),
      s("text", { x: LEFT - 6, y: y(at) + 4, "text-anchor": "end" }, show(at)));
  }
  for (const at of xTicks) {
    svg.append(s("line", { x1: x(at), x2: x(at), y1: height - BOTTOM, y2: height - BOTTOM + 4,
      class: "axis" }), s("text", { x: x(at), y: height - BOTTOM + 16, "text-anchor": "middle" },
      show(at)));
  }
  svg.append(s("line", { x1: LEFT, x2: width - RIGHT, y1: height - BOTTOM, y2: height - BOTTOM,
    class: "axis" }));
  svg.append(s("text", { x: (LEFT + width - RIGHT) / 2, y: height - 4, "text-anchor": "middle",
    class: "label" }, xLabel));
  svg.append(s("text", { x: 12, y: (TOP + height - BOTTOM) / 2, "text-anchor": "middle",
    class: "label", transform: `rotate(-90 12 ${(TOP + height - BOTTOM) / 2})` }, yLabel));
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

function stepped(points) {
  const found = [];
  let last = null;
  for (const [x, y] of points) {
    if (last !== null && y !== null) found.push([x, last]);
    found.push([x, y]);
    last = y;
  }
  return found;
}

function bandPath(xs, low, high, x, y) {
  const pieces = [[]];  // No band is drawn over a pause.
  xs.forEach((at, place) => {
    if (low[place] === null || high[place] === null) pieces.push([]);
    else pieces[pieces.length - 1].push([at, low[place], high[place]]);
  });
  return pieces.filter((one) => one.length > 1).map((there) => {
    const up = there.map(([at, , top]) => `${x(at).toFixed(1)},${y(top).toFixed(1)}`);
    const down = there.reverse().map(([at, bottom]) =>
      `${x(at).toFixed(1)},${y(bottom).toFixed(1)}`);
    return `M${[...up, ...down].join("L")}Z`;
  }).join("");
}

// Draws a vertical line for each changed setting, stop or lost role; hovering names it. Marks at the
// same place share a line.
function marked(svg, marks, x, span, bottom, of) {
  const places = new Map();
  for (const one of marks) {
    const at = one[of];
    if (at === null || at === undefined || at < span[0] || at > span[1]) continue;
    places.set(at, [...(places.get(at) || []), one.words]);
  }
  for (const [at, words] of places) {
    svg.append(s("g", { class: "mark" }, s("title", null, words.join("\n")),
      s("path", { d: `M${x(at)},${TOP - 8} h8 l-8,7 z M${x(at)},${TOP - 8} V${bottom}` })));
  }
}

// Lines over one x. A series: {name, y, x?, step?, thick?, colour?, dash?}; the band {name, low, high}.
export function lines(spec) {
  const { title, note = "", xs, series, marks = [], band = null, xLabel, yLabel } = spec;
  const { floor = 0, ceiling = null } = spec;
  const named = series.map((one, place) => ({
    colour: COLOURS[place % COLOURS.length], dash: DASHES[place % DASHES.length],
    mark: MARKS[place % MARKS.length], ...one,
  }));
  const every = [...named.flatMap((one) => one.y), ...(band ? [...band.low, ...band.high] : [])];
  if (!every.some((one) => one !== null && one !== undefined)) {
    return empty(title, spec.without || "Nothing to draw yet.");
  }
  const label = `${title}. ${summary(named, xLabel)}`;
  const draw = (width) => {
    const height = 230;
    const svg = frame(width, height, label);
    const allX = [...xs, ...named.flatMap((one) => one.x || [])];
    const [x0, x1] = extent(allX, spec.time ? 0 : null);
    const [y0, y1] = rounded(extent(every, floor, ceiling));
    const x = scale(x0, x1, LEFT, width - RIGHT), y = scale(y0, y1, height - BOTTOM, TOP);
    const fine = Math.max(2, Math.floor(width / 90));
    axes(svg, { x, y, width, height, xLabel, yLabel, xTicks: ticks(x0, x1, fine, !spec.time),
      yTicks: ticks(y0, y1, 5) });
    if (band) {
      const paint = fills();
      svg.append(paint.defs, s("path", { d: bandPath(xs, band.low, band.high, x, y),
        fill: "#0072B2", "fill-opacity": 0.18, stroke: "#0072B2", "stroke-width": 0.6,
        "stroke-dasharray": "1 2" }));
    }
    for (const one of named) {
      const own = one.x || xs;
      const points = own.map((at, place) => [x(at), one.y[place] === null ||
        one.y[place] === undefined ? null : y(one.y[place])]);
      svg.append(s("path", { d: path(one.step ? stepped(points) : points), fill: "none",
        stroke: one.colour, "stroke-width": one.thick ? 2.6 : 1.9, "stroke-dasharray": one.dash }));
      const apart = one.points ? 1 : Math.ceil(points.length / 8);
      points.forEach(([px, py], place) => {
        if (py !== null && (place % apart === 0 || place === points.length - 1)) {
          svg.append(mark(one.mark, px, py, one.colour));
        }
      });
    }
    const of = spec.time ? "at" : ["step", "version"].includes(xLabel) ? "step" : null;
    if (of) marked(svg, marks, x, [x0, x1], height - BOTTOM, of);
    const keys = named.map((one) => key(one.name, (g) => {
      g.append(s("line", { x1: 0, x2: 30, y1: 7, y2: 7, stroke: one.colour, "stroke-width": 2.4,
        "stroke-dasharray": one.dash }), mark(one.mark, 15, 7, one.colour));
    }));
    if (band) keys.push(key(band.name, (g) => g.append(s("rect", { width: 30, height: 14,
      fill: "#0072B2", "fill-opacity": 0.18, stroke: "#0072B2", "stroke-dasharray": "1 2" }))));
    return [svg, h("ul", { class: "keys" }, keys)];
  };
  return figure(title, note, draw, () => linesTable(title, xLabel, xs, named, band));
}

function summary(named, xLabel) {
  return named.map((one) => {
    const there = one.y.filter((value) => value !== null && value !== undefined);
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
  return h("div", null, rows.length ? table({ columns, rows }, { caption: title }) : null,
    apart.map((one) => table({ columns: [xLabel, one.name],
      rows: one.x.map((at, place) => [at, one.y[place]]) },
    { caption: one.name, name: `${title}: ${one.name}` })));
}

export function key(name, draw) {
  const svg = s("svg", { width: 30, height: 14, "aria-hidden": "true" });
  draw(svg);
  return h("li", null, svg, ` ${name}`);
}

export function empty(title, why) {
  return h("figure", null, h("figcaption", null, h("h2", null, title)), h("p", { class: "note" }, why));
}

// Level bars, one a row, stacked: rows [{name, values, of?}], parts their names. Absolute values,
// or shares of the row.
export function bars(spec) {
  const { title, note = "", rows, parts, unit, shares = false, colours = null } = spec;
  if (!rows.length) return empty(title, spec.without || "Nothing to draw yet.");
  const total = (row) => row.values.reduce((sum, one) => sum + (one || 0), 0);
  const most = shares ? 1 : Math.max(...rows.map(total), 1e-9);
  const colour = (place) => (colours ? colours[place] : COLOURS[place % COLOURS.length]);
  const said = rows.map((row) => `${row.name}: ` + parts.map((one, place) =>
    row.values[place] ? `${one} ${show(row.values[place])}` : "").filter(Boolean).join(", "));
  const draw = (width) => {
    const left = 88, line = 26, height = rows.length * line + 40;
    const svg = frame(width, height, `${title}. ${said.join("; ")}`);
    const paint = fills();
    svg.append(paint.defs);
    const x = scale(0, most, left, width - 64);
    for (const at of ticks(0, most, Math.max(2, Math.floor(width / 110)))) {
      svg.append(s("line", { x1: x(at), x2: x(at), y1: 2, y2: height - 36, class: "grid" }),
        s("text", { x: x(at), y: height - 22, "text-anchor": "middle" },
          shares ? `${Math.round(at * 100)} %` : show(at)));
    }
    rows.forEach((row, place) => {
      const y = place * line + 4, sum = total(row) || 1;
      svg.append(s("text", { x: left - 6, y: y + 13, "text-anchor": "end" }, row.name));
      let at = 0;
      row.values.forEach((value, part) => {
        if (!value) return;
        const size = shares ? value / sum : value;
        svg.append(s("rect", { x: x(at), y, width: Math.max(0.5, x(at + size) - x(at)), height: 18,
          fill: paint.fill(colour(part), part % 6), stroke: "#222", "stroke-width": 0.6 },
        s("title", null, `${row.name}: ${parts[part]} ${show(value)}`)));
        at += size;
      });
      svg.append(s("text", { x: x(at) + 5, y: y + 13 }, row.after || ""));
    });
    svg.append(s("text", { x: (left + width - 64) / 2, y: height - 5, "text-anchor": "middle",
      class: "label" }, unit));
    return [svg, h("ul", { class: "keys" }, parts.map((one, part) => {
      const own = fills();
      return key(one, (g) => g.append(own.defs, s("rect", { width: 30, height: 14,
        fill: own.fill(colour(part), part % 6), stroke: "#222" })));
    }))];
  };
  const columns = [spec.rowsAre || "row", ...parts, ...(spec.afterIs ? [spec.afterIs] : [])];
  const tabled = () => table({ columns, rows: rows.map((row) =>
    [row.name, ...row.values, ...(spec.afterIs ? [row.after] : [])]) }, { caption: title });
  return figure(title, note, draw, tabled);
}

// How a version looks: its neighbours differ from it in colour and in pattern.
export function versionLook(version) {
  const colour = COLOURS[((version % 7) + 7) % 7];
  return { colour, kind: ((version % 4) + 4) % 4, ink: colour === "#0072B2" ? "#fff" : "#000" };
}

// A row per worker; what it hosted, coloured by version, with the version's number where there is
// room; loading is hatched.
export function timeline(spec) {
  const { title, note, data } = spec;
  if (!data.rows.length) return empty(title, "No worker has joined yet.");
  const span = [data.from, data.until > data.from ? data.until : data.from + 1];
  const said = data.rows.map((row) => `${row.worker}: versions ` +
    `${row.pieces.length ? row.pieces[0][3] : "none"} to ` +
    `${row.pieces.length ? row.pieces[row.pieces.length - 1][3] : "none"}`);
  const draw = (width) => {
    const left = 70, line = 34, trainer = data.trainer || [];
    const lineCount = data.rows.length + (trainer.length ? 1 : 0), height = lineCount * line + 52;
    const svg = frame(width, height, `${title}. ${said.join("; ")}`);
    svg.setAttribute("class", "timeline");
    const paint = fills();
    svg.append(paint.defs);
    const x = scale(span[0], span[1], left, width - RIGHT);
    const bottom = lineCount * line + 10;
    for (const at of ticks(span[0], span[1], Math.max(2, Math.floor(width / 90)))) {
      svg.append(s("line", { x1: x(at), x2: x(at), y1: 8, y2: bottom, class: "grid" }),
        s("text", { x: x(at), y: bottom + 16, "text-anchor": "middle" }, show(at)));
    }
    data.rows.forEach((row, place) => stays(svg, paint, x, row, place * line + 10, left));
    if (trainer.length) stripes(svg, paint, x, trainer, data.rows.length * line + 10, left);
    marked(svg, spec.marks || [], x, span, bottom, "at");
    for (const [step, at] of data.commits) {
      svg.append(s("path", { d: `M${x(at)},${bottom} v-5`, stroke: "#000", "stroke-width": 1 },
        s("title", null, `step ${step} committed at ${at} s`)));
    }
    svg.append(s("text", { x: (left + width) / 2, y: height - 4, "text-anchor": "middle",
      class: "label" }, "seconds of the run; ticks below the rows are committed steps"));
    return svg;
  };
  const columns = ["worker", "from s", "ready s", "until s", "version"];
  const rows = data.rows.flatMap((row) => row.pieces.map((one) => [row.worker, ...one]));
  const work = ["from s", "waited s", "until s", "part", "step", "groups", "tokens"];
  return figure(title, note, draw, () => h("div", null,
    table({ columns, rows }, { caption: title }),
    data.trainer && table({ columns: work, rows: data.trainer }, { caption: "The trainer", name: `${title}: the trainer` })));
}

// The trainer's line: parts of a batch side by side in the step's colour, each other one hatched.
function stripes(svg, paint, x, pieces, y, left) {
  svg.append(s("text", { x: left - 6, y: y + 16, "text-anchor": "end" }, "trainer"));
  for (const [from, waited, until, part, step, groups, tokens] of pieces) {
    const wide = Math.max(0.6, x(until) - x(from)), several = part === -1;
    const lasted = show(Number((until - from).toFixed(3)));
    const what = several ? "several, each shorter than can be seen" :
      `step ${step}, ${part === null ? "its batch" : `part ${part}`}: ${groups} groups, ` +
      `${tokens} tokens, ${lasted} s, after a wait of ${show(waited)} s`;
    svg.append(s("rect", { x: x(from), y, width: wide, height: 24, stroke: "#222",
      "stroke-width": wide > 3 ? 0.7 : 0, class: "stripe",
      fill: several ? paint.fill("#bbbbbb", 5) :
        paint.fill(versionLook(step).colour, (part || 0) % 2) },
    s("title", null, `trainer, ${from} s to ${until} s: ${what}`)));
  }
}

function stays(svg, paint, x, row, y, left) {
  svg.append(s("text", { x: left - 6, y: y + 16, "text-anchor": "end" }, row.worker));
  for (const [from, ready, until, version] of row.pieces) {
    const wide = Math.max(0.6, x(until) - x(from));
    const look = versionLook(version);
    const several = version < 0;
    const what = several ? "several versions, each shorter than can be seen" :
      `version ${version}, loaded in ${show(Number((ready - from).toFixed(3)))} s`;
    svg.append(s("rect", { x: x(from), y, width: wide, height: 24, stroke: "#222",
      "stroke-width": wide > 3 ? 0.7 : 0,
      fill: several ? paint.fill("#bbbbbb", 5) : paint.fill(look.colour, look.kind) },
    s("title", null, `${row.worker}, ${from} s to ${until} s: ${what}`)));
    if (x(ready) - x(from) > 1) {
      svg.append(s("rect", { x: x(from), y, width: x(ready) - x(from), height: 24,
        fill: paint.fill("#ffffff", 1) }));
    }
    if (!several && wide > String(version).length * 7 + 8) {
      const middle = x(from) + wide / 2, half = String(version).length * 4 + 3;
      svg.append(s("rect", { x: middle - half, y: y + 4, width: 2 * half, height: 16, rx: 3,
        fill: look.colour }), s("text", { x: middle, y: y + 16, "text-anchor": "middle",
        fill: look.ink, class: "version" }, version));
    }
  }
  for (const [at, why] of row.gone) {
    svg.append(s("path", { d: `M${x(at) - 5},${y + 7} l10,10 m0,-10 l-10,10`, stroke: "#000",
      "stroke-width": 2.4 }, s("title", null, `gone at ${at} s: ${why}`)));
  }
}
