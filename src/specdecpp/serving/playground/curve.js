// The survival of one round against its threshold, a candidate a step. A mark says what became of a candidate.

const SVG = "http://www.w3.org/2000/svg";
const AREA = { left: 34, top: 12, bottom: 132 };
const HEIGHT = 184;
const LEAST_SLOTS = 6;
const LETTER = 7.5;

/** Draws a round; `threshold` is that of the rule, where it has just one. */
function drawCurve(svg, round, threshold) {
  const right = svg.clientWidth - 8; // a unit is a pixel, so that text keeps its size
  const slot = (right - AREA.left) / Math.max(LEAST_SLOTS, round.num_drafted);
  const x = (i) => AREA.left + (i + 0.5) * slot;
  const y = (value) => AREA.bottom - value * (AREA.bottom - AREA.top);
  const body = [...grid(right, y)];
  if (threshold !== null) body.push(line("floor", [[AREA.left, y(threshold)], [right, y(threshold)]]));
  else body.push(...thresholds(round, slot, y));
  body.push(line("line", [[AREA.left, y(1)], ...round.survival.map((value, i) => [x(i), y(value)])]));
  round.candidates.forEach((candidate, i) => {
    body.push(mark(candidate.outcome, x(i), y(round.survival[i] ?? round.survival.at(-1) ?? 1)));
    body.push(...labels(candidate, i, x(i), slot));
  });
  svg.setAttribute("viewBox", `0 0 ${svg.clientWidth} ${HEIGHT}`);
  svg.style.removeProperty("height");
  svg.replaceChildren(...body);
  svg.setAttribute("aria-label", inWords(round));
}

function inWords(round) {
  if (!round.candidates.length) return "No candidates in this round.";
  const said = round.candidates.map((c, i) => `${visible(c.text)} ${chance(round.survival[i] ?? 0)}, ${c.outcome}`);
  return `Survival after every candidate: ${said.join("; ")}.`;
}

function grid(right, y) {
  return [0, 0.5, 1].flatMap((value) => [
    line(value ? "grid" : "axis", [[AREA.left, y(value)], [right, y(value)]]),
    label(AREA.left - 6, y(value) + 4, String(value), "end"),
  ]);
}

/** The threshold of every step, where the rule has one that depends on the step. */
function thresholds(round, slot, y) {
  const steps = (round.thresholds ?? []).flatMap((threshold, i) =>
    threshold ? [[AREA.left + i * slot, y(threshold)], [AREA.left + (i + 1) * slot, y(threshold)]] : [],
  );
  return steps.length ? [line("floor", steps)] : [];
}

/** A candidate's number, and as much of its text as has room. */
function labels(candidate, i, x, width) {
  const room = Math.floor(width / LETTER);
  const text = shortened(visible(candidate.text), room);
  const number = width > 18 || i % 2 === 0 ? [label(x, AREA.bottom + 20, String(i + 1), "middle")] : [];
  return room >= 4 ? [...number, label(x, AREA.bottom + 38, text, "middle", "token")] : number;
}

function shortened(text, room) {
  const letters = [...text];
  return letters.length > room ? `${letters.slice(0, room - 1).join("")}\u2026` : text;
}

function mark(outcome, x, y) {
  const kind = `mark ${outcome}`;
  if (outcome === "rejected") return node("path", { class: kind, d: `M${x - 5},${y - 5}l10,10m0,-10l-10,10` });
  return node("circle", { class: kind, cx: x, cy: y, r: 5 });
}

function line(kind, points) {
  return node("polyline", { class: kind, points: points.map((point) => point.join(",")).join(" ") });
}

function label(x, y, text, anchor, kind = "") {
  const made = node("text", { x, y, "text-anchor": anchor, class: kind });
  made.textContent = text;
  return made;
}

function node(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}
