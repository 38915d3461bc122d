// The first page.

import { bars, empty, lines, timeline } from "./charts.js";
import { get, has } from "./data.js";
import { addressOf, bucket, facts, h, show, span, table } from "./dom.js";

const PHASES = {
  queued: "queued", worker: "on a worker", siblings: "for siblings", batch: "for a batch",
  training: "in training",
};
// Marks of the runs on this page, in every chart over steps or time.
let marks = [];
const curve = (spec) => lines({ marks, ...spec });
const FATES = ["trained", "filtered", "failed", "cancelled", "open"];

export async function overviewPage() {
  const found = await get(`overview`);
  const own = found.run;
  marks = found.marks;
  return {
    title: `${own.name}: overview`,
    body: [
      h("h1", { tabindex: -1 }, own.name, h("span", { class: "state" }, ` ${stateOf(own)}`)),
      own.read < 1 ? reading(own.read) : null,
      facts(factsOf(found)),
      h("div", { class: "charts" },
        reward(found), passed(found), rewardParts(found.parts), ...learning(found.learning),
        withoutReward(found.invalid),
        staleness(found),
        h("div", { class: "wide" }, workers(found.timeline)),
        bars(times(found.times)), later("times", sampled),
        fates(found.fates), lengths(found.lengths),
        utilisation(found.utilisation), speed(found.utilisation), bubble(found.bubble),
        later("mismatch", mismatch), histogram(found.staleness)),
      found.waits.rows.length ? table(found.waits, { caption: "Waits of the trainer" }) : null,
      happened(found.marks),
      h("h2", null, "Newest decisions"),
      decisions(found.decisions.newest),
      h("p", null, h("a", { href: "#/decisions" }, "All decisions with their reasons")),
    ],
  };
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

function factsOf({ run, totals, bubble: idle, decisions: told }) {
  const fates = Object.entries(totals.group_fates).map(([name, count]) => `${show(count)} ${name}`);
  return {
    task: run.task, engine: run.engines.join(", "), objective: run.objective,
    groups: `${show(totals.groups)}: ${fates.join(", ") || "none ended"}; ${show(totals.open)} open`,
    trajectories: `${show(totals.trajectories)}, ${show(totals.not_counting)} records do not count`,
    "sampled tokens": show(totals.tokens) + (totals.tokens_per_s === null ? "" :
      `, ${show(totals.tokens_per_s)} a second`),
    "a batch": `${show(run.per_step)} groups of ${show(run.group_size)}`,
    "staleness bound": `${show(run.max_staleness)}${run.interruptible ? ", interruptible" : ""}`,
    "trainer waited": idle.share === null ? null : `${(idle.share * 100).toFixed(1)} % of its time`,
    moves: told.counts.move || 0, seed: run.seed, planner: run.planner,
  };
}

// A chart whose figures come later, because records are opened for them.
function later(name, draw) {
  const place = h("div", null, empty(name === "times" ? "Time on a worker" :
    "Mismatch against staleness", "Records are being read."));
  get(`${name}`).then((found) => place.replaceChildren(draw(found)))
    .catch((error) => place.replaceChildren(empty(name, error.message)));
  return place;
}

function reward({ reward: own, evaluations }) {
  const series = [
    { name: "valid rewards", y: own.valid, thick: true },
    { name: "raw: invalid counts as 0", y: own.raw },
  ];
  for (const one of evaluations) {
    const name = `evaluation ${one.name}`.trim();
    series.push({ name, x: one.version, y: one.reward, points: true });
  }
  return curve({
    title: "Reward", note: "Mean of a batch. Band: the middle half of its groups' means.",
    xs: own.step, series, band: { name: "middle half", low: own.low, high: own.high },
    xLabel: "step", yLabel: "reward", floor: null,
  });
}

// Where a prompt has several samples: how many of them solve it, alone or by majority.
function passed({ evaluations }) {
  const several = (own) => Object.keys(own).filter((name) => name.startsWith("pass@")).length > 1;
  const series = evaluations.flatMap((one) => Object.entries(one.figures)
    .filter(([figure]) => several(one.figures) && /^(pass|maj)@/.test(figure))
    .map(([figure, y]) => ({ name: `${one.name} ${figure}`.trim(), x: one.version, y })));
  return series.length ? curve({
    title: "Evaluations", note: "Share of prompts that one of k samples solves, without bias; " +
      "that the most frequent of k answers solves (maj@k).",
    xs: [], series, xLabel: "version", yLabel: "share of prompts", floor: 0,
  }) : null;
}

function rewardParts({ step, series }) {
  const found = Object.entries(series).map(([name, y]) => ({ name, y }));
  return found.length ? curve({
    title: "Parts of the reward", note: "Means of a batch's valid rewards, before their weights.",
    xs: step, series: found, xLabel: "step", yLabel: "mean", floor: null,
  }) : null;
}

function learning({ step, charts }) {
  return charts.map(({ name, note, y }) => curve({
    title: name.replaceAll("_", " "), note, xs: step, series: [{ name, y, thick: true }], xLabel: "step",
    yLabel: name, floor: name === "truncated" || name === "clipped_share" ? 0 : null,
  }));
}

const FAULTS = {
  infrastructure: "infrastructure", answer: "no valid answer", code: "the task's code",
};

function withoutReward({ step, errors, ...own }) {
  const names = Object.keys(FAULTS).filter((fault) => Object.keys(errors[fault]).length);
  const total = names.flatMap((fault) => Object.entries(errors[fault])
    .map(([name, count]) => `${show(count)} ${name}`));
  return names.length ? curve({
    title: "Without a valid reward", note: `Trajectories of a batch. In all: ${total.join(", ")}.`,
    xs: step, series: names.map((fault) => ({ name: FAULTS[fault], y: own[fault] })),
    xLabel: "step", yLabel: "trajectories", floor: 0,
  }) : null;
}

function staleness({ staleness: own }) {
  return curve({
    title: "Staleness", note: "Of the groups of a batch. No group may be trained above its bound.",
    xs: own.step, band: { name: "least to most", low: own.low, high: own.high },
    series: [{ name: "mean", y: own.mean, thick: true },
      { name: "bound", y: own.bound, step: true, colour: "#000", dash: "8 4" }],
    xLabel: "step", yLabel: "steps",
  });
}

function histogram(own) {
  const rows = Object.entries(own.groups).map(([name, count]) =>
    ({ name, values: [count], after: show(count) }));
  return bars({ title: "Trained groups by staleness", rows, parts: ["groups"], unit: "groups",
    rowsAre: "staleness", note: "How old the policy was that a trained group was sampled from." });
}

function workers(data) {
  const place = h("div", null), shown = marks;
  const draw = (window) => place.replaceChildren(timeline({
    title: "Workers by version", data: window, marks: shown,
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

function times(data) {
  return {
    title: "Where a trajectory's time went",
    note: "Trained trajectories by sampled tokens, mean seconds from dispatch to commit.",
    rows: data.rows.map((row) => ({ name: bucket(row), values: row.seconds,
      after: `n ${show(row.n)}` })),
    parts: data.phases.map((one) => PHASES[one] || one), unit: "seconds",
    rowsAre: "sampled tokens", afterIs: "trajectories",
  };
}

function sampled(data) {
  return bars({
    title: "Time on a worker",
    note: `From ${show(data.sampled)} records of ${show(data.of)}: for a slot, to the first ` +
      "token, to the last (environments included), to the reward." + (data.damaged.length ?
        ` Left out, not what was logged: ${data.damaged.join("; ")}.` : ""),
    rows: data.rows.map((row) => ({ name: bucket(row), values: row.seconds,
      after: `n ${show(row.n)}` })),
    parts: data.phases, unit: "seconds", rowsAre: "sampled tokens", afterIs: "records",
    without: "No record could be read.",
  });
}

function fates(rows) {
  const colours = ["#009E73", "#E69F00", "#D55E00", "#CC79A7", "#56B4E9"];
  return bars({
    title: "Fates by length", shares: true, unit: "share of trajectories", colours, parts: FATES,
    note: "Training trajectories whose group has ended, by sampled tokens: no length is dropped " +
      "for being long.",
    rows: rows.map((row) => ({ name: bucket(row), values: FATES.map((one) => row.fates[one] || 0),
      after: `n ${show(row.n)}` })),
    rowsAre: "sampled tokens", afterIs: "trajectories", without: "No group has ended yet.",
  });
}

function lengths(own) {
  return curve({
    title: "Lengths", note: "Sampled tokens of the trajectories of a batch.", xs: own.step,
    series: [{ name: "longest", y: own.max }, { name: "9 of 10 below", y: own.p90 },
      { name: "median", y: own.p50, thick: true }, { name: "1 of 10 below", y: own.p10 }],
    xLabel: "step", yLabel: "tokens",
  });
}

function utilisation(own) {
  return curve({
    title: "Utilisation of the workers", xs: own.at, time: true, ceiling: 1,
    note: "Share of slots in use: from a request's placement until its trajectory is logged.",
    band: { name: "least to most used worker", low: own.low, high: own.high },
    series: [{ name: "mean", y: own.mean, thick: true }], xLabel: "seconds of the run",
    yLabel: "share of slots", floor: 0,
  });
}

function speed(own) {
  return curve({
    title: "Sampled tokens", xs: own.at, time: true, note: "Of the trajectories that were logged.",
    series: [{ name: "tokens per second", y: own.tokens_per_s, thick: true }],
    xLabel: "seconds of the run", yLabel: "tokens/s",
  });
}

function bubble(own) {
  return curve({
    title: "The trainer's time", xs: own.step,
    note: "Seconds of a step. The bubble: the trainer was free and its batch was not there.",
    series: [{ name: "bubble", y: own.waited, thick: true, colour: "#D55E00" },
      { name: "computing", y: own.compute, colour: "#0072B2" },
      ...(own.ahead ? [{ name: "in parts, before the batch was whole", y: own.ahead,
        colour: "#CC79A7" }] : []),
      { name: "everything else", y: own.other, colour: "#009E73" }],
    xLabel: "step", yLabel: "seconds",
  });
}

function mismatch(data) {
  if (!data.rows.length) {
    return empty("Mismatch against staleness", "The store has no contributions of these steps.");
  }
  return curve({
    title: "Mismatch against staleness", xs: data.rows.map((row) => row.staleness),
    note: `|ln of the mean ratio| of a trajectory, from the contributions of ${data.looked} steps.`,
    band: { name: "1 to 9 of 10", low: data.rows.map((row) => row.p10),
      high: data.rows.map((row) => row.p90) },
    series: [{ name: "median", y: data.rows.map((row) => row.p50), thick: true, points: true },
      { name: "clipped share", y: data.rows.map((row) => row.clipped), points: true }],
    xLabel: "staleness", yLabel: "|ln ratio|, share",
  });
}

export function decisions(rows) {
  return h("ol", { class: "decisions" }, rows.map((one) => {
    const address = /^\d+$/.test(one.subject) ? null : addressOf(one.subject);
    const subject = address && has(address) ? h("a", { href: address }, one.subject) : one.subject;
    return h("li", null, h("time", null, `${show(one.at)} s`), " ", h("strong", null, one.kind),
      " ", subject, one.reason ? `: ${one.reason}` : "");
  }));
}
