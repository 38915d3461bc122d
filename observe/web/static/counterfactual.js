// What else could have been: rewards that were asked again, where two runs part, what came of steps
// that were trained again, what made a run bad, and what every turn of an episode was worth.

import { lines } from "./charts.js";
import { get, has } from "./data.js";
import { facts, h, show, table } from "./dom.js";

const AGAIN_MS = 1000;

// What there is of it, on a run's first page; nothing where there is nothing.
export async function whatElse(run) {
  const found = await get(`${run}/counterfactual`);
  const rescored = found.rescored?.rows.length, forks = found.forks?.rows.length;
  const bisects = found.bisects?.rows.length;
  if (!rescored && !forks && !bisects && !found.others.length && !found.problems.length) return [];
  return [
    h("h2", null, "What else could have been"),
    rescored ? table(run, found.rescored, { caption: "Other rewards of its texts", has }) : null,
    forks ? table(run, found.forks, { caption: "Trajectories that were continued from their turns",
      has }) : null,
    bisects ? table(run, found.bisects, { caption: "What made it worse", has }) : null,
    links(run, "retrained", "Trained again, beside what it was trained on: ", found.retrained),
    links(run, "diff", "Where it parts from another run: ", found.others),
    found.problems.map((one) => h("p", { class: "note" }, one)),
  ];
}

function links(run, page, words, names) {
  return names.length ? h("p", { id: `${page}s` }, words, names.map((name, at) => {
    const address = `#/${run}/${page}/${encodeURIComponent(name)}`;
    return [at ? ", " : "", has(address) ? h("a", { href: address }, name) : name];
  })) : null;
}

export async function rescoredPage(run, id) {
  const found = await get(`${run}/rescored/${id}`);
  const { steps, evaluations, changed, examples } = found;
  const cut = changed.of > changed.rows.length ? `, the first ${show(changed.rows.length)}` : "";
  return {
    title: `Rescored by ${found.reward}`,
    body: [
      h("h1", { tabindex: -1 }, `Another reward: ${found.reward}`),
      h("p", { class: "note" }, "Where this reward would have mattered, not what would have come of " +
        "it: other fates would have made other batches, and other weights other texts."),
      facts(found.facts, run, has),
      h("div", { class: "charts" },
        lines({ title: "Reward, then and now", marks: found.marks, note: "Means of each step's trajectories.",
          xs: steps.at, series: bothOf(steps, ""), xLabel: "step", yLabel: "reward", floor: null }),
        lines({ title: "What would have been otherwise", marks: found.marks, xs: steps.at, series: [
          { name: "advantages with another sign", y: steps.signs },
          { name: "groups with another fate", y: steps.fates }], xLabel: "step", yLabel: "count" }),
        evaluations.length ? lines({ title: "Evaluations, then and now", marks: found.marks, xs: [], xLabel: "version",
          yLabel: "reward", series: evaluations.flatMap((one) =>
            bothOf(one, one.name).map((series) => ({ ...series, x: one.at, points: true }))),
        }) : null),
      h("h2", null, "Groups with another fate"),
      table(run, found.moves, { caption: "How many" }),
      changed.rows.length ? h("details", { "data-key": "changed" }, h("summary", null, "Which ones"),
        table(run, changed, { caption: `By step${cut}`, has })) : null,
      h("h2", null, "Answers about which the two differ most"),
      found.redacted ? h("p", { class: "note" }, "Texts are hidden (--redact).") : null,
      table(run, examples, { caption: "Examples", has }),
    ],
  };
}

function bothOf({ old, new: now }, name) {
  return [{ name: `${name} then`.trim(), y: old }, { name: `${name} now`.trim(), y: now, thick: true }];
}

export async function diffPage(run, id) {
  const found = await get(`${run}/diff/${encodeURIComponent(id)}`);
  const title = `Where it parts from ${id}`;
  if (found.comparing) return waiting(run, id, found, title);
  const [own, other] = found.names;
  const [here, there] = found.runs;
  const chart = (what, column, yLabel) => lines({ title: what, marks: found.marks, xs: [], xLabel: "step", yLabel,
    floor: column === "reward" ? null : 0,
    series: [{ name: own, x: here.step, y: here[column], thick: true },
      { name: other, x: there.step, y: there[column] }] });
  return {
    title,
    body: [
      h("h1", { tabindex: -1 }, title),
      facts(found.words),
      found.trajectory ? h("p", { id: "first" }, "The first that differs here: ",
        h("a", { href: `#/${run}/trajectory/${found.trajectory}` }, found.trajectory)) : null,
      found.config.rows.length ? table(run, found.config, { caption: "Keys that differ" }) : null,
      found.made_of.rows.length ? table(run, found.made_of, { caption: "Made of something else" }) :
        null,
      h("div", { class: "charts" }, chart("Reward", "reward", "reward"),
        chart("Seconds of a step", "seconds", "seconds"),
        chart("Staleness", "staleness", "mean staleness"), evaluationsOf(found)),
      found.damaged.map((one) => h("p", { class: "note" }, one)),
    ],
  };
}

// Between which versions a probe's value fell, which groups stand out, and trials without them.
export async function bisectPage(run, id) {
  const found = await get(`${run}/bisect/${id}`);
  const { versions, suspects, trials } = found;
  const column = (name) => versions.rows.map((row) => row[versions.columns.indexOf(name)]);
  return {
    title: `What made it worse: ${found.probe}`,
    body: [
      h("h1", { tabindex: -1 }, `What made it worse: ${found.probe}`),
      facts(found.facts, run, has),
      found.conclusion.length ? h("div", { id: "conclusion" },
        found.conclusion.map((one) => h("p", null, one))) :
        h("p", { class: "note" }, "The command has not come to its end yet."),
      h("div", { class: "charts" },
        lines({ title: "Value by version", marks: found.marks, note: "Means of the probe's draws, each of the same row " +
          "and seed for every version.", xs: column("version"), floor: null, xLabel: "version",
          yLabel: "value", band: { name: "95 %", low: column("low"), high: column("high") },
          series: [{ name: "value", y: column("value"), points: true, thick: true }],
          without: "No version was asked yet." }),
        trials.rows.length ? trialsOf(trials) : null),
      h("h2", null, "Versions"), table(run, versions, { caption: "Versions that were asked", has }),
      suspects.rows.length ? [h("h2", null, "Suspects"), h("p", { class: "note" },
        "Standing out only decides the order: what a group did, a trial says."),
      table(run, suspects, { caption: "Groups that stand out", has, headers: whose })] : null,
      trials.rows.length ? [h("h2", null, "Trials"),
        table(run, trials, { caption: "Steps that were trained again without groups", has })] : null,
    ],
  };
}

function trialsOf({ columns, rows }) {
  const column = (name) => rows.map((row) => row[columns.indexOf(name)]);
  return lines({ title: "Value of every trial", note: "In the order in which they were made.",
    xs: rows.map((_, at) => at + 1), floor: null, xLabel: "trial", yLabel: "value",
    band: { name: "95 %", low: column("low"), high: column("high") },
    series: [{ name: "value", y: column("value"), points: true, thick: true }] });
}

// A run that was trained again, every step beside that of its source.
export async function retrainedPage(run, id) {
  const found = await get(`${run}/retrained/${encodeURIComponent(id)}`);
  const title = `Trained again: ${id}`;
  if (found.comparing) return waiting(run, id, found, title);
  const { curves, settings, without, weights } = found;
  const chart = (name, what, note) => (curves[name].flat().some((one) => one !== null) ?
    lines({ title: what, note, marks: found.marks, xs: curves.step, floor: null, xLabel: "step", yLabel: name.replace("_", " "),
      series: [{ name: found.run, y: curves[name][0], thick: true, points: true },
        { name: found.source, y: curves[name][1], points: true }] }) : null);
  return {
    title: `${found.run}, trained again`,
    body: [
      h("h1", { tabindex: -1 }, `${found.run}: steps of ${found.source} trained again`),
      h("p", { class: "note" }, "What was sampled stays as it was. Losses of different objectives " +
        "are not to be compared."),
      facts(found.facts),
      settings.rows.length ? table(run, settings, { caption: "Settings that are otherwise" }) : null,
      without.rows.length ? folded("without", `Rows that are left out (${show(without.of)})`,
        table(run, named(without), { caption: "Left out", has, headers: whose })) : null,
      weights.rows.length ? folded("weights", `Trajectories with a weight (${show(weights.of)})`,
        table(run, weights, { caption: "Weights", has })) : null,
      h("div", { class: "charts" },
        chart("reward", "Reward", "Means of what counts of each batch."), chart("loss", "Loss"),
        chart("grad_norm", "Norm of the gradient"),
        chart("ratio_mean", "Mean ratio", "How far the weights have gone from who sampled.")),
      h("h2", null, "Step by step"),
      table(run, found.steps, { caption: `${found.run} beside ${found.source}`, has }),
    ],
  };
}

// Names of groups and of trajectories, each with the page that it has.
function named({ columns, rows }) {
  return { columns: columns.map(() => "subject"), rows };
}

function whose(column) {
  return column === "subject" ? "group or trajectory" : column;
}

function folded(key, words, ...inside) {
  return h("details", { "data-key": key }, h("summary", null, words), ...inside);
}

function evaluationsOf({ names, runs, marks }) {
  const series = runs.flatMap((one, at) => Object.entries(one.evaluations).map(([name, own]) => ({
    name: `${names[at]} ${name}`.trim(), x: own.version, y: own.reward, points: true, thick: !at })));
  return series.length ? lines({ title: "Evaluations", marks, xs: [], series, xLabel: "version",
    yLabel: "reward" }) : null;
}

// Both logs are being read: asked again until they were, unless the reader has gone on.
function waiting(run, id, found, title) {
  const address = location.hash;
  setTimeout(() => {
    if (location.hash === address) window.dispatchEvent(new HashChangeEvent("hashchange"));
  }, AGAIN_MS);
  return { title, body: [h("h1", { tabindex: -1 }, title),
    h("p", { role: "status", class: "reading" },
      `Both logs are being read: ${show(found.read)} trajectories so far.`)] };
}

// What each turn was worth, under every version that a trajectory was continued by.
export function turnsOf(run, values) {
  if (!values.length) return null;
  return [h("h2", null, "What each turn was worth"), values.map((one) => {
    const column = (name) => one.rows.map((row) => row[one.columns.indexOf(name)]);
    const turns = column("turn"), within = new Set(turns).size < turns.length;
    const xs = within ? [...column("from token"), one.length] : [...turns, Math.max(...turns) + 1];
    const note = `Mean reward of continuations from the beginning of each turn under version ${
      one.version}; the last point is what it was given. It was sampled by version ${one.sampled_by}.`;
    return h("div", { class: "charts" },
      lines({ title: decidedBy(one.decided), note, xs, yLabel: "value",
        xLabel: within ? "tokens before it" : "turn",
        band: { name: "95 %", low: [...column("low"), one.reward], high: [...column("high"), one.reward] },
        series: [{ name: "value", y: [...column("value"), one.reward], points: true, thick: true }] }),
      table(run, one, { caption: `Turns under version ${one.version}` }));
  })];
}

function decidedBy(decided) {
  return decided ? `Turn ${decided.turn} decided it: ${show(decided.before)} to ${show(decided.after)}` :
    "No turn stands out";
}
