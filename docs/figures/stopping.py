"""The picture of docs/stopping.md: what the next candidate is worth, what it costs, and the speed that comes of it.

Constant acceptance 0.8 and c = 0.22, the page's first example; everything is computed by `specdecpp.theory.mdp`. Run it with:
python docs/figures/stopping.py
"""

from pathlib import Path

from specdecpp.bench.drawing import Canvas, Picture, axis_x, axis_y, heading
from specdecpp.bench.geometry import Box, Scale
from specdecpp.policies import Costs
from specdecpp.theory.mdp import Lattice, Process, fixed, optimum

ACCEPTANCE, C, MOST = 0.8, 0.22, 10
HERE = Path(__file__).parent


def picture() -> Picture:
    """Two panels over the same K: worth and price of one more candidate, and the speed-up of rounds of K candidates."""
    rounds, costs = Lattice.of(Process.constant(ACCEPTANCE), max_tokens=MOST), Costs.relative(C)
    best = optimum(rounds, costs)
    k = round(best.tally.num_drafted)
    worth = [ACCEPTANCE ** (n + 1) for n in range(MOST + 1)]
    price = best.rate * costs.step_s(0)
    speed = [rounds.tally(fixed(rounds, n)).speed_up(costs) for n in range(MOST + 1)]
    canvas = Canvas()
    title, note = "One more candidate?", f"every candidate is accepted with probability {ACCEPTANCE}, c = {C}"
    top = heading(canvas, title, note) + 34
    upper, lower = Box(46, top, 388, top + 130), Box(46, top + 196, 388, top + 316)
    x = Scale(low=0, high=MOST, start=46, end=388)
    _worth(canvas, x, upper, worth, price, k)
    _speed(canvas, x, lower, speed, k)
    said = f"A candidate costs {price:.3f} tokens. The fifth brings {worth[k]:.3f}, so a round has {k}: {speed[k]:.3f} times."
    return canvas.picture(lower.bottom + 44, title, note, said, name="stopping")


def _worth(canvas: Canvas, x: Scale, area: Box, worth: list[float], price: float, k: int) -> None:
    y = Scale(low=0, high=1, start=area.bottom, end=area.top)
    axis_y(canvas, y, area, "tokens", room=24)
    axis_x(canvas, x, area, "candidates so far")
    canvas.line([(x(n), y(w)) for n, w in enumerate(worth)], "accent")
    canvas.line([(area.left, y(price)), (area.right, y(price))], "dashed ink")
    for n, w in enumerate(worth):
        canvas.mark("dot" if n < k else "ring", (x(n), y(w)), "accent")
    canvas.text((area.right, y(price) - 7), "what it costs: rho t_draft", "ink", anchor="end")
    canvas.text((x(1.2), y(worth[1]) - 6), "what the next one brings: S m", "accent")


def _speed(canvas: Canvas, x: Scale, area: Box, speed: list[float], k: int) -> None:
    y = Scale(low=0, high=2.2, start=area.bottom, end=area.top)
    axis_y(canvas, y, area, "speed-up of rounds of K", room=30)
    axis_x(canvas, x, area, "K")
    canvas.line([(x(n), y(s)) for n, s in enumerate(speed)], "soft")
    for n, s in enumerate(speed):
        canvas.mark("dot", (x(n), y(s)), "accent" if n == k else "soft", size=5.0 if n == k else 3.0)
    canvas.text((x(k), y(speed[k]) - 9), f"{speed[k]:.3f} at K = {k}", "accent strong", anchor="middle")


if __name__ == "__main__":
    (HERE / "stopping.svg").write_text(picture().svg() + "\n", encoding="utf-8")
