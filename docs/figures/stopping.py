"""The picture of docs/how-it-works.md: what the next draft token is worth, what it costs, and the speed that comes of it.

Constant acceptance 0.8 and c = 0.22, the page's first example; everything is computed by `specdecpp.lab.mdp`. Run it with:
python docs/figures/stopping.py
"""

from pathlib import Path
from typing import TYPE_CHECKING

from specdecpp.lab.mdp import Lattice, Process, fixed, optimum
from specdecpp.policies import Costs
from specdecpp.report.pictures import Picture, figure, finished, styled
from specdecpp.report.theme import LIGHT

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ACCEPTANCE, C, MOST = 0.8, 0.22, 10
HERE = Path(__file__).parent


@styled()
def picture() -> Picture:
    """Two panels over the same K: worth and price of one more draft token, and the speed-up of steps of K."""
    rounds, costs = Lattice.of(Process.constant(ACCEPTANCE), max_tokens=MOST), Costs.relative(C)
    best = optimum(rounds, costs)
    k = round(best.tally.num_drafted)
    worth = [ACCEPTANCE ** (n + 1) for n in range(MOST + 1)]
    price = best.rate * costs.added_s(0)
    speed = [rounds.tally(fixed(rounds, n)).speed_up(costs) for n in range(MOST + 1)]
    drawn = figure(f"One more draft token? Each is accepted with probability {ACCEPTANCE}, c = {C}", height=5.2)
    upper, lower = drawn.subplots(2)
    upper.set(xlim=(0, MOST), ylim=(0, 1), xlabel="draft tokens so far", ylabel="tokens")
    lower.set(xlim=(0, MOST), ylim=(0, 2.2), xlabel="K", ylabel="speed-up of steps of K")
    _worth(upper, worth, price, k)
    _speed(lower, speed, k)
    said = f"A draft token costs {price:.3f} tokens. The fifth brings {worth[k]:.3f}, so a step has {k}: {speed[k]:.3f} times."
    return finished(drawn, said, name="stopping")


def _worth(axes: "Axes", worth: list[float], price: float, k: int) -> None:
    accent, ink = LIGHT["accent"], LIGHT["ink"]
    axes.plot(worth, color=accent)
    axes.axhline(price, color=ink, dashes=(4, 3))
    for n, w in enumerate(worth):
        face, edge = (accent, LIGHT["surface"]) if n < k else ("none", accent)
        axes.plot([n], [w], "o", markerfacecolor=face, markeredgecolor=edge, markersize=8, clip_on=False)
    axes.annotate("what it costs: rho t_draft", (MOST, price), (0, 7), textcoords="offset points", ha="right")
    axes.annotate("what the next one brings: S m", (1.2, worth[1]), (0, 6), textcoords="offset points", color=accent)


def _speed(axes: "Axes", speed: list[float], k: int) -> None:
    axes.plot(speed, color=LIGHT["soft"])
    for n, s in enumerate(speed):
        colour, size = ("accent", 10) if n == k else ("soft", 6)
        axes.plot([n], [s], "o", color=LIGHT[colour], markeredgecolor=LIGHT["surface"], markersize=size, clip_on=False)
    text, colour = f"{speed[k]:.3f} at K = {k}", LIGHT["accent"]
    axes.annotate(text, (k, speed[k]), (0, 9), textcoords="offset points", ha="center", color=colour, weight="bold")


if __name__ == "__main__":
    (HERE / "stopping.svg").write_text(picture().svg, encoding="utf-8")
