// Data of the pages, from the server.

export async function get(path) {
  const answer = await fetch(`api/${path}`, { headers: { Accept: "application/json" } });
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.hint ? `${body.error} (${body.hint})` : body.error);
  return body;
}
