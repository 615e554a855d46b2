// One rule and its answer: text, figures, rounds, and the survival of the round that is looked at.

const ENDS = { stop: "the text ended", length: "max tokens reached", stopped: "stopped" };

class Lane {
  constructor(name, policy) {
    this.root = document.getElementById("lane").content.firstElementChild.cloneNode(true);
    this.name = name;
    const find = (selector) => this.root.querySelector(selector);
    [this.policy, this.spec, this.problem, this.caption, this.curve] = [".policy", ".spec", ".problem", "figcaption", "svg"].map(find);
    find("h2").textContent = name;
    this.policy.setAttribute("aria-label", name);
    this.root.setAttribute("aria-label", name);
    find(".answer").setAttribute("aria-label", `Answer of ${name}; the arrow keys go from token to token`);
    find(".strip").setAttribute("aria-label", `Rounds of ${name}; the arrow keys go from round to round`);
    const leave = () => this.look(null);
    this.text = new AnswerText(find(".answer"), (piece, index) => this.tellToken(piece, index), leave);
    this.strip = new Strip(find(".strip"), (index) => this.tellRound(index), leave);
    this.policy.value = policy;
    this.policy.addEventListener("change", () => this.chosen());
    new ResizeObserver(() => this.look(this.looked)).observe(this.root);
    this.clear();
  }

  chosen() {
    this.root.querySelector(".other").hidden = this.policy.value !== "other";
  }

  /** What the request says about speculation; the server's own rule needs no name. */
  get speculative() {
    const policy = this.policy.value === "other" ? this.spec.value.trim() : this.policy.value;
    return { details: true, ...(policy && { policy }) };
  }

  get isTargetAlone() {
    return this.setting?.policy === "none";
  }

  clear() {
    this.rounds = [];
    this.tally = new Tally();
    this.setting = null;
    this.looked = null;
    this.end = null;
    this.problem.hidden = true;
    this.spec.removeAttribute("aria-invalid");
    this.text.clear();
    this.strip.clear();
    this.curve.replaceChildren();
    this.curve.setAttribute("hidden", "");
    this.caption.textContent = "The survival of a round appears here.";
    this.write({});
  }

  /** Takes the answer of one request in, until it ends. Rejects as `chunksOf` does. */
  async run(path, request, onRound) {
    const body = { ...request.body, speculative: this.speculative };
    for await (const chunk of chunksOf(path, { ...request, body })) {
      if (chunk.choices.length) this.add(chunk, onRound);
      else this.setting = chunk.speculative;
    }
  }

  add(chunk, onRound) {
    const { round } = chunk.speculative;
    this.end = chunk.choices[0].finish_reason ?? this.end;
    this.text.add(round, this.rounds.length);
    this.strip.add(round, this.rounds.length);
    this.rounds.push(round);
    this.tally.add(round);
    onRound();
  }

  /** Brings figures, strip and curve up to date; `baseline` is the target alone, in tokens per second. */
  paint(baseline) {
    if (!this.rounds.length) return;
    const { tally } = this;
    this.write({
      rate: rate(tally.tokensPerSecond),
      speedup: baseline ? `${(tally.tokensPerSecond / baseline.rate).toFixed(2)}\u00d7` : "",
      length: tally.meanAcceptanceLength.toFixed(2),
      accepted: tally.acceptanceRate === null ? "" : `${share(tally.acceptanceRate)}`,
      tokens: `${tally.numTokens} in ${tally.numRounds}`,
      time: duration(tally.seconds),
    });
    const said = [this.setting.policy, baseline && `speed-up ${baseline.name}`, ENDS[this.end]];
    this.root.querySelector(".baseline").textContent = said.filter(Boolean).join("; ");
    this.strip.follow();
    this.drawRound(this.looked ?? this.rounds.length - 1);
  }

  write(figures) {
    for (const place of this.root.querySelectorAll("[data-figure]")) place.textContent = figures[place.dataset.figure] ?? "";
    if (!Object.keys(figures).length) this.root.querySelector(".baseline").textContent = "";
  }

  drawRound(index) {
    const round = this.rounds[index];
    this.caption.textContent = captionOf(round, index + 1, this.setting.threshold);
    this.curve.toggleAttribute("hidden", !this.strip.most);
    if (this.strip.most) drawCurve(this.curve, round, this.setting.threshold);
  }

  /** Shows a round, its tokens and its bar; null: the last one again. */
  look(index) {
    this.looked = index;
    this.text.mark(index);
    this.strip.mark(index);
    if (this.rounds.length) this.drawRound(index ?? this.rounds.length - 1);
  }

  tellToken(piece, index) {
    this.look(index);
    return tokenCard(piece, this.rounds[index], index + 1);
  }

  tellRound(index) {
    this.look(index);
    return roundCard(this.rounds[index], index + 1);
  }

  fail(message) {
    if (!this.spec.closest("label").hidden) this.spec.setAttribute("aria-invalid", true);
    this.problem.textContent = message;
    this.problem.hidden = false;
  }

  /** In words, for the status line. */
  get summary() {
    return `${this.name}: ${counted(this.tally.numTokens, "token")} in ${counted(this.tally.numRounds, "round")}, ${ENDS[this.end]}.`;
  }
}

/** What the curve shows, and where the threshold lies. */
function captionOf(round, number, threshold) {
  if (!round.num_drafted) return `Round ${number}: no candidates.`;
  const of = round.survival_of === "head" ? "the head's estimates" : "q";
  return `Round ${number}: survival, the product of ${of}; ${thresholdOf(round, threshold)}. Drafting stopped: ${round.stop_reason}.`;
}

function thresholdOf(round, threshold) {
  if (threshold !== null) return `dashed: the threshold, ${threshold.toFixed(2)}`;
  const asked = (round.thresholds ?? []).filter((threshold) => threshold > 0).map((threshold) => threshold.toFixed(2));
  if (!asked.length) return "this rule asks nothing of it";
  return new Set(asked).size > 1 ? `dashed: the threshold, ${asked[0]} to ${asked.at(-1)}` : `dashed: the threshold, ${asked[0]}`;
}
