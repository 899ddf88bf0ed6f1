"""Benchmarks of the kernels: each part runs in its own process, and results are saved after each case.

``scripts/gpu benchmark`` runs it. A part that crashes or times out loses only its remaining cases.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.benchmarks.gpu import results
from scripts.results_files import write

if TYPE_CHECKING:
    from scripts.benchmarks.gpu.lab import Case, Lab, Part

SHARES = (36, 45, 27, 20, 6, 16, 24, 20, 20, 126, 30, 110)
"""Shares of the time limit, in the order of ``results.PARTS``; with the default limit, these are seconds. Time that a
part does not use goes to the parts after it."""

START_UP = 25.0
"""Seconds that a part may take beyond its share, for imports, the first compilation, and its last case."""

LONGEST = 2.0
"""Time limit of one comparison of a case, in seconds."""

INTERRUPTED, UNFINISHED = "interrupted", "not finished"

LIKE_THE_LAST = 3
"""A part ends after this many consecutive cases with the same error."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Return 0 if all parts succeeded, 1 if one did not, 2 without a GPU."""
    options = _parser().parse_args(arguments)
    if options.one:
        return _one(options)
    parts = options.parts or [name for name in results.PARTS if name != "torchao" or find_spec("torchao")]
    shares = dict(zip(results.PARTS, SHARES))
    whole = sum(shares[name] for name in parts)
    data = results.empty(options.commit, options.dirty, options.run, options.smoke)
    deadline = time.monotonic() + options.seconds
    path: Path | None = None
    old: dict[str, Any] | None = None
    for place, name in enumerate(parts):
        # In a smoke run each part may take all the time that is left: it tests that parts run, not their figures.
        seconds = (deadline - time.monotonic() - START_UP) * (1.0 if options.smoke else shares[name] / whole)
        whole -= shares[name]
        print(f"[{place + 1}/{len(parts)}] {name} …", flush=True)
        environment, part = _in_a_process(name, seconds, options)
        data["parts"][name] = results.stamped(part, data)
        print(_line_of(name, part), flush=True)
        if environment is not None:
            data |= environment
            if path is None:
                path = results.file_of(options.out, environment["device"]["name"])
                old = results.earlier(path)
            write(path, results.merged(old, data))
        if part["problem"] == INTERRUPTED:
            break
    if path is None:
        print("benchmark: no part reached the device; nothing was written", file=sys.stderr)
        return 1
    print(f"results: {path}")
    return int(any(part["status"] != "done" or part["problem"] for part in data["parts"].values()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("kernels/results"), help="folder of the results")
    parser.add_argument("--seconds", type=float, default=480.0, help="for all parts together")
    parser.add_argument("--parts", nargs="+", choices=results.PARTS, help="only these")
    results.add_flags(parser)
    parser.add_argument("--one", choices=results.PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    return parser


def _in_a_process(
    name: str, seconds: float, options: argparse.Namespace
) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Measure one part in its own process. Return (device and versions, the part)."""
    with tempfile.TemporaryDirectory(prefix="fp8dist-benchmark-") as folder:
        command = [sys.executable, "-m", "scripts.benchmarks.gpu.kernels", "--one", name, "--out", folder]
        command += ["--seconds", str(max(1.0, seconds)), "--into", str(options.out), "--run", options.run]
        command += [f"--commit={options.commit}"] if options.commit else []
        command += [flag for flag in ("--smoke", "--dirty") if getattr(options, flag.removeprefix("--"))]
        start, problem = time.monotonic(), None
        try:
            done = subprocess.run(command, timeout=max(1.0, seconds) + START_UP, check=False)
            if done.returncode:
                problem = f"its process ended with status {done.returncode}"
        except subprocess.TimeoutExpired:
            problem = f"not done after {time.monotonic() - start:.0f} s"
        except KeyboardInterrupt:
            problem = INTERRUPTED
        kept = Path(folder, "part.json")
        if kept.exists():
            content = json.loads(kept.read_text())
        else:
            nothing = {"status": "failed", "seconds": time.monotonic() - start, "cases": [], "figures": {}}
            content = {"environment": None, "part": {**nothing, "problem": problem}}
        if problem:
            content["part"]["problem"] = problem
            content["part"]["status"] = "cut off" if content["part"]["cases"] else "failed"
        return content["environment"], content["part"]


def _one(options: argparse.Namespace) -> int:
    """Measure one part in this process."""
    import torch

    if not torch.cuda.is_available():
        if not options.smoke:
            print("benchmark: no GPU", file=sys.stderr)
            return 2
        from tests.support import interpreter  # Must run before a kernel is imported.

        interpreter.install()
    from scripts.benchmarks.gpu import environment
    from scripts.benchmarks.gpu.lab import Lab
    from scripts.benchmarks.gpu.stopwatch import stopwatch_of

    torch.manual_seed(0)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    facts = environment.facts(device)
    target = options.out / "part.json"

    def keep(part: Mapping[str, Any]) -> None:
        write(target, {"environment": facts, "part": part})
        if not part["cases"]:
            return
        # Into the results of all parts as well: this run may be cut off before its main process writes them.
        new = {**results.empty(options.commit, options.dirty, options.run, options.smoke), **facts}
        new["parts"] = {options.one: results.stamped(part, new)}
        path = results.file_of(options.into, facts["device"]["name"])
        write(path, results.merged(results.earlier(path), new))

    part = _part_named(options.one)
    try:
        run_part(part, Lab(stopwatch_of(device), options.smoke), options.seconds, keep)
    except KeyboardInterrupt:
        return 130
    return 0


def _part_named(name: str) -> Part:
    from scripts.benchmarks.gpu.experts import Experts
    from scripts.benchmarks.gpu.jobs import Jobs
    from scripts.benchmarks.gpu.linears import Crossover, Linears, Torchao
    from scripts.benchmarks.gpu.matmuls import Matmuls
    from scripts.benchmarks.gpu.memory import Memory
    from scripts.benchmarks.gpu.sustained import Sustained
    from scripts.benchmarks.gpu.updates import Updates
    from scripts.benchmarks.llama_shapes import KINDS

    layers: tuple[Part, ...] = (Linears(), Experts(), Crossover(), Torchao())
    parts: tuple[Part, ...] = (*(Matmuls(kind) for kind in KINDS), *layers, Memory(), Updates(), Sustained(), Jobs())
    return next(part for part in parts if part.name == name)


def run_part(
    part: Part,
    lab: Lab,
    seconds: float,
    keep: Callable[[Mapping[str, Any]], None],
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """Measure the cases of a part until the time is up. Calls ``keep`` after each case.

    A case that raises gets a "problem". The part ends after an error that loses the device, or when several consecutive
    cases fail with the same error.
    """
    start = clock()
    cases: list[Case] = []
    result: dict[str, Any] = {"status": "cut off", "seconds": 0.0, "problem": UNFINISHED, "cases": cases, "figures": {}}
    keep(result)
    planned = part.plan(lab)
    for place, one in enumerate(planned):
        left = seconds - (clock() - start)
        if left <= 0:
            result["status"], result["problem"] = "cut off", f"out of time after {place} of {len(planned)} cases"
            break
        # The other 40 % of the share are for checking results and compiling.
        lab.left, lab.share = left, left / (len(planned) - place)
        lab.seconds = 0.0 if lab.smoke else min(LONGEST, 0.6 * lab.share)
        case, fatal = measured(part, lab, one)
        cases.append(case)
        result["seconds"] = clock() - start
        if fatal or _fails_alike(cases):
            result["status"], result["problem"] = "failed", case["problem"]
            break
        result["figures"] = part.figures(cases)
        keep(result)
    else:
        result["status"], result["problem"] = "done", None
    result["seconds"] = clock() - start
    result["figures"] = part.figures(cases)
    result["problem"] = result["problem"] or next((case["problem"] for case in cases if case.get("problem")), None)
    keep(result)
    return result


def measured(part: Part, lab: Lab, planned: Any) -> tuple[Case, bool]:
    """Measure one case. Return (the case, True if the device is lost)."""
    try:
        return part.measure(lab, planned), False
    except Exception as error:
        text = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
        return {
            "name": str(getattr(planned, "name", planned)),
            "problem": text,
        }, "CUDA error" in text and "CUBLAS" not in text


def _fails_alike(cases: Sequence[Case]) -> bool:
    last = [case.get("problem") for case in cases[-LIKE_THE_LAST:]]
    return len(last) == LIKE_THE_LAST and last[0] is not None and len(set(last)) == 1


def _line_of(name: str, part: Mapping[str, Any]) -> str:
    text = f"    {name}: {part['status']}, {len(part['cases'])} cases in {part['seconds']:.0f} s"
    return f"{text}; {part['problem']}" if part["problem"] else text


if __name__ == "__main__":
    sys.exit(main())
