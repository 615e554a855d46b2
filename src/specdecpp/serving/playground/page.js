// The form, the runs, the theme and the key.

const EXAMPLES = {
  "a word problem": "Ann has 3 bags of 12 apples and buys 5 more each day. How many apples does she have after 4 days?\nLet's think step by step.",
  "a function": 'Write a Python script for this problem:\n\ndef count_words(text, limit=3):\n    """Return how often each word occurs in text, at most limit of them."""',
  "tips": "Give three tips for better sleep.",
  "a question": "Why is the sky blue?",
};
const PATHS = { chat: "v1/chat/completions", text: "v1/completions" };
const FIELDS = { messages: "prompt", max_completion_tokens: "max_tokens" };
const THEME = "specdecpp-theme";

const at = (id) => document.getElementById(id);
const lanes = [new Lane("First rule", ""), new Lane("Second rule", "none")];
let running = null;
let measured = null;
let isPainting = false;

const shown = () => (at("compare").checked ? lanes : lanes.slice(0, 1));

/** The target alone in tokens per second: measured beside an answer, before it, or by what a token of it costs. */
function baselineOf(lane) {
  const beside = shown().find((other) => other.isTargetAlone && other.tally.seconds);
  if (beside === lane) return { rate: lane.tally.tokensPerSecond, name: "over itself" };
  if (beside) return { rate: beside.tally.tokensPerSecond, name: "over the target alone, as measured beside it" };
  if (measured) return { rate: measured, name: "over the target alone, as measured before" };
  const cost = lane.setting?.costs?.target_s;
  return cost ? { rate: 1 / cost, name: `over the target alone, which costs ${(1000 * cost).toFixed(2)} ms a token as the server has measured it` } : null;
}

function paint() {
  isPainting = false;
  for (const lane of shown()) lane.paint(baselineOf(lane));
  place();
}

function paintSoon() {
  if (!isPainting) requestAnimationFrame(paint);
  isPainting = true;
}

/** The request of the form; numbers that are missing are left to the server. */
function requestOf(signal) {
  const text = at("prompt").value;
  const body = at("kind").value === "chat" ? { messages: [{ role: "user", content: text }] } : { prompt: text };
  if (!at("seed").value) at("seed").value = Math.floor(Math.random() * 1e6); // both answers have the same one
  for (const name of ["max_tokens", "temperature", "top_p", "seed"]) if (at(name).value) body[name] = at(name).valueAsNumber;
  return { body, signal, key: at("key").value };
}

async function generate() {
  running = new AbortController();
  const request = requestOf(running.signal);
  const path = PATHS[at("kind").value];
  begin();
  await Promise.all(shown().map((lane) => lane.run(path, request, paintSoon).catch((error) => failed(lane, error))));
  running = null;
  measured = lanes.find((lane) => lane.isTargetAlone && lane.tally.seconds)?.tally.tokensPerSecond ?? measured;
  paint();
  at("run").textContent = "Generate";
  at("status").textContent = shown().map((lane) => (lane.problem.hidden ? lane.summary : `${lane.name} failed.`)).join(" ");
}

function begin() {
  hide();
  lanes.forEach((lane) => lane.clear());
  at("problem").hidden = true;
  document.querySelectorAll("[aria-invalid]").forEach((field) => field.removeAttribute("aria-invalid"));
  at("run").textContent = "Stop";
  at("status").textContent = "Generating.";
}

/** Shows what went wrong where it belongs: at the form when the form is to blame, otherwise in the lane. */
function failed(lane, error) {
  if (error.name === "AbortError") return (lane.end = "stopped");
  if (!(error instanceof Problem)) throw error;
  const field = at(FIELDS[error.field] ?? error.field);
  if (error.status === 401) askForKey();
  if (!field && error.status !== 401) return lane.fail(error.message);
  (error.status === 401 ? at("key") : field).setAttribute("aria-invalid", true);
  at("problem").textContent = error.message;
  at("problem").hidden = false;
}

function askForKey() {
  at("key").closest("label").hidden = false;
}

/** Which model is served, and whether the server wants a key. */
async function greet() {
  try {
    const { data } = await (await ask("v1/models", { key: at("key").value })).json();
    at("model").textContent = `${data[0].id}, a context of ${data[0].max_model_len ?? "unlimited"} tokens`;
  } catch (error) {
    if (error.status === 401) return askForKey();
    at("model").textContent = error.message;
  }
}

function arrange() {
  at("lanes").replaceChildren(...shown().map((lane) => lane.root));
  at("lanes").classList.toggle("two", at("compare").checked);
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem(THEME, theme);
  } catch {} // a page that may keep nothing still changes its theme
}

function keptTheme() {
  try {
    return localStorage.getItem(THEME) ?? "";
  } catch {
    return "";
  }
}

function start() {
  for (const [name, text] of Object.entries(EXAMPLES)) {
    const button = element("button", { type: "button" }, name);
    button.addEventListener("click", () => (at("prompt").value = text));
    document.querySelector(".examples").append(button);
  }
  at("prompt").value = EXAMPLES["a word problem"];
  at("theme").value = keptTheme();
  setTheme(at("theme").value);
  at("theme").addEventListener("change", () => setTheme(at("theme").value));
  at("compare").addEventListener("change", () => {
    running?.abort();
    arrange();
  });
  at("key").addEventListener("change", greet);
  at("form").addEventListener("submit", (event) => {
    event.preventDefault();
    running ? running.abort() : generate();
  });
  at("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !running) at("form").requestSubmit();
  });
  arrange();
  greet();
}

start();
