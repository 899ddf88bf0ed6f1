"""``fp8dist simulate``: its flags, and the report for them."""

from __future__ import annotations

import argparse
from typing import Any

from fp8dist.errors import ConfigurationError
from fp8dist.simulation.algorithms import Topology, Workload
from fp8dist.simulation.constants import ALGORITHMS, Constant, Constants, Origin, defaults
from fp8dist.simulation.fitting import Fit, fit
from fp8dist.simulation.picture import draw, sizes_up_to
from fp8dist.simulation.prediction import Job, SimulationReport
from fp8dist.simulation.runs import read_run
from fp8dist.simulation.stragglers import KINDS, Stragglers

__all__ = ["add_flags", "simulate"]

_OF_JOB = (
    ("gpus-per-node", int, 8, "", "GPUs per node, assumed"),
    ("slots", int, 672, "", "FP8 slots: three for each of the 224 Linears of Llama 3 8B"),
    ("arenas", int, 1, "", "arenas: one for each group of ranks and recipe"),
    ("lanes", int, 0, "", "extra words per slot: 2 if a Fallback limits shares"),
    ("step-ms", float, 1000.0, "ms", "duration of a step without syncs, assumed"),
    (
        "window-ms",
        float,
        20.0,
        "ms",
        "time from the sync to the first cast of the next forward, for next_step, assumed",
    ),
    ("straggler-us", float, 100.0, "µs", "delay of late ranks, assumed"),
    ("straggler-sigma", float, 1.0, "", "standard deviation of the logarithm of lognormal delays, assumed"),
    ("straggler-share", float, 0.01, "", "share of slow ranks, assumed"),
    ("steps", int, 200, "", "steps for which delays are drawn"),
    ("seed", int, 0, "", "seed of these draws"),
)
_GIVEN = "command line"
_OF_NETWORK = (
    ("overhead-us", "overhead", "fixed time of each collective, µs"),
    ("latency-intra-us", "latency_intra", "one-way latency inside a node, µs"),
    ("latency-inter-us", "latency_inter", "one-way latency between nodes, µs"),
    ("added-latency-us", "added_latency", "extra one-way latency between nodes, µs, also on top of a fitted latency"),
    ("message-us", "message", "CPU time per message, µs (gloo)"),
    ("bandwidth-intra-gb", "bandwidth_intra", "bandwidth inside a node, GB/s"),
    ("bandwidth-inter-gb", "bandwidth_inter", "bandwidth between nodes, GB/s"),
    ("slowdown", "slowdown", "factor on overhead, latencies and message time, but not on --added-latency-us"),
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add all flags of the command but ``--json``."""
    add = parser.add_argument
    add("--ranks", type=int, required=True, metavar="N")
    add(
        "--algorithm",
        choices=ALGORITHMS,
        default="tree",
        help="all-reduce algorithm; tree and ring are NCCL's, on GPUs (default: tree)",
    )
    add(
        "--update",
        choices=("same_step", "next_step"),
        default="same_step",
        help="same_step: every rank waits for the sync at once; next_step: it overlaps with --window-ms (default: "
        "same_step)",
    )
    add("--straggler", choices=KINDS, default="none", help="distribution of the delays of late ranks (default: none)")
    for name, kind, default, _, source in _OF_JOB:
        add(f"--{name}", type=kind, metavar="N", help=f"{source} (default: {default:g})")
    for name, _, help_ in _OF_NETWORK:
        add(f"--{name}", type=float, metavar="X", help=help_)
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


def simulate(options: argparse.Namespace) -> SimulationReport:
    """Return the report for these options. Draw the plot of ``--plot``.

    Raises:
        ConfigurationError: a flag has an invalid value, a run cannot be used, or the plot cannot be written.
    """
    described: list[Constant] = []
    values: dict[str, Any] = {}
    for name, _, default, unit, source in _OF_JOB:
        given = getattr(options, name.replace("-", "_"))
        values[name] = default if given is None else given
        if _idle(name, options):
            continue
        origin: Origin = "default" if given is None else "given"
        described.append(
            Constant(name.replace("-", "_"), values[name], unit, source if given is None else _GIVEN, origin)
        )
    topology = Topology(options.ranks, values["gpus-per-node"], options.shared_cores)
    constants, calibration = _constants(options, values["gpus-per-node"])
    job = Job(
        workload=Workload(values["slots"], values["arenas"], values["lanes"]),
        algorithm=options.algorithm,
        constants=constants,
        stragglers=Stragglers(
            options.straggler, values["straggler-us"], values["straggler-sigma"], values["straggler-share"]
        ),
        step=1e3 * values["step-ms"],
        window=1e3 * values["window-ms"] if options.update == "next_step" else 0.0,
        steps=values["steps"],
        seed=values["seed"],
    )
    if options.plot is not None:
        sizes = sizes_up_to(topology)
        title = (
            f"{values['slots']} slots, {options.algorithm}, {options.update}, {values['gpus-per-node']} ranks per node"
        )
        draw(options.plot, sizes, [job.costs(size) for size in sizes], title)
    if options.shared_cores is not None:
        described.append(Constant("shared_cores", options.shared_cores, "", _GIVEN, "given"))
    return SimulationReport(
        topology=topology,
        algorithm=options.algorithm,
        update=options.update,
        straggler=options.straggler,
        costs=job.costs(topology),
        assumptions=(*constants, *described),
        calibration=calibration,
    )


def _idle(name: str, options: argparse.Namespace) -> bool:
    """Return True if this flag has no effect with the other options."""
    needed = {
        "window-ms": options.update == "next_step",
        "straggler-us": options.straggler != "none",
        "straggler-sigma": options.straggler == "lognormal",
        "straggler-share": options.straggler == "slow",
        "steps": options.straggler not in ("none", "slow"),
    }
    needed["seed"] = needed["steps"]
    return not needed.get(name, True)


def _constants(options: argparse.Namespace, per_node: int) -> tuple[Constants, Fit | None]:
    given = {}
    for flag, name, _ in _OF_NETWORK:
        value = getattr(options, flag.replace("-", "_"))
        if value is None:
            continue
        least_is_zero = not (name.startswith("bandwidth") or name == "slowdown")
        if not (0 < value < float("inf") or (value == 0 and least_is_zero)):
            raise ConfigurationError(
                f"--{flag} is {value:g}: must be a finite number, {'0 or more' if least_is_zero else 'above 0'}"
            )
        given[name] = value
    constants = defaults(options.algorithm).having(given, "given", _GIVEN)
    if options.calibrate is None:
        return constants, None
    runs = [read_run(path, per_node, options.shared_cores) for path in options.calibrate]
    calibration = fit(runs, options.algorithm, constants)
    return calibration.constants, calibration
