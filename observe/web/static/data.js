// Data of the pages: from the server, or embedded in the exported file.

const element = document.getElementById("data");
export const embedded = element ? JSON.parse(element.textContent) : null;

export async function get(path) {
  if (embedded) return fromFile(path);
  const answer = await fetch(`api/${path}`, { headers: { Accept: "application/json" } });
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.hint ? `${found.error} (${found.hint})` : found.error);
  return found;
}

// Whether the page at an address such as #/step/7 exists; a file contains a sample.
export function has(address) {
  if (!embedded) return true;
  const [, page, id] = address.split("?")[0].split("/");
  return id === undefined || `${page}/${decodeURIComponent(id)}` in embedded.pages;
}

const LISTS = new Set(["steps", "groups", "trajectories", "decisions"]);

function fromFile(path) {
  const [place, query] = path.split("?");
  const name = place.split("/")[0];
  const found = embedded.pages[decodeURIComponent(place)];
  if (found === undefined) {
    throw new Error("this page is not in the file, which contains a sample; `dora-pipe ui` has all");
  }
  return LISTS.has(name) ? filtered(found, new URLSearchParams(query || "")) : found;
}

// The filters of the server, on the rows of the file.
export function filtered(list, asked) {
  const at = Object.fromEntries(list.columns.map((name, place) => [name, place]));
  const tests = [];
  for (const [key, value] of asked) {
    const text = value.trim();
    if (text === "") continue;
    const [, column, bound] = /^(.*?)(_min|_max)?$/.exec(key);
    if (key in at) {
      const wanted = list.numbers.includes(key) ? Number(text) : text;
      tests.push((row) => row[at[key]] === wanted);
    } else if (bound && column in at) {
      const sign = bound === "_min" ? 1 : -1;
      tests.push((row) => row[at[column]] !== null && sign * (row[at[column]] - Number(text)) >= 0);
    } else if (key === "valid") tests.push((row) => (row[at.reward] !== null) === (text === "yes"));
    else if (key === "purpose") tests.push((row) => row[0][0] === (text === "eval" ? "e" : "g"));
    else if (key === "q") tests.push((row) => sought(row, at, text.toLowerCase()));
  }
  let rows = list.rows.filter((row) => tests.every((test) => test(row)));
  const order = asked.get("sort");
  if (order) rows = sorted(rows, at[order.replace("-", "")], order.startsWith("-") ? -1 : 1);
  const offset = Number(asked.get("offset") || 0);
  const limit = Number(asked.get("limit") || 50);
  return { ...list, total: rows.length, offset, rows: rows.slice(offset, offset + limit) };
}

function sought(row, at, text) {
  if ("reason" in at) {
    return [row[at.subject], row[at.reason]].some((one) => one.toLowerCase().includes(text));
  }
  return String(row[0]).includes(text);
}

function sorted(rows, place, sign) {
  const some = rows.filter((row) => row[place] !== null);
  some.sort((a, b) => sign * (a[place] < b[place] ? -1 : a[place] > b[place] ? 1 : 0));
  return [...some, ...rows.filter((row) => row[place] === null)];
}
