// The card beside a token or a round: what it was decided on. It can be hovered, and Escape puts it away.

const card = document.getElementById("card");
const LATER_MS = 150;
const MOST_ROWS = 8;
let described = null;
let forget = null;
let leaving = 0;

/** `tell(item)` gives the card of an item of a row, when it is met by pointer, finger or focus; `onLeave` when it is left. */
function carded(row, tell, onLeave) {
  const meet = (event) => {
    const item = itemOf(row, event.target);
    if (item) show(item, tell(item), onLeave);
  };
  row.addEventListener("pointerover", meet);
  row.addEventListener("focusin", meet);
  row.addEventListener("pointerleave", hideLater);
  row.addEventListener("focusout", hideLater);
}

function itemOf(row, node) {
  while (node && node.parentNode !== row) node = node.parentNode;
  return node;
}

function show(anchor, content, onLeave) {
  clearTimeout(leaving);
  described?.removeAttribute("aria-describedby");
  if (forget !== onLeave) forget?.();
  [described, forget] = [anchor, onLeave];
  anchor.setAttribute("aria-describedby", "card");
  card.replaceChildren(...content);
  card.hidden = false;
  place();
}

/** Above what it is about, or below where there is no room; within the window, and gone with it. */
function place() {
  if (card.hidden) return;
  const at = described.getClientRects()[0] ?? described.getBoundingClientRect();
  const { offsetWidth: width, offsetHeight: height } = card;
  const { clientWidth, clientHeight } = document.documentElement;
  const above = at.top - height - 8;
  card.style.left = `${Math.max(8, Math.min(at.left, clientWidth - width - 8))}px`;
  card.style.top = `${above >= 8 ? above : Math.max(8, Math.min(at.bottom + 8, clientHeight - height - 8))}px`;
  card.style.visibility = at.bottom < 0 || at.top > clientHeight ? "hidden" : "";
}

function hide() {
  clearTimeout(leaving);
  card.hidden = true;
  described?.removeAttribute("aria-describedby");
  forget?.();
  described = forget = null;
}

function hideLater() {
  clearTimeout(leaving);
  leaving = setTimeout(hide, LATER_MS);
}

card.addEventListener("pointerenter", () => clearTimeout(leaving));
card.addEventListener("pointerleave", hideLater);
addEventListener("scroll", place, { passive: true, capture: true });
addEventListener("keydown", (event) => event.key === "Escape" && (card.hidden = true));

const MEANINGS = {
  accepted: "accepted: drafted, and the target agrees",
  correction: "correction: the target's, in place of a rejected candidate",
  bonus: "bonus: the target's own, where nothing was rejected",
};

/** What is known of a token of the answer. */
function tokenCard(piece, round, number) {
  const rows = [["p, the target's", chance(piece.p)]];
  rows.push(["q, the draft's", piece.q === null ? "none: the draft did not get that far" : chance(piece.q)]);
  if (piece.origin === "accepted") rows.push(["the head's estimate", estimate(piece)]);
  if (piece.origin === "correction" && round.candidates.length > round.num_accepted) rows.push(...replaced(round.candidates[round.num_accepted]));
  rows.push(["round", `${number}: ${counts(round)}`]);
  return [element("p", {}, element("b", {}, visible(piece.text))), element("p", { class: "fate" }, MEANINGS[piece.origin]), pairs(rows)];
}

function replaced(candidate) {
  const said = `p ${chance(candidate.p)}, q ${chance(candidate.q)}, estimate ${estimate(candidate)}`;
  return [["replaces", element("b", {}, visible(candidate.text))], ["which had", said]];
}

/** A round: its counts, why drafting stopped, its candidates. */
function roundCard(round, number) {
  const seconds = Object.values(round.times).reduce((sum, part) => sum + part, 0);
  const rows = [["drafting stopped", round.stop_reason || "no reason given"], ["took", duration(seconds)]];
  const content = [element("p", {}, element("b", {}, `Round ${number}: ${counts(round)}`)), pairs(rows)];
  return round.candidates.length ? [...content, candidateTable(round.candidates)] : content;
}

const counts = (round) => `${round.num_drafted} drafted, ${round.num_accepted} accepted`;

const estimate = ({ estimate: value }) => (value === null ? "none: no head judged it" : chance(value));

function pairs(rows) {
  return element("dl", {}, ...rows.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
}

function candidateTable(candidates) {
  const cells = (name, values) => element("tr", {}, ...values.map((value) => element(name, {}, value)));
  const rows = candidates.slice(0, MOST_ROWS).map((c) =>
    cells("td", [visible(c.text), chance(c.p), chance(c.q), c.estimate === null ? "\u2013" : chance(c.estimate), c.outcome]),
  );
  const table = element("table", {}, cells("th", ["candidate", "p", "q", "estimate", "outcome"]), ...rows);
  const more = candidates.length - rows.length;
  return more > 0 ? element("div", {}, table, `and ${more} more`) : table;
}
