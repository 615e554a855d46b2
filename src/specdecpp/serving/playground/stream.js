// A request and its chunks. Whatever goes wrong is a Problem with the server's own words.

class Problem extends Error {
  /** `field` is the part of the request that it is about, where the server says so. */
  constructor(message, { status = 0, field = null } = {}) {
    super(message);
    this.status = status;
    this.field = field;
  }
}

const UNREACHABLE = "The server cannot be reached. See whether it still runs, then try again.";
const CUT_OFF = "The answer broke off: the server went away in the middle of it. See whether it still runs, then try again.";

/** Sends a request, or reads where there is no body. Rejects with a Problem unless the server agrees. */
async function ask(path, { body, key, signal } = {}) {
  const headers = { ...(body && { "Content-Type": "application/json" }), ...(key && { Authorization: `Bearer ${key}` }) };
  let reply;
  try {
    reply = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
  } catch (error) {
    throw signal?.aborted ? error : new Problem(UNREACHABLE);
  }
  if (!reply.ok) throw await problemOf(reply);
  return reply;
}

async function problemOf(reply) {
  const told = await reply.json().catch(() => null);
  const { message = `The server answered ${reply.status} ${reply.statusText}.`, param = null } = told?.error ?? {};
  const wait = reply.headers.get("Retry-After");
  return new Problem(wait ? `${message} (in ${wait} s)` : message, { status: reply.status, field: param });
}

/** The chunks of a streamed answer. Leaving the loop, or the signal, ends the request. */
async function* chunksOf(path, { body, key, signal }) {
  const reply = await ask(path, { body: { ...body, stream: true }, key, signal });
  for await (const data of eventsOf(reply.body, signal)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Problem(chunk.error.message, { field: chunk.error.param });
    yield chunk;
  }
  throw new Problem(CUT_OFF);
}

/** The data of server-sent events, one line each, as this server sends them. */
async function* eventsOf(body, signal) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) if (event.startsWith("data: ")) yield event.slice(6);
    }
  } catch (error) {
    throw signal.aborted ? error : new Problem(CUT_OFF);
  } finally {
    reader.cancel().catch(() => {});
  }
}
