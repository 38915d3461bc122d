// The first page. Each chart is a specification: which columns of the answer it draws, and its words.

import { bars, empty, lines, timeline } from "./charts.js";
import { get, has } from "./data.js";
import { addressOf, bucket, facts, h, show, span, table } from "./dom.js";

const FATES = ["trained", "filtered", "failed", "cancelled", "open"];
const PHASES = {
  queued: "queued", worker: "on a worker", siblings: "for siblings", batch: "for a batch",
  training: "in training",
};
const FAULTS = {
  infrastructure: "infrastructure", answer: "no valid answer", code: "the task's code",
};
const ANY = { floor: null };

// Charts over the points of the run, series as [name, column, look].
const REWARD = {
  title: "Reward", note: "Mean of a batch. Band: the middle half of its groups' means.",
  yLabel: "reward", ...ANY, columns: [["valid rewards", "valid", { thick: true }],
    ["raw: invalid counts as 0", "raw"]], between: ["middle half", "reward_low", "reward_high"],
};
const STALENESS = {
  title: "Staleness", note: "Of the groups of a batch. No group may be trained above its bound.",
  yLabel: "steps", between: ["least to most", "stale_low", "stale_high"],
  columns: [["mean", "stale_mean", { thick: true }],
    ["bound", "bound", { step: true, colour: "#000", dash: "8 4" }]],
};
const LENGTHS = {
  title: "Lengths", note: "Sampled tokens of the trajectories of a batch.", yLabel: "tokens",
  columns: [["longest", "longest"], ["9 of 10 below", "p90"], ["median", "p50", { thick: true }],
    ["1 of 10 below", "p10"]],
};
const BUBBLE = {
  title: "The trainer's time", yLabel: "seconds",
  note: "Seconds of a step. The bubble: the trainer was free and its batch was not there.",
  columns: [["bubble", "waited", { thick: true, colour: "#D55E00" }],
    ["computing", "compute", { colour: "#0072B2" }],
    ["in parts, before the batch was whole", "ahead", { colour: "#CC79A7" }],
    ["everything else", "other", { colour: "#009E73" }]],
};
const UTILISATION = {
  title: "Utilisation of the workers", ceiling: 1, yLabel: "share of slots", ...overTime(),
  note: "Share of slots in use: from a request's placement until its trajectory is logged.",
  columns: [["mean", "mean", { thick: true }]], between: ["least to most used worker", "low", "high"],
};
const SPEED = {
  title: "Sampled tokens", note: "Of the trajectories that were logged.", yLabel: "tokens/s",
  ...overTime(), columns: [["tokens per second", "tokens_per_s", { thick: true }]],
};
const MISMATCH = {
  title: "Mismatch against staleness", x: "staleness", xLabel: "staleness",
  yLabel: "|ln ratio|, share", between: ["1 to 9 of 10", "p10", "p90"],
  columns: [["median", "p50", { thick: true, points: true }],
    ["clipped share", "clipped", { points: true }]],
  without: "The store has no contributions of these steps.",
};

function overTime() {
  return { x: "at", xLabel: "seconds of the run", time: true };
}

// Draws columns of an answer as a specification says; a column of nothing but zeros is optional.
function chartOf(spec, columns, marks, more = []) {
  const { x = "step", xLabel = "step", between = null } = spec;
  const series = spec.columns.filter(([, column]) => column !== "ahead" || columns.ahead.some(Boolean))
    .map(([name, column, look]) => ({ name, y: columns[column], ...look }));
  const [name, low, high] = between || [];
  return lines({ marks, ...spec, xs: columns[x], xLabel, series: [...series, ...more],
    band: between && { name, low: columns[low], high: columns[high] } });
}

export async function overviewPage() {
  const found = await get(`overview`);
  const own = found.run, { marks, points } = found;
  const byStep = (spec, more) => chartOf(spec, points, marks, more);
  return {
    title: `${own.name}: overview`,
    body: [
      h("h1", { tabindex: -1 }, own.name, h("span", { class: "state" }, ` ${stateOf(own)}`)),
      own.read < 1 ? reading(own.read) : null,
      facts(factsOf(found)),
      h("div", { class: "charts" },
        byStep(REWARD, found.evaluations.map((one) => ({ name: `evaluation ${one.name}`.trim(),
          x: one.version, y: one.reward, points: true }))),
        passed(found.evaluations, marks),
        named("Parts of the reward", "Means of a batch's valid rewards, before their weights.",
          "mean", points, found.parts, marks, ANY),
        ...found.learning.map(({ name, note, y }) => named(name.replaceAll("_", " "), note, name,
          points, { [name]: y }, marks, ["truncated", "clipped_share"].includes(name) ? {} : ANY)),
        withoutReward(found.invalid, points, marks),
        byStep(STALENESS),
        h("div", { class: "wide" }, workers(found.timeline, marks)),
        bars(times(found.times)), later("times", "Time on a worker", sampled),
        fates(found.fates), byStep(LENGTHS),
        chartOf(UTILISATION, found.utilisation, marks), chartOf(SPEED, found.utilisation, marks),
        byStep(BUBBLE),
        later("mismatch", MISMATCH.title, (data) => chartOf({ ...MISMATCH, note: "|ln of the mean " +
          `ratio| of a trajectory, from the contributions of ${data.looked} steps.` },
        columnsOf(data.rows), [])),
        histogram(found.staleness)),
      found.waits.rows.length ? table(found.waits, { caption: "Waits of the trainer" }) : null,
      happened(marks),
      h("h2", null, "Newest decisions"),
      decisions(found.decisions.newest),
      h("p", null, h("a", { href: "#/decisions" }, "All decisions with their reasons")),
    ],
  };
}

// Columns of rows that are objects.
function columnsOf(rows) {
  return new Proxy({}, { get: (_, name) => rows.map((row) => row[name]) });
}

// A chart of columns by their names; nothing where there are none.
function named(title, note, yLabel, points, columns, marks, more = {}) {
  const series = Object.entries(columns).map(([name, y]) =>
    ({ name, y, thick: Object.keys(columns).length === 1 }));
  return series.length ? lines({ title, note, marks, xs: points.step, series, xLabel: "step", yLabel,
    ...more }) : null;
}

// The marks of the charts, as a list.
function happened(found) {
  return found.length ? [h("h2", null, "Changes and stops"), h("ol", { id: "marks" },
    found.map((one) => h("li", null, h("time", null, `${show(one.at)} s`), ` ${one.words}`)))] : [];
}

export function stateOf(own) {
  const of = own.steps_last ? ` of ${own.steps_last}` : "";
  return `${own.state}, ${own.steps}${of} steps in ${span(own.seconds)}`;
}

export function reading(share) {
  return h("p", { class: "reading", role: "status" },
    `The log is being read: ${Math.floor(share * 100)} % so far. `,
    h("progress", { max: 1, value: share, "aria-label": "share of the log that was read" }));
}

function factsOf({ run, totals, waited_share: idle, decisions: told }) {
  const fates = Object.entries(totals.group_fates).map(([name, count]) => `${show(count)} ${name}`);
  return {
    task: run.task, engine: run.engines.join(", "), objective: run.objective,
    groups: `${show(totals.groups)}: ${fates.join(", ") || "none ended"}; ${show(totals.open)} open`,
    trajectories: `${show(totals.trajectories)}, ${show(totals.not_counting)} records do not count`,
    "sampled tokens": show(totals.tokens) + (totals.tokens_per_s === null ? "" :
      `, ${show(totals.tokens_per_s)} a second`),
    "a batch": `${show(run.per_step)} groups of ${show(run.group_size)}`,
    "staleness bound": `${show(run.max_staleness)}${run.partial_rollout ? ", partial_rollout" : ""}`,
    "trainer waited": idle === null ? null : `${(idle * 100).toFixed(1)} % of its time`,
    moves: told.counts.move || 0, seed: run.seed, planner: run.planner,
  };
}

// A chart whose figures come later, because records are opened for them.
function later(name, title, draw) {
  const place = h("div", null, empty(title, "Records are being read."));
  get(`${name}`).then((found) => place.replaceChildren(draw(found)))
    .catch((error) => place.replaceChildren(empty(name, error.message)));
  return place;
}

// Where a prompt has several samples: how many of them solve it, alone or by majority.
function passed(evaluations, marks) {
  const several = (own) => Object.keys(own).filter((name) => name.startsWith("pass@")).length > 1;
  const series = evaluations.flatMap((one) => Object.entries(one.figures)
    .filter(([figure]) => several(one.figures) && /^(pass|maj)@/.test(figure))
    .map(([figure, y]) => ({ name: `${one.name} ${figure}`.trim(), x: one.version, y })));
  return series.length ? lines({
    title: "Evaluations", note: "Share of prompts that one of k samples solves, without bias; " +
      "that the most frequent of k answers solves (maj@k).",
    xs: [], series, marks, xLabel: "version", yLabel: "share of prompts",
  }) : null;
}

function withoutReward({ series, errors }, points, marks) {
  const faults = Object.keys(FAULTS).filter((fault) => Object.keys(errors[fault]).length);
  const total = faults.flatMap((fault) => Object.entries(errors[fault])
    .map(([name, count]) => `${show(count)} ${name}`));
  return named("Without a valid reward",
    `Trajectories of a batch. In all: ${total.join(", ")}.`, "trajectories", points,
    Object.fromEntries(faults.map((fault) => [FAULTS[fault], series[fault]])), marks);
}

function histogram(groups) {
  const rows = Object.entries(groups).map(([name, count]) =>
    ({ name, values: [count], after: show(count) }));
  return bars({ title: "Trained groups by staleness", rows, parts: ["groups"], unit: "groups",
    rowsAre: "staleness", note: "How old the policy was that a trained group was sampled from." });
}

function workers(data, marks) {
  const place = h("div", null);
  const draw = (window) => place.replaceChildren(timeline({
    title: "Workers by version", data: window, marks,
    note: "What each worker hosted, with the version's number. Hatched white: weights are loaded. " +
      "A cross: the worker left or was fenced." + (window.trainer ? " The trainer's line: a " +
        "stripe for each part of a batch that was computed ahead of it, and for the rest." : ""),
  }));
  draw(data);
  const low = h("input", { type: "number", step: "any", id: "from", value: data.from });
  const high = h("input", { type: "number", step: "any", id: "until", value: data.until });
  const look = async (event) => {
    event.preventDefault();
    const found = await get(`timeline?from=${low.value}&until=${high.value}`);
    draw(found.timeline);
  };
  const form = has(`#/timeline/any`) && h("form", { class: "inline", onsubmit: look },
    h("label", { for: "from" }, "from s "), low, h("label", { for: "until" }, "until s "), high,
    h("button", { type: "submit" }, "Look closer"));
  return h("div", null, place, form);
}

// Bars by length: what they have in common.
function byLength(rows, values, spec) {
  return { rowsAre: "sampled tokens", afterIs: "trajectories", ...spec,
    rows: rows.map((row) => ({ name: bucket(row), values: values(row), after: `n ${show(row.n)}` })) };
}

function times(data) {
  return byLength(data.rows, (row) => row.seconds, {
    title: "Where a trajectory's time went", unit: "seconds",
    note: "Trained trajectories by sampled tokens, mean seconds from dispatch to commit.",
    parts: data.phases.map((one) => PHASES[one] || one),
  });
}

function sampled(data) {
  return bars(byLength(data.rows, (row) => row.seconds, {
    title: "Time on a worker", unit: "seconds", parts: data.phases, afterIs: "records",
    note: `From ${show(data.sampled)} records of ${show(data.of)}: for a slot, to the first ` +
      "token, to the last (environments included), to the reward." + (data.damaged.length ?
        ` Left out, not what was logged: ${data.damaged.join("; ")}.` : ""),
    without: "No record could be read.",
  }));
}

function fates(rows) {
  return bars(byLength(rows, (row) => FATES.map((one) => row.fates[one] || 0), {
    title: "Fates by length", shares: true, unit: "share of trajectories", parts: FATES,
    colours: ["#009E73", "#E69F00", "#D55E00", "#CC79A7", "#56B4E9"],
    note: "Training trajectories whose group has ended, by sampled tokens: no length is dropped " +
      "for being long.", without: "No group has ended yet.",
  }));
}

export function decisions(rows) {
  return h("ol", { class: "decisions" }, rows.map((one) => {
    const address = /^\d+$/.test(one.subject) ? null : addressOf(one.subject);
    const subject = address && has(address) ? h("a", { href: address }, one.subject) : one.subject;
    return h("li", null, h("time", null, `${show(one.at)} s`), " ", h("strong", null, one.kind),
      " ", subject, one.reason ? `: ${one.reason}` : "");
  }));
}
