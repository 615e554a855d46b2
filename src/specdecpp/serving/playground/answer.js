// The text of an answer, a span for every token, in the style of where it came from.

class AnswerText {
  /** `tell(piece, index)` gives the card of a token of round `index`. */
  constructor(place, tell, onLeave) {
    this.place = place;
    this.told = new Map();
    this.append = roving(place);
    carded(place, (span) => tell(...this.told.get(span)), onLeave);
  }

  clear() {
    this.told.clear();
    this.place.replaceChildren();
  }

  add(round, index) {
    for (const piece of round.pieces) {
      const span = element("span", { class: piece.origin }, ...marked(piece.text));
      if (!piece.text) span.classList.add("silent");
      this.told.set(span, [piece, index]);
      this.append(span);
    }
  }

  /** Marks the tokens of one round; none without an index. */
  mark(index) {
    for (const [span, [, of]] of this.told) span.classList.toggle("shown", of === index);
  }
}

/** A text with an empty element before every line break, where the style puts a mark: it is seen, and not copied. */
function marked(text) {
  return text.split("\n").flatMap((line, i) => (i ? [element("i", { class: "break" }), `\n${line}`] : [line]));
}
