// Routes addresses to pages and follows an open run.

import { get } from "./data.js";
import { addressOf, h, newPage } from "./dom.js";
import { listPage } from "./lists.js";
import { groupPage, stepPage, trajectoryPage, versionPage } from "./pages.js";
import { learningPage, overviewPage, runsPage, speedPage, stalenessPage, stateOf,
  workersPage } from "./run.js";

const FOLLOW_MS = 2000, READING_MS = 400;
const TABS = { overview: overviewPage, learning: learningPage, speed: speedPage,
  staleness: stalenessPage, workers: workersPage };
const LISTED = ["steps", "groups", "trajectories", "decisions"];
const ONE = { step: stepPage, group: groupPage, version: versionPage, trajectory: trajectoryPage };
const LABELS = { decisions: "log" };
const WITHIN = { step: "steps", group: "groups", trajectory: "trajectories" };
const main = document.getElementById("main");
const news = document.getElementById("news");
let run = null, shown = "", turn = 0, follow = true;

function place() {
  const [path, fields = ""] = (location.hash.slice(1) || "/overview").split("?");
  const [, page = "overview", id = ""] = path.split("/");
  return { page, id: decodeURIComponent(id), fields };
}

async function drawn({ page, id, fields }) {
  if (run.runs) return runsPage(run.runs);
  if (Object.hasOwn(TABS, page)) return TABS[page]();
  if (Object.hasOwn(ONE, page)) return ONE[page](id, fields);
  if (LISTED.includes(page)) return listPage(page, fields);
  throw new Error(`no page ${page}`);
}

// Draw the page at the address. `again` redraws it with newer data and keeps the reader's place.
async function draw(again = false) {
  const own = ++turn, at = place();
  main.setAttribute("aria-busy", "true");
  newPage();
  let page;
  try {
    page = await drawn(at);
  } catch (error) {
    page = { title: "Not found", body: [h("h1", { tabindex: -1 }, "Not found"),
      h("p", { id: "problem" }, error.message)] };
  }
  if (own !== turn) return;
  const kept = again ? keep() : null;
  main.replaceChildren(...[page.body].flat(4).filter(Boolean));
  main.removeAttribute("aria-busy");
  document.title = `${page.title} – dora-pipe`;
  head(at);
  if (kept) restore(kept);
  else if (shown) {
    window.scrollTo(0, 0);
    main.querySelector("h1")?.focus();
  }
  shown = location.hash || "#/";
}

function keep() {
  const open = [...main.querySelectorAll("details[open][data-key]")].map((one) => one.dataset.key);
  return { open, id: document.activeElement?.id, y: window.scrollY };
}

function restore({ open, id, y }) {
  for (const one of main.querySelectorAll("details[data-key]")) one.open = open.includes(one.dataset.key);
  if (id) document.getElementById(id)?.focus();
  window.scrollTo(0, y);
}

function head({ page }) {
  const brand = h("a", { class: "brand", href: location.pathname.startsWith("/run/") ? "/" : "#/overview" },
    "dora-pipe");
  if (run.runs) {
    document.getElementById("head").replaceChildren(brand);
    return;
  }
  const item = (name) => h("li", null, h("a", { href: `#/${name}`,
    "aria-current": name === (WITHIN[page] || page) ? "page" : null }, LABELS[name] || name));
  document.getElementById("head").replaceChildren(brand,
    h("a", { class: "name", href: "#/overview" }, run.name),
    h("nav", { "aria-label": "pages" }, h("ul", null, [...Object.keys(TABS), ...LISTED].map(item))),
    goTo(), run.state === "open" ? live() : "");
}

function goTo() {
  const input = h("input", { id: "goto", type: "search", size: 14, placeholder: "step or id",
    maxlength: 40 });
  const go = (event) => {
    event.preventDefault();
    const text = input.value.trim();
    location.hash = addressOf(text) || `#/trajectories?q=${encodeURIComponent(text)}`;
  };
  return h("form", { class: "goto", role: "search", "aria-label": "go to", onsubmit: go },
    h("label", { for: "goto", class: "unseen" }, "go to "), input);
}

function live() {
  const box = h("input", { type: "checkbox", id: "follow", checked: follow,
    onchange: () => { follow = box.checked; } });
  return h("label", { class: "follow", for: "follow" }, box, " follow");
}

// Ask whether the log has grown, and redraw only then.
async function watch() {
  let wait = FOLLOW_MS;
  try {
    const fresh = await get("run");
    const changed = fresh.revision !== run.revision || fresh.read !== run.read;
    run = fresh;
    if (fresh.read < 1) wait = READING_MS;
    if (changed && follow && !busy()) {
      await draw(true);
      news.textContent = `${fresh.name}: ${stateOf(fresh)}`;
    }
    document.body.classList.remove("lost");
  } catch {
    document.body.classList.add("lost");
    news.textContent = "the server does not answer";
  }
  setTimeout(watch, wait);
}

// Whether a form is being filled in, or the page is about the past.
function busy() {
  const active = document.activeElement;
  const form = active && main.contains(active) && active.closest("form");
  return Boolean(form) || ![...Object.keys(TABS), "steps", "decisions"].includes(place().page);
}

async function begin() {
  run = await get("run");
  window.addEventListener("hashchange", () => draw());
  await draw();
  document.documentElement.dataset.ready = "yes";
  if (!run.runs) setTimeout(watch, run.read < 1 ? READING_MS : FOLLOW_MS);
}

begin();
