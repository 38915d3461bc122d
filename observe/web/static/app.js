// Goes from address to page, follows a run that goes on, and keeps the place of who reads.

import { embedded, get } from "./data.js";
import { addressOf, h, newPage } from "./dom.js";
import { listPage } from "./lists.js";
import { overviewPage, stateOf } from "./overview.js";
import { groupPage, stepPage, trajectoryPage, versionPage } from "./pages.js";

const FOLLOW_MS = 2000, READING_MS = 400;
const PAGES = ["overview", "steps", "groups", "trajectories", "decisions"];
const main = document.getElementById("main");
const news = document.getElementById("news");
let run = null, shown = "", turn = 0, follow = true;

function place() {
  const [path, fields = ""] = (location.hash.slice(1) || "/overview").split("?");
  const [, page = "overview", id = ""] = path.split("/");
  return { page, id: decodeURIComponent(id), fields };
}

async function drawn({ page, id, fields }) {
  switch (page) {
    case "overview": return overviewPage();
    case "step": return stepPage(id);
    case "group": return groupPage(id);
    case "version": return versionPage(id);
    case "trajectory": return trajectoryPage(id, fields);
    default:
      if (PAGES.includes(page)) return listPage(page, fields);
      throw new Error(`there is no page ${page}`);
  }
}

// Draw the page at the address. `again` is the same page with newer figures: who reads stays there.
async function draw(again = false) {
  const own = ++turn, at = place();
  main.setAttribute("aria-busy", "true");
  newPage();
  let found;
  try {
    found = await drawn(at);
  } catch (error) {
    found = { title: "Not there", body: [h("h1", { tabindex: -1 }, "Not there"),
      h("p", { id: "problem" }, error.message)] };
  }
  if (own !== turn) return;
  const kept = again ? keep() : null;
  main.replaceChildren(...[found.body].flat(4).filter(Boolean));
  main.removeAttribute("aria-busy");
  document.title = `${found.title} – dora-pipe`;
  head(at);
  if (kept) restore(kept);
  else if (shown) main.querySelector("h1")?.focus();
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
  const item = (name) => h("li", null,
    h("a", { href: `#/${name}`, "aria-current": name === page ? "page" : null }, name));
  document.getElementById("head").replaceChildren(
    h("div", { class: "brand" }, h("a", { href: "#/overview" }, "dora-pipe")),
    h("nav", { "aria-label": "pages" }, h("ul", null, PAGES.map(item))),
    goTo(), embedded ? h("p", { class: "note" }, "a file, not a live page") : live());
}

function goTo() {
  const input = h("input", { id: "goto", type: "search", size: 16, placeholder: "step or id",
    maxlength: 40 });
  const go = (event) => {
    event.preventDefault();
    const text = input.value.trim();
    location.hash = addressOf(text) || `#/trajectories?q=${encodeURIComponent(text)}`;
  };
  return h("form", { class: "goto", role: "search", "aria-label": "go to", onsubmit: go },
    h("label", { for: "goto" }, "go to "), input);
}

function live() {
  const box = h("input", { type: "checkbox", id: "follow", checked: follow,
    onchange: () => { follow = box.checked; } });
  return h("label", { class: "follow", for: "follow" }, box, " follow");
}

// Look now and then whether the log has grown; only then is the page drawn again.
async function watch() {
  let wait = FOLLOW_MS;
  try {
    const found = await get("run");
    const changed = found.revision !== run.revision || found.read !== run.read;
    run = found;
    if (found.read < 1) wait = READING_MS;
    if (changed && follow && !writing()) {
      await draw(true);
      news.textContent = `${found.name}: ${stateOf(found)}`;
    }
    document.body.classList.remove("lost");
  } catch {
    document.body.classList.add("lost");
    news.textContent = "the server does not answer";
  }
  setTimeout(watch, wait);
}

// Whether somebody is in the middle of filling in a form, or on a page that is not about the run.
function writing() {
  const active = document.activeElement;
  const form = active && main.contains(active) && active.closest("form");
  return Boolean(form) || !["overview", "steps", "decisions"].includes(place().page);
}

async function begin() {
  run = await get("run");
  window.addEventListener("hashchange", () => draw());
  await draw();
  document.documentElement.dataset.ready = "yes";
  if (!embedded) setTimeout(watch, run.read < 1 ? READING_MS : FOLLOW_MS);
}

begin();
