// The tree of one round: a column for each depth, and the branch that was accepted drawn through it.

/** Draws a round that had a tree. */
function drawTree(svg, round) {
  const depths = [];
  const columns = [];
  round.tree.forEach(({ parent }, i) => {
    depths.push(parent < 0 ? 0 : depths[parent] + 1);
    (columns[depths[i]] ??= []).push(i);
  });
  const slot = (svg.clientWidth - AREA.left - 8) / Math.max(LEAST_SLOTS, columns.length);
  const most = Math.max(...columns.map((column) => column.length));
  const tall = Math.max(HEIGHT, 24 + 16 * most);
  const at = (i) => {
    if (i < 0) return [AREA.left - 20, tall / 2];
    const column = columns[depths[i]];
    return [AREA.left + (depths[i] + 0.25) * slot, ((column.indexOf(i) + 0.5) * tall) / column.length];
  };
  const branches = round.tree.map(({ parent, outcome }, i) => line(outcome === "accepted" ? "line" : "grid", [at(parent), at(i)]));
  const marks = round.tree.map(({ outcome }, i) => mark(outcome, ...at(i)));
  const room = Math.floor((slot * 0.75 - 10) / LETTER);
  const texts = room < 2 ? [] : round.tree.map(({ text }, i) => label(at(i)[0] + 9, at(i)[1] + 4, shortened(visible(text), room), "start", "token"));
  svg.setAttribute("viewBox", `0 0 ${svg.clientWidth} ${tall}`);
  svg.style.height = `${tall}px`;
  svg.replaceChildren(...branches, ...marks, ...texts);
  const path = round.tree.filter(({ outcome }) => outcome === "accepted").map(({ text }) => visible(text));
  svg.setAttribute("aria-label", `A tree of ${counted(round.tree.length, "candidate")}; accepted: ${path.join(", ") || "none"}.`);
}
