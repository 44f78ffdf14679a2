// Requests to the server: JSON in, server-sent events out. Every failure is an Error with one line for a person.

/** The model that is served: its name as `id`, and whether it takes part in a `chat`. */
export async function servedModel(key) {
  const response = await fetch("v1/models", { headers: authorization(key) }).catch(broken);
  if (!response.ok) throw await failure(response);
  return (await response.json()).data[0];
}

/** The draft pools that the server's targets know. */
export async function knownPools(key) {
  const response = await fetch("v1/drafts", { headers: authorization(key) }).catch(broken);
  if (!response.ok) throw await failure(response);
  return (await response.json()).data;
}

/** The chunks of an answer, as they come. Ends with `[DONE]`; throws where the server reports an error. */
export async function* chunks(path, body, key, signal) {
  const response = await fetch(path, {
    method: "POST",
    headers: { "Content-Type": "application/json", ...authorization(key) },
    body: JSON.stringify(body),
    signal,
  }).catch(broken);
  if (!response.ok) throw await failure(response);
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(line(chunk.error.message));
    yield chunk;
  }
  throw new Error("The connection ended before the answer did.");
}

/** The data of each server-sent event of a body of bytes, however these are cut into pieces. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  let data = [];
  for (;;) {
    const { value, done } = await reader.read().catch(broken);
    if (done) return; // an event without its empty line is not one
    buffer += value;
    // A carriage return at the very end may yet be half of a line's end.
    for (let end; (end = /\r\n|\n|\r(?=[^])/.exec(buffer)); ) {
      const text = buffer.slice(0, end.index);
      buffer = buffer.slice(end.index + end[0].length);
      if (text.startsWith("data:")) data.push(text.slice(5).replace(/^ /, ""));
      if (text === "" && data.length) {
        yield data.join("\n");
        data = [];
      }
    }
  }
}

/** A connection's failure, but not that of a request that was stopped. */
function broken(error) {
  throw error.name === "AbortError" ? error : new Error("The server cannot be reached.");
}

function authorization(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function failure(response) {
  const body = await response.json().catch(() => null);
  const message = body?.error?.message ?? response.statusText;
  return new Error(line(`${response.status}: ${message || "no reason was given"}`));
}

function line(text) {
  return String(text).replace(/\s+/g, " ").trim();
}
