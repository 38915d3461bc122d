// The tabs of a run: overview, learning, speed, staleness, workers; and the list of runs.

import { COLOURS, bars, empty, lines, timeline } from "./charts.js";
import { get } from "./data.js";
import { bucket, facts, fold, h, region, show, span, table, tiles } from "./dom.js";

const PHASES = {
  queued: "queued", worker: "on a worker", samples: "waiting for the group", batch: "waiting for a batch",
  training: "in training",
};
const FAULTS = { infrastructure: "infrastructure", answer: "no valid answer", code: "task code" };
const LEARNED = { kl: "KL", grad_norm: "gradient norm", clipped_share: "clipped share",
  learning_rate: "learning rate", truncated: "truncated share" };
const ORDER = ["loss", "grad_norm", "kl", "clipped_share", "entropy", "learning_rate", "truncated"];
const SMALL_MAX = 6;
const WAIT = "var(--wait)", WORK = "var(--s0)", EVALUATED = "var(--s1)";

const percent = (value) => (value === null || value === undefined ? "–" :
  `${Number((100 * value).toFixed(1))} %`);
const toStep = (x) => `#/step/${Math.round(x)}`;
const toVersion = (x) => `#/version/${x}`;

// Lines over the steps of a run: columns are [name, column of the points, look].
function bySteps(answer, title, columns, more = {}) {
  const { points, marks } = answer;
  return lines({ title, xs: points.step, xLabel: "step", link: toStep, marks, ...more,
    series: [...columns.map(([name, column, look]) =>
      ({ name, y: typeof column === "string" ? points[column] : column, ...look })),
    ...(more.also || [])] });
}

function rewards(answer, more = {}) {
  const { points, evaluations } = answer;
  const differ = points.raw.some((value, at) => Math.abs(value - (points.valid[at] || 0)) > 1e-6);
  return bySteps(answer, "Reward", [["training", "valid", { thick: true, colour: WORK }],
    ...(differ ? [["invalid as 0", "raw", { colour: WORK, dash: "2 3" }]] : [])], {
    floor: null, yLabel: "mean reward of a batch", ...more,
    band: { name: "middle half of the groups", low: points.reward_low, high: points.reward_high },
    also: evaluations.map((one, at) => ({ name: `evaluation ${one.name}`.trim(), x: one.version,
      y: one.reward, points: true, thick: true, colour: at ? COLOURS[at + 1] : EVALUATED })) });
}

function learned(answer, small) {
  const known = answer.learning.filter(({ name }) => ORDER.includes(name))
    .sort((a, b) => ORDER.indexOf(a.name) - ORDER.indexOf(b.name));
  const share = (name) => ["truncated", "clipped_share"].includes(name);
  return known.map(({ name, note, y }) => bySteps(answer, LEARNED[name] || name, [[name, y,
    { colour: WORK }]], { note, small, floor: share(name) ? 0 : null, format: share(name) ? percent : show,
    yLabel: LEARNED[name] || name }));
}

function speeds(answer, small) {
  const { points } = answer;
  const rate = points.tokens.map((tokens, at) => tokens / (points.n_steps[at] * points.seconds[at]) || null);
  const waited = points.seconds.map((seconds, at) => (seconds ? points.waited[at] / seconds : null));
  return [
    bySteps(answer, "tokens/s", [["trained tokens per second", rate, { colour: WORK }]],
      { small, note: "Trained tokens of a step, divided by its time." }),
    bySteps(answer, "step time, s", [["step", "seconds", { colour: WORK }],
      ["waiting", "waited", { colour: WAIT }]], { small,
      note: "Seconds between commits; waiting: the trainer was free and had no batch." }),
    bySteps(answer, "wait share", [["wait share", waited, { colour: WAIT }]],
      { small, ceiling: 1, format: percent, note: "Share of a step in which the trainer waited." }),
  ];
}

export async function overviewPage() {
  const answer = await get("overview"), own = answer.run;
  return page("overview", answer, [
    own.read < 1 ? reading(own.read) : null,
    keyNumbers(answer),
    section("Learning", h("div", { class: "dash learning" },
      h("div", { class: "main" }, rewards(answer, { height: 232 })), learned(answer, true).slice(0, SMALL_MAX))),
    h("div", { class: "pair" },
      section("Speed", h("div", { class: "dash" }, speeds(answer, true))),
      section("Problems", region("problems", { class: "problems" }, warnings(), happened(answer.marks)))),
    fold("settings of the run", "Settings of the run", facts(settingsOf(answer))),
  ]);
}

function page(name, answer, body) {
  const own = answer.run;
  const title = name === "overview" ? own.name : name[0].toUpperCase() + name.slice(1);
  return { title: `${own.name}: ${name}`, body: [h("h1", { tabindex: -1 }, title, " ",
    h("span", { class: `state ${own.state}` }, stateOf(own))), ...body] };
}

function section(title, ...children) {
  return h("section", null, h("h2", null, title), ...children);
}

function last(values) {
  const there = (values || []).filter((one) => one !== null);
  return there.length ? there[there.length - 1] : null;
}

function keyNumbers(answer) {
  const { points, run, totals } = answer;
  const evaluation = answer.evaluations[0], reward = last(points.valid);
  const best = evaluation ? Math.max(...evaluation.reward) : null;
  const seconds = last(points.seconds);
  const left = run.state === "open" && run.steps_last && seconds !== null ?
    (run.steps_last - run.steps) * seconds : null;
  return tiles([
    ["reward", show(reward), points.valid.length > 1 ? `first ${show(points.valid[0])}` : null],
    evaluation ? ["evaluation", show(last(evaluation.reward)), `best ${show(best)} at version ${
      evaluation.version[evaluation.reward.indexOf(best)]}`] : null,
    ["speed", `${show(totals.tokens_per_s)} tok/s`, `${show(totals.tokens)} sampled`],
    ["step time", seconds === null ? "–" : span(seconds), left === null ? null : `${span(left)} left`],
    ["trainer waited", percent(answer.waited_share), null, answer.waited_share > 0.5 ? "warn" : null],
    ["groups", show(totals.groups), outcomesOf(totals)],
  ]);
}

function outcomesOf(totals) {
  return Object.entries(totals.outcomes).map(([name, count]) => `${show(count)} ${name}`).join(", ");
}

function settingsOf({ run, totals }) {
  return { task: run.task, engine: run.engines.join(", "), objective: run.objective,
    batch: `${show(run.prompts_per_step)} groups of ${show(run.group_size)}`,
    "staleness bound": `${show(run.max_staleness)}${run.partial_rollout ? ", partial rollout" : ""}`,
    "records not counted": totals.not_counting, seed: run.seed, planner: run.planner,
    "dora-pipe": run.package };
}

export function stateOf(own) {
  const of = own.steps_last ? ` of ${own.steps_last}` : "";
  return `${own.state}, ${own.steps}${of} steps in ${span(own.seconds)}`;
}

export function reading(share) {
  return h("p", { class: "reading", role: "status" },
    `Reading the log: ${Math.floor(share * 100)} %. `,
    h("progress", { max: 1, value: share, "aria-label": "share of the log that was read" }));
}

// The warnings of `why`; an open log is read in pieces.
function warnings() {
  const place = h("ul", { class: "warnings" }, h("li", null, "Looking for problems."));
  const ask = () => get("health").then(({ reading: more, warnings: answer }) => {
    const rows = answer.map(([level, text, advice]) => h("li", { class: level }, text,
      advice ? h("small", null, advice) : null));
    if (!more && !rows.length) rows.push(h("li", { class: "good" }, "No problem found."));
    if (rows.length) place.replaceChildren(...rows);
    if (more) setTimeout(ask, 300);
  }).catch((error) => place.replaceChildren(h("li", { class: "warn" }, error.message)));
  ask();
  return place;
}

// The marks of the charts, as a list.
function happened(marks) {
  if (!marks.length) return null;
  const rows = [...marks].reverse().map((one) => h("li", { class: one.kind }, one.text,
    h("small", null, `${show(one.at)} s`)));
  return [h("h3", null, "Changes and stops"), h("ol", { id: "marks", class: "warnings" }, rows)];
}

export async function learningPage() {
  const answer = await get("overview"), { points, marks } = answer;
  const parts = Object.entries(answer.parts);
  return page("learning", answer, [h("div", { class: "charts" },
    rewards(answer),
    passed(answer.evaluations, marks),
    parts.length ? bySteps(answer, "Reward components", parts.map(([name, y]) => [name, y]), { floor: null,
      note: "Means of a batch's valid rewards, before their weights." }) : null,
    ...learned(answer, false),
    withoutReward(answer),
    bySteps(answer, "Response length", [["longest", "longest", { dash: "2 3" }], ["90 %", "p90"],
      ["median", "p50", { thick: true }], ["10 %", "p10", { dash: "6 3" }]].map(([name, column, look]) =>
      [name, column, { colour: WORK, ...look }]), { yLabel: "tokens" }))]);
}

export async function speedPage() {
  const answer = await get("overview"), use = answer.utilisation;
  const overTime = { xs: use.at, x: "at", xLabel: "second", time: true, marks: answer.marks };
  const spent = [["waiting", "waited", { colour: WAIT, thick: true }], ["computing", "compute",
    { colour: WORK }], ["early, on parts", "ahead", { colour: COLOURS[2] }],
  ["other", "other", { colour: "var(--soft)" }]].filter(([, column]) => answer.points[column].some(Boolean));
  return page("speed", answer, [h("div", { class: "charts" },
    ...speeds(answer, false).slice(0, 1),
    bySteps(answer, "Trainer time", spent, { yLabel: "seconds of a step",
      note: "Waiting: the trainer was free and its batch was not complete." }),
    lines({ ...overTime, title: "Sampled tokens", yLabel: "tokens/s",
      series: [{ name: "tokens per second", y: use.tokens_per_s, colour: WORK }] }),
    times(answer.times)),
  answer.waits.rows.length ? section("Trainer waits", table(answer.waits,
    { caption: "Waits of the trainer" })) : null]);
}

export async function stalenessPage() {
  const answer = await get("overview"), { points } = answer;
  return page("staleness", answer, [h("div", { class: "charts" },
    bySteps(answer, "Staleness of a batch", [["mean", "stale_mean", { colour: WORK, thick: true }],
      ["bound", "bound", { colour: "var(--wait)", dash: "6 3" }]], { yLabel: "versions",
      note: "Versions between sampling and training.",
      band: { name: "least to most", low: points.stale_low, high: points.stale_high } }),
    bars({ title: "Trained groups by staleness", parts: ["groups"], unit: "groups",
      rowsAre: "staleness", colours: [WORK], rows: Object.entries(answer.staleness).map(([name, count]) =>
        ({ name, values: [count], after: show(count) })) }),
    later("mismatch", "Importance ratio by staleness", (data) => mismatch(data)))]);
}

function mismatch({ rows, looked }) {
  const column = (name) => rows.map((row) => row[name]);
  return lines({ title: "Importance ratio by staleness", xs: column("staleness"), xLabel: "staleness",
    yLabel: "|ln ratio|, share", note: `|ln of the mean ratio| of a trajectory, in ${looked} steps.`,
    without: "The store has no contributions of these steps.",
    band: { name: "10 to 90 %", low: column("p10"), high: column("p90") },
    series: [{ name: "median", y: column("p50"), points: true, colour: WORK },
      { name: "clipped share", y: column("clipped"), points: true, colour: WAIT }] });
}

export async function workersPage() {
  const answer = await get("overview"), use = answer.utilisation;
  return page("workers", answer, [h("div", { class: "charts one" }, workers(answer.timeline, answer.marks),
    lines({ title: "Worker utilization", xs: use.at, xLabel: "second", time: true, marks: answer.marks,
      ceiling: 1, yLabel: "share of slots", format: percent,
      series: [{ name: "mean", y: use.mean, colour: WORK, thick: true }],
      band: { name: "least to most used worker", low: use.low, high: use.high } }))]);
}

function workers(data, marks) {
  const place = h("div", null);
  const draw = (window) => place.replaceChildren(timeline({
    title: "Served versions", data: window, marks,
    note: "The number is the version that a worker served. Hatched: it loaded weights. " +
      "A cross: it left or was fenced.",
  }));
  draw(data);
  const low = h("input", { type: "number", step: "any", id: "from", value: Math.floor(data.from) });
  const high = h("input", { type: "number", step: "any", id: "until", value: Math.ceil(data.until) });
  const look = async (event) => {
    event.preventDefault();
    draw((await get(`timeline?from=${low.value}&until=${high.value}`)).timeline);
  };
  const form = h("form", { class: "inline", onsubmit: look },
    h("label", { for: "from" }, "from second "), low, h("label", { for: "until" }, "to "), high,
    h("button", { type: "submit" }, "Zoom"));
  return h("div", null, place, form);
}

// A chart whose data needs records, loaded after the page.
function later(name, title, draw) {
  const place = h("div", null, empty(title, "Reading records."));
  get(name).then((answer) => place.replaceChildren(draw(answer)))
    .catch((error) => place.replaceChildren(empty(title, error.message)));
  return place;
}

// pass@k and maj@k, where a prompt has several samples.
function passed(evaluations, marks) {
  const several = (own) => Object.keys(own).filter((name) => name.startsWith("pass@")).length > 1;
  const series = evaluations.flatMap((one) => Object.entries(one.metrics)
    .filter(([name]) => several(one.metrics) && /^(pass|maj)@/.test(name))
    .map(([name, y]) => ({ name: `${one.name} ${name}`.trim(), x: one.version, y })));
  return series.length ? lines({ title: "Evaluation, pass@k", xs: [], series, marks, link: toVersion,
    xLabel: "version", yLabel: "share of prompts",
    note: "pass@k: one of k samples solves the prompt. maj@k: the most frequent answer does." }) : null;
}

function withoutReward(answer) {
  const { series, errors } = answer.invalid;
  const faults = Object.keys(FAULTS).filter((fault) => Object.keys(errors[fault]).length);
  if (!faults.length) return null;
  const total = faults.flatMap((fault) => Object.entries(errors[fault])
    .map(([name, count]) => `${show(count)} ${name}`));
  return bySteps(answer, "Invalid rewards", faults.map((fault) => [FAULTS[fault], series[fault]]),
    { note: `Trajectories of a batch. In total: ${total.join(", ")}.`, yLabel: "trajectories" });
}

function times(data) {
  return bars({ title: "Time of a trajectory, by length", unit: "seconds", rowsAre: "sampled tokens",
    afterIs: "trajectories", note: "Mean seconds from dispatch to commit, by sampled tokens.",
    parts: data.phases.map((one) => PHASES[one] || one),
    rows: data.rows.map((row) => ({ name: bucket(row), values: row.seconds, after: `n ${show(row.n)}` })) });
}

// The page of a server of several runs.
export function runsPage(rows) {
  const order = (row) => (row.state === "open" ? 0 : row.state === "finished" ? 1 : 2);
  const listed = [...rows].sort((a, b) => order(a) - order(b) || (a.run < b.run ? -1 : 1));
  const link = (row) => (row.steps === undefined ? row.run :
    h("a", { href: `/run/${encodeURIComponent(row.run)}/` }, row.run));
  return { title: "Runs", body: [h("h1", { tabindex: -1 }, "Runs"), table({
    columns: ["run", "state", "steps", "of", "reward", "task"],
    rows: listed.map((row) => [link(row), row.state, row.steps ?? null, row.of ?? null,
      row.reward ?? null, row.task ?? null]) },
  { caption: "Runs", none: "No run in this directory." })] };
}
