// Answers of two policies side by side, step by step as the server streams them.

const PATHS = { chat: "v1/chat/completions", text: "v1/completions" };
const FIELDS = { messages: "prompt", max_completion_tokens: "max_tokens" };
const ENDS = { stop: "the text ended", length: "max tokens reached", stopped: "stopped" };
const CUT_OFF = "The answer broke off: the server went away. See whether it still runs, then try again.";

const at = (id) => document.getElementById(id);

/** An error in the server's own words; `field` is the part of the request that it is about. */
class Problem extends Error {
  constructor(message, { status = 0, field = null } = {}) {
    super(message);
    Object.assign(this, { status, field });
  }
}

/** Sends a request, or reads where there is no body. Rejects with a Problem unless the server agrees. */
async function ask(path, { body, signal } = {}) {
  const key = at("key").value;
  const headers = { ...(body && { "Content-Type": "application/json" }), ...(key && { Authorization: `Bearer ${key}` }) };
  const reply = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
  if (reply.ok) return reply;
  const { error } = await reply.json().catch(() => ({}));
  const message = error?.message ?? `The server answered ${reply.status} ${reply.statusText}.`;
  throw new Problem(message, { status: reply.status, field: error?.param });
}

/** The chunks of a streamed answer. */
async function* chunksOf(path, { body, signal }) {
  const reply = await ask(path, { body: { ...body, stream: true }, signal });
  let rest = "";
  for await (const text of reply.body.pipeThrough(new TextDecoderStream())) {
    const events = (rest + text).split("\n\n");
    rest = events.pop();
    for (const data of events.map((event) => event.slice("data: ".length))) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Problem(chunk.error.message, { field: chunk.error.param });
      yield chunk;
    }
  }
  throw new Problem(CUT_OFF);
}

/** One policy and its answer. */
class Lane {
  constructor(policy) {
    this.root = at("lane").content.firstElementChild.cloneNode(true);
    for (const name of ["policy", "problem", "answer", "steps"]) this[name] = this.root.querySelector(`.${name}`);
    this.policy.value = policy;
    this.clear();
  }

  clear() {
    Object.assign(this, { numTokens: 0, numSteps: 0, drafted: 0, accepted: 0, seconds: 0, end: null });
    this.problem.hidden = true;
    this.answer.replaceChildren();
    this.steps.replaceChildren();
    this.write({});
  }

  /** Shows the answer of one request, until it ends. */
  async run(path, { body, signal }) {
    const policy = this.policy.value.trim();
    const speculative = { details: true, ...(policy && { policy }) };
    for await (const chunk of chunksOf(path, { body: { ...body, speculative }, signal })) {
      if (chunk.choices.length) this.add(chunk.speculative.step, chunk.choices[0].finish_reason);
    }
  }

  add(step, end) {
    this.end = end ?? this.end;
    this.numTokens += step.pieces.length;
    this.numSteps += 1;
    this.drafted += step.num_drafted;
    this.accepted += step.num_accepted;
    this.seconds += Object.values(step.times).reduce((sum, part) => sum + part, 0);
    this.answer.append(...step.pieces.map((piece) => tokenSpan(piece, step)));
    this.steps.append(bar(step));
    this.steps.scrollLeft = this.steps.scrollWidth;
    this.write({
      rate: (this.numTokens / this.seconds).toFixed(1),
      length: (1 + this.accepted / this.numSteps).toFixed(2),
      accepted: this.drafted ? `${((100 * this.accepted) / this.drafted).toFixed(0)} %` : "",
      tokens: `${this.numTokens} in ${this.numSteps}`,
    });
  }

  write(figures) {
    for (const place of this.root.querySelectorAll("[data-figure]")) place.textContent = figures[place.dataset.figure] ?? "";
  }
}

/** A token of the answer, with its p, q and estimate; a correction shows the draft token that was rejected. */
function tokenSpan(piece, step) {
  const span = document.createElement("span");
  const rejected = piece.outcome === "correction" ? step.draft_tokens[step.num_accepted] : null;
  const { p, q, estimate } = rejected ?? piece;
  const figures = Object.entries({ p, q, estimate }).filter(([, value]) => value !== null);
  span.className = piece.outcome;
  span.textContent = piece.text;
  span.title = [rejected ? `${rejected.text} was rejected:` : piece.outcome, ...figures.map(([name, value]) => `${name} ${value.toPrecision(3)}`)].join(" ");
  if (rejected) span.dataset.rejected = rejected.text;
  return span;
}

/** A bar for a step: outlined as far as was drafted, filled as far as was accepted. */
function bar(step) {
  const made = document.createElement("i");
  made.title = `${step.num_drafted} drafted, ${step.num_accepted} accepted; drafting stopped: ${step.stop_reason}`;
  made.style.setProperty("--drafted", step.num_drafted);
  made.style.setProperty("--accepted", step.num_accepted);
  return made;
}

const lanes = [new Lane(""), new Lane("none")];
let running = null;

/** The request of the form; numbers that are missing are left to the server. */
function requestBody() {
  const text = at("prompt").value;
  const body = at("kind").value === "chat" ? { messages: [{ role: "user", content: text }] } : { prompt: text };
  for (const name of ["max_tokens", "temperature", "top_p", "seed"]) if (at(name).value) body[name] = at(name).valueAsNumber;
  return body;
}

async function generate() {
  running = new AbortController();
  const request = { body: requestBody(), signal: running.signal };
  lanes.forEach((lane) => lane.clear());
  at("problem").hidden = true;
  document.querySelectorAll("[aria-invalid]").forEach((field) => field.removeAttribute("aria-invalid"));
  at("run").textContent = "Stop";
  at("status").textContent = "Generating.";
  const path = PATHS[at("kind").value];
  await Promise.all(lanes.map((lane) => lane.run(path, request).catch((error) => failed(lane, error))));
  running = null;
  at("run").textContent = "Generate";
  at("status").textContent = lanes.map((lane) => (lane.end ? ENDS[lane.end] : "failed")).join("; ");
}

/** Shows what went wrong where it belongs: at the form when a field of it is to blame, otherwise in the lane. */
function failed(lane, error) {
  if (error.name === "AbortError") return (lane.end = "stopped");
  const field = error.status === 401 ? askForKey() : at(FIELDS[error.field] ?? error.field);
  field?.setAttribute("aria-invalid", true);
  const place = field ? at("problem") : lane.problem;
  place.textContent = error instanceof Problem ? error.message : CUT_OFF;
  place.hidden = false;
}

function askForKey() {
  at("key").closest("label").hidden = false;
  return at("key");
}

/** Shows which model is served, or asks for the server's key. */
async function greet() {
  try {
    const { data } = await (await ask("v1/models")).json();
    at("model").textContent = `${data[0].id}, a context of ${data[0].max_model_len ?? "unlimited"} tokens`;
  } catch (error) {
    if (error.status === 401) askForKey();
    else at("model").textContent = error.message;
  }
}

at("lanes").append(...lanes.map((lane) => lane.root));
at("key").addEventListener("change", greet);
at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  running ? running.abort() : generate();
});
greet();
