// One tab stop for many things in a row: the arrow keys go from one to the next.

const STEPS = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };

/** Children of `row` that are added through the returned function take part. */
function roving(row) {
  const current = () => row.querySelector(':scope > [tabindex="0"]');
  const settle = (item) => {
    current()?.setAttribute("tabindex", -1);
    item.setAttribute("tabindex", 0);
  };
  row.addEventListener("focusin", (event) => settle(event.target));
  row.addEventListener("keydown", (event) => {
    const next = target(row, event);
    if (!next) return;
    event.preventDefault();
    next.focus();
  });
  return (item) => {
    item.setAttribute("tabindex", current() ? -1 : 0);
    row.append(item);
  };
}

function target(row, { key, target: from }) {
  if (key === "Home") return row.firstElementChild;
  if (key === "End") return row.lastElementChild;
  const items = [...row.children];
  return key in STEPS ? items[items.indexOf(from) + STEPS[key]] : null;
}
