"""Plot the cost of syncs against the number of ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence

from fp8dist.errors import ConfigurationError
from fp8dist.simulation.algorithms import Topology
from fp8dist.simulation.prediction import Cost

__all__ = ["draw", "sizes_up_to"]

_STYLES = (("#0072b2", "o", "-"), ("#d55e00", "s", "--"), ("#009e73", "^", ":"))
"""Line styles of the ways. Colour-blind safe (Okabe and Ito), and distinct without colours."""


def sizes_up_to(last: Topology) -> list[Topology]:
    """Return topologies from two ranks to ``last``, doubling the ranks. Sizes that do not fill nodes are left out."""
    ranks = [2**i for i in range(1, last.ranks.bit_length()) if 2**i < last.ranks]
    fitting = [n for n in ranks if n <= last.per_node or n % last.per_node == 0]
    return [Topology(n, last.per_node, last.shared_cores) for n in (*fitting, last.ranks)]


def draw(path: str, sizes: Sequence[Topology], costs: Sequence[Sequence[Cost]], title: str) -> None:
    """Write the plot. The file format follows from the path's extension.

    Args:
        costs: for each size, the cost of each way.

    Raises:
        ConfigurationError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError("--plot needs matplotlib: pip install fp8dist[plots]") from error
    ranks = [size.ranks for size in sizes]
    figure = Figure(figsize=(7.5, 7.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    for way, (color, marker, line) in zip(range(len(costs[0])), _STYLES):
        style = {"color": color, "marker": marker, "linestyle": line, "label": costs[0][way].way, "markersize": 4}
        above.plot(ranks, [size[way].wait_mean / 1e3 for size in costs], **style)
        below.plot(ranks, [100 * size[way].share for size in costs], **style)
    above.set_ylabel("waiting per step, ms")
    below.set_ylabel("share of the step, %")
    below.set_xlabel("ranks")
    for axes in (above, below):
        axes.set_xscale("log", base=2)
        axes.set_yscale("symlog", linthresh=1e-3)
        axes.set_ylim(0, 2 * max(axes.dataLim.y1, 1e-3))
        axes.grid(alpha=0.3)
    below.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    above.legend(frameon=False)
    figure.suptitle(title)
    try:
        figure.savefig(os.fspath(path), dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path}: the plot cannot be written there: {error}") from error
