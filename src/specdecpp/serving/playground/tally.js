// Figures of an answer, folded round by round, and how they are written. Seconds are those of the answer's own rounds.

class Tally {
  constructor() {
    Object.assign(this, { numTokens: 0, numRounds: 0, numDrafted: 0, numAccepted: 0, seconds: 0 });
  }

  add(round) {
    this.numTokens += round.pieces.length;
    this.numRounds += 1;
    this.numDrafted += round.num_drafted;
    this.numAccepted += round.num_accepted;
    this.seconds += Object.values(round.times).reduce((sum, part) => sum + part, 0);
  }

  get tokensPerSecond() {
    return this.seconds ? this.numTokens / this.seconds : 0;
  }

  /** vLLM's mean acceptance length: 1 + accepted / rounds. */
  get meanAcceptanceLength() {
    return this.numRounds ? 1 + this.numAccepted / this.numRounds : 0;
  }

  get acceptanceRate() {
    return this.numDrafted ? this.numAccepted / this.numDrafted : null;
  }
}

/** A probability, short enough for a table. */
const chance = (value) => (value >= 0.001 ? value.toFixed(3) : value >= 0.0001 ? value.toFixed(4) : value ? value.toExponential(0) : "0");

const share = (value) => `${(100 * value).toFixed(0)} %`;

const duration = (seconds) => (seconds < 1 ? `${(1000 * seconds).toFixed(0)} ms` : `${seconds.toFixed(2)} s`);

const rate = (value) => (value < 100 ? value.toFixed(1) : value.toFixed(0));

const counted = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;

/** A token so that blanks and breaks can be seen. */
const visible = (text) => text.replace(/ /g, "\u2423").replace(/\n/g, "\u21b5").replace(/\t/g, "\u21e5") || "no text of its own";

/** An element with attributes and children; a child may be text. */
function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}
