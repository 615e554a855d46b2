// A bar for every round: as high as candidates were drafted, filled as far as they were accepted.

const BAR_PX = 56;
const UNIT_PX = 7;

class Strip {
  /** `tell(index)` gives the card of a round. */
  constructor(place, tell, onLeave) {
    this.place = place;
    this.append = roving(place);
    carded(place, (bar) => tell(this.indexOf(bar)), onLeave);
  }

  indexOf(bar) {
    return [...this.place.children].indexOf(bar);
  }

  clear() {
    this.most = 0;
    this.place.replaceChildren();
    this.place.style.removeProperty("--unit");
  }

  add(round, index) {
    const name = `Round ${index + 1}: ${counts(round)}; drafting stopped: ${round.stop_reason || "no reason given"}`;
    const bar = element("button", { type: "button", "aria-label": name, "data-drafted": round.num_drafted });
    bar.style.setProperty("--drafted", round.num_drafted);
    bar.style.setProperty("--accepted", round.num_accepted);
    this.append(bar);
    this.most = Math.max(this.most, round.num_drafted);
    this.place.style.setProperty("--unit", `${Math.min(UNIT_PX, BAR_PX / Math.max(1, this.most))}px`);
  }

  /** The last bar comes into view, unless somebody is looking at another. */
  follow() {
    if (!this.place.matches(":hover, :focus-within")) this.place.scrollLeft = this.place.scrollWidth;
  }

  mark(index) {
    [...this.place.children].forEach((bar, i) => bar.classList.toggle("shown", i === index));
  }
}
