// Data of the pages, from the server.

export async function get(path) {
  const answer = await fetch(`api/${path}`, { headers: { Accept: "application/json" } });
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.hint ? `${found.error} (${found.hint})` : found.error);
  return found;
}
