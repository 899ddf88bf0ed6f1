"""``fp8dist simulate``: its flags, and what they ask for."""

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
    ("gpus-per-node", int, 8, "", "assumption"),
    ("slots", int, 672, "", "three for each of 224 Linears: Llama 3 8B"),
    ("arenas", int, 1, "", "one group, one recipe"),
    ("lanes", int, 0, "", "2 where a Fallback limits shares"),
    ("step-ms", float, 1000.0, "ms", "assumption"),
    (
        "window-ms",
        float,
        20.0,
        "ms",
        "assumption: optimizer and next batch; from the sync to the next forward's first cast",
    ),
    ("straggler-us", float, 100.0, "µs", "assumption: how late ranks come"),
    ("straggler-sigma", float, 1.0, "", "assumption: of lognormal delays"),
    ("straggler-share", float, 0.01, "", "assumption: of slow ranks"),
    ("steps", int, 200, "", "draws of stragglers"),
    ("seed", int, 0, "", "of these draws"),
)
_GIVEN = "command line"
_OF_NETWORK = (
    ("overhead-us", "overhead", "of each collective"),
    ("latency-intra-us", "latency_intra", "one way inside a node"),
    ("latency-inter-us", "latency_inter", "one way between nodes"),
    ("added-latency-us", "added_latency", "on top of each way between nodes, fitted or not"),
    ("message-us", "message", "CPU time of a message (gloo)"),
    ("bandwidth-intra-gb", "bandwidth_intra", "GB/s inside a node"),
    ("bandwidth-inter-gb", "bandwidth_inter", "GB/s between nodes"),
    ("slowdown", "slowdown", "factor on all of these times"),
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """All but ``--json``."""
    add = parser.add_argument
    add("--ranks", type=int, required=True, metavar="N")
    add("--algorithm", choices=ALGORITHMS, default="tree", help="tree and ring: NCCL's, on GPUs (default: tree)")
    add("--update", choices=("same_step", "next_step"), default="same_step", help="default: same_step")
    add("--straggler", choices=KINDS, default="none", help="how late ranks come (default: none)")
    for name, kind, default, _, source in _OF_JOB:
        add(f"--{name}", type=kind, metavar="N", help=f"default: {default:g} ({source})")
    for name, _, help_ in _OF_NETWORK:
        add(f"--{name}", type=float, metavar="X", help=help_)
    add(
        "--shared-cores",
        type=int,
        metavar="N",
        help="all ranks share N cores, as hosts do that one machine plays (gloo)",
    )
    add(
        "--calibrate", nargs="+", metavar="FILE", help="fit to metrics.jsonl of runs; FILE@NODES says on how many nodes"
    )
    add("--plot", metavar="FILE.png", help="draw it for growing numbers of ranks")


def simulate(options: argparse.Namespace) -> SimulationReport:
    """What was asked for; draws the picture, too.

    Raises:
        ConfigurationError: a flag has an impossible value.
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
    """Whether nothing depends on it."""
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
                f"--{flag} is {value:g}: give a number {'of 0 or more' if least_is_zero else 'above 0'}"
            )
        given[name] = value
    constants = defaults(options.algorithm).having(given, "given", _GIVEN)
    if options.calibrate is None:
        return constants, None
    runs = [read_run(path, per_node, options.shared_cores) for path in options.calibrate]
    calibration = fit(runs, options.algorithm, constants)
    return calibration.constants, calibration
