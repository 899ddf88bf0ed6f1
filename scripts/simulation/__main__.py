"""Predict the cost of the FP8 sync per step on many ranks, and of two other ways to reduce amaxes.

    python -m scripts.simulation --ranks 16384 --update next_step

Needs numpy, and matplotlib for ``--plot``; neither torch nor fp8dist. docs/design/simulation.md explains the model.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from scripts.simulation.calibration import fit, read_run
from scripts.simulation.model import ALGORITHMS, Constant, Constants, Topology, Unusable, defaults, ways
from scripts.simulation.prediction import KINDS, Job, Stragglers

UPDATES = ("same_step", "next_step")
CHOICES = (
    ("--algorithm", ALGORITHMS, "all-reduce algorithm; tree and ring are NCCL's, on GPUs"),
    ("--update", UPDATES, "same_step: every rank waits for the sync at once; next_step: it overlaps with --window-ms"),
    ("--straggler", KINDS, "distribution of the delays of late ranks"),
)
"""(flag, choices with the default first, meaning)."""

OF_JOB = (
    ("--gpus-per-node", int, 8, "", "GPUs per node, assumed"),
    ("--slots", int, 672, "", "FP8 slots: three for each of the 224 Linears of Llama 3 8B"),
    ("--arenas", int, 1, "", "arenas: one for each group of ranks and recipe"),
    ("--lanes", int, 0, "", "extra words per slot: 2 if a Fallback limits shares"),
    ("--step-ms", float, 1000.0, "ms", "duration of a step without syncs, assumed"),
    ("--window-ms", float, 20.0, "ms", "time from the sync to the next forward's first cast, for next_step, assumed"),
    ("--straggler-us", float, 100.0, "µs", "delay of late ranks, assumed"),
    ("--straggler-sigma", float, 1.0, "", "standard deviation of the logarithm of lognormal delays, assumed"),
    ("--straggler-share", float, 0.01, "", "share of slow ranks, assumed"),
    ("--steps", int, 200, "", "steps for which delays are drawn"),
    ("--seed", int, 0, "", "seed of these draws"),
)
"""(flag, type, default, unit, meaning) of the numbers of a job."""

USED_BY = {
    "window_ms": ("next_step",),
    "straggler_us": ("normal", "lognormal", "exponential", "slow"),
    "straggler_sigma": ("lognormal",),
    "straggler_share": ("slow",),
    "steps": ("normal", "lognormal", "exponential"),
    "seed": ("normal", "lognormal", "exponential"),
}
"""The choices with which a number of a job has an effect. All others always have one."""

OF_NETWORK = (
    ("--overhead-us", "overhead", "fixed time of each collective, µs"),
    ("--latency-intra-us", "latency_intra", "one-way latency inside a node, µs"),
    ("--latency-inter-us", "latency_inter", "one-way latency between nodes, µs"),
    ("--added-latency-us", "added_latency", "extra one-way latency between nodes, µs, also on top of a fitted latency"),
    ("--message-us", "message", "CPU time per message, µs (gloo)"),
    ("--bandwidth-intra-gb", "bandwidth_intra", "bandwidth inside a node, GB/s"),
    ("--bandwidth-inter-gb", "bandwidth_inter", "bandwidth between nodes, GB/s"),
    ("--slowdown", "slowdown", "factor on overhead, latencies and message time, but not on --added-latency-us"),
)
"""(flag, constant, meaning) of the constants of the network."""

GIVEN = "command line"
STYLES = (("#0072b2", "o", "-"), ("#d55e00", "s", "--"), ("#009e73", "^", ":"))
"""Line styles of the ways. Colour-blind safe (Okabe and Ito), and distinct without colours."""


Report = dict[str, Any]
"""A prediction, as ``--json`` prints it. "assumptions": all numbers that it rests on. Times are in µs."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the prediction for a command line, and draw its plot. Return the exit status: 2 for a mistake."""
    options = parser().parse_args(arguments)
    try:
        report = _predict(options)
    except Unusable as error:
        print(f"simulation: {error}", file=sys.stderr)
        return 2
    print(json.dumps(report, indent=1, allow_nan=False, default=asdict) if options.json else _text(report))
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.simulation",
        description="Predict the cost of the FP8 sync per step, and of two other ways to reduce amaxes.",
    )
    add = parser.add_argument
    add("--ranks", type=int, required=True, metavar="N")
    for name, choices, meaning in CHOICES:
        add(name, choices=choices, default=choices[0], help=f"{meaning} (default: {choices[0]})")
    for name, kind, default, _, meaning in OF_JOB:
        add(name, type=kind, metavar="N", help=f"{meaning} (default: {default:g})")
    for name, _, meaning in OF_NETWORK:
        add(name, type=float, metavar="X", help=meaning)
    add(
        "--shared-cores",
        type=int,
        metavar="N",
        help="all ranks share N CPU cores, if one machine emulates several hosts (gloo)",
    )
    add(
        "--calibrate",
        nargs="+",
        metavar="FILE",
        help="fit the constants to metrics.jsonl files of the example job; write FILE@NODES to set the number of nodes",
    )
    add("--plot", metavar="FILE.png", help="plot the cost against the number of ranks, up to --ranks")
    add("--json", action="store_true", help="print JSON instead of text")
    return parser


def _predict(options: argparse.Namespace) -> Report:
    """Return the prediction for these options. Draw the plot of ``--plot``."""
    used, values = _numbers(options)
    topology = Topology(options.ranks, values["gpus_per_node"], options.shared_cores)
    constants, calibration = _network(options), None
    if options.calibrate is not None:
        runs = [read_run(path, values["gpus_per_node"], options.shared_cores) for path in options.calibrate]
        constants, calibration = fit(runs, options.algorithm, constants)
    delays = (values[f"straggler_{name}"] for name in ("us", "sigma", "share"))
    job = Job(
        ways=ways(values["slots"], values["arenas"], values["lanes"]),
        algorithm=options.algorithm,
        constants=constants,
        stragglers=Stragglers(options.straggler, *delays),
        step=1e3 * values["step_ms"],
        window=1e3 * values["window_ms"] if options.update == "next_step" else 0.0,
        steps=values["steps"],
        seed=values["seed"],
    )
    report = {
        "ranks": topology.ranks,
        "nodes": topology.nodes,
        **{name: getattr(options, name) for name in ("algorithm", "update", "straggler")},
        "ways": job.costs(topology),
        "assumptions": [*constants.values(), *used],
        "calibration": calibration,
    }
    if options.plot is not None:
        how = f"{options.algorithm}, {options.update}, {values['gpus_per_node']} ranks per node"
        _plot(options.plot, job, topology, f"{values['slots']} slots, {how}")
    return report


def _numbers(options: argparse.Namespace) -> tuple[list[Constant], dict[str, Any]]:
    """Return the numbers of the job that have an effect, and the values of all by name."""
    used, values = [], {}
    for flag, _, default, unit, meaning in OF_JOB:
        name = flag.removeprefix("--").replace("-", "_")
        given = getattr(options, name)
        values[name] = default if given is None else given
        number = Constant(name, default, unit, meaning)
        if given is not None:
            number = Constant(name, given, unit, GIVEN, "given")
        if {options.update, options.straggler} & set(USED_BY.get(name, (options.update,))):
            used.append(number)
    if options.shared_cores is not None:
        used.append(Constant("shared_cores", options.shared_cores, "", GIVEN, "given"))
    return used, values


def _network(options: argparse.Namespace) -> Constants:
    given = {}
    for flag, name, _ in OF_NETWORK:
        value = getattr(options, flag.removeprefix("--").replace("-", "_"))
        if value is None:
            continue
        least_is_zero = not (name.startswith("bandwidth") or name == "slowdown")
        if not (0 < value < float("inf") or (value == 0 and least_is_zero)):
            raise Unusable(
                f"{flag} is {value:g}: must be a finite number, {'0 or more' if least_is_zero else 'above 0'}"
            )
        given[name] = value
    return defaults(options.algorithm).having(given, "given", GIVEN)


def _text(report: Report) -> str:
    """Return the prediction as a table with all that it rests on."""
    late = "no rank late" if report["straggler"] == "none" else f"{report['straggler']} delays"
    where = _where(report["ranks"], report["nodes"])
    lines = [f"{where}, {report['algorithm']}, {report['update']}, {late}: per step", ""]
    rows: list[tuple[str, ...]] = [
        ("", "collectives", "bytes", "sync", "step longer by", "wait mean", "p50", "p99", "of the step")
    ]
    for cost in report["ways"]:
        times = map(_time, (cost.sync, cost.added, cost.wait_mean, cost.wait_p50, cost.wait_p99))
        rows.append((cost.way, str(cost.collectives), str(cost.bytes), *times, f"{100 * cost.share:.3g}%"))
    widths = [max(map(len, column)) for column in zip(*rows)]
    for first, *cells in rows:
        numbers = (f"{cell:>{width}}" for cell, width in zip(cells, widths[1:]))
        lines.append("  ".join((f"{first:<{widths[0]}}", *numbers)))
    lines += ["", "Constants and assumptions:", *map(str, report["assumptions"])]
    if calibration := report["calibration"]:
        lines += ["", "Calibrated with:"]
        for run in calibration["runs"]:
            measured, fitted = _time(run["measured_us"]), _time(run["fitted_us"])
            where = _where(run["ranks"], run["nodes"])
            lines.append(f"{run['path']}: {where}, {run['field']}: {measured}, fitted {fitted}")
        lines += ["Limits of the fit:", *calibration["notes"]]
    return "\n".join(lines)


def _where(ranks: int, nodes: int) -> str:
    return " on ".join(f"{n} {what}{'s' if n > 1 else ''}" for n, what in ((ranks, "rank"), (nodes, "node")))


def _time(microseconds: float) -> str:
    for limit, factor, unit in ((1e3, 1.0, "µs"), (1e6, 1e-3, "ms")):
        if microseconds < 0.9995 * limit:  # Larger values round up to the limit with three digits.
            return f"{microseconds * factor:.3g} {unit}"
    return f"{microseconds * 1e-6:.3g} s"


def _plot(path: str, job: Job, last: Topology, title: str) -> None:
    """Plot the cost from two ranks to ``last``, doubling the ranks. Sizes that do not fill nodes are left out.

    The file format follows from the path's extension.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise Unusable("--plot needs matplotlib: pip install matplotlib") from error
    per_node = last.per_node
    doubled = (2**power for power in range(1, last.ranks.bit_length()))
    sizes = [n for n in doubled if n < last.ranks and (n <= per_node or n % per_node == 0)]
    ranks = [*sizes, last.ranks]
    costs = [job.costs(Topology(n, per_node, last.shared_cores)) for n in ranks]
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    for of_way, (color, marker, line) in zip(zip(*costs), STYLES):
        style = {"color": color, "marker": marker, "linestyle": line, "label": of_way[0].way, "markersize": 4}
        axes.plot(ranks, [cost.wait_mean / 1e3 for cost in of_way], **style)
    axes.set(ylabel="waiting per step, ms", xlabel="ranks")
    axes.set_xscale("log", base=2)
    axes.set_yscale("symlog", linthresh=1e-3)
    axes.set_ylim(0, 2 * max(axes.dataLim.y1, 1e-3))
    axes.grid(alpha=0.3)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.legend(frameon=False)
    figure.suptitle(title)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise Unusable(f"{path}: the plot cannot be written there: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
