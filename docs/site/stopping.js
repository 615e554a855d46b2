// The figure of docs/stopping.md with sliders. plan() is specdecpp.lab.mdp for constant acceptance, and tested against it.
const MOST = 20

function plan(acceptance, c, slope) {
  const tokens = [1], seconds = [1], worth = []
  for (let k = 1; k <= MOST; k++) {
    tokens.push(tokens[k - 1] + acceptance ** k)
    seconds.push(1 + k * (c + slope))
  }
  const speed = tokens.map((t, k) => t / seconds[k])
  const best = speed.indexOf(Math.max(...speed))
  for (let k = 0; k <= MOST; k++) worth.push(acceptance ** (k + 1))
  return {speed, best, worth, price: speed[best] * (c + slope)}
}

function draw(found) {
  const width = 640, left = 40, right = 630
  const x = k => left + (right - left) * k / MOST
  const panel = (top, height, most) => v => top + height * (1 - Math.min(v, most) / most)
  const worth = panel(24, 110, 1), most = Math.max(1.2, ...found.speed) * 1.1, speed = panel(190, 120, most)
  const line = (values, y) => values.map((v, k) => `${x(k).toFixed(1)},${y(v).toFixed(1)}`).join(" ")
  const bar = (s, k) => `<rect class="bar${k === found.best ? " best" : ""}" x="${x(k) - 9}" width="18"
    y="${speed(s).toFixed(1)}" height="${(310 - speed(s)).toFixed(1)}"/>`
  const ticks = [0, 5, 10, 15, 20].map(k => `<text x="${x(k)}" y="328" text-anchor="middle">${k}</text>`).join("")
  return `<svg viewBox="0 0 ${width} 345" role="img" aria-label="Worth and price of one more candidate, and speed by K">
    <text x="${left}" y="14">one more candidate: what it brings (line) and what it costs (dashed), in tokens</text>
    <line class="axis" x1="${left}" x2="${right}" y1="134" y2="134"/>
    <polyline class="line" points="${line(found.worth, worth)}"/>
    <line class="price" x1="${left}" x2="${right}" y1="${worth(found.price)}" y2="${worth(found.price)}"/>
    <text x="${left}" y="180">speed-up with K candidates a round</text>
    ${found.speed.map(bar).join("")}
    <line class="axis" x1="${left}" x2="${right}" y1="${speed(1)}" y2="${speed(1)}" stroke-dasharray="2 3"/>
    <line class="axis" x1="${left}" x2="${right}" y1="310" y2="310"/>${ticks}<text x="${left}" y="343">K</text></svg>`
}

function play(place) {
  const sliders = [
    ["acceptance of a candidate", 0.05, 0.99, 0.01, 0.8],
    ["a draft step, of a target pass (c)", 0.01, 1, 0.01, 0.22],
    ["one more position in a pass, of a pass", 0, 0.3, 0.01, 0],
  ]
  place.innerHTML = sliders.map(([name, low, high, step, value]) => `<label><span>${name}</span>
    <input type="range" min="${low}" max="${high}" step="${step}" value="${value}"><output></output></label>`).join("")
    + "<div></div><p></p>"
  const inputs = [...place.querySelectorAll("input")]
  const show = () => {
    const values = inputs.map(input => Number(input.value)), found = plan(...values)
    place.querySelectorAll("output").forEach((output, i) => { output.textContent = values[i].toFixed(2) })
    place.querySelector("div").innerHTML = draw(found)
    place.querySelector("p").textContent = found.best === 0
      ? "Drafting does not pay here: the target alone is fastest."
      : `Best: ${found.best} candidates a round, ${found.speed[found.best].toFixed(2)} times the target alone. `
        + `A candidate costs ${found.price.toFixed(2)} tokens; the last one brings ${found.worth[found.best - 1].toFixed(2)}, `
        + `the next would bring ${found.worth[found.best].toFixed(2)}.`
  }
  inputs.forEach(input => input.addEventListener("input", show))
  show()
}

if (typeof document !== "undefined") document.querySelectorAll(".play").forEach(play)
if (typeof module !== "undefined") module.exports = {plan}
