"""Benchmarks of the kernels: each part runs in its own process, and results are saved after each case.

``scripts/gpu benchmark`` runs it. A part that crashes or times out loses only its remaining cases.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.benchmarks.gpu import results
from scripts.results_files import write

if TYPE_CHECKING:
    from scripts.benchmarks.gpu.lab import Case, Lab, Part

START_UP = 25.0
"""Seconds that a part may take beyond its share, for imports, the first compilation, and its last case."""

LONGEST = 2.0
"""Time limit of one comparison of a case, in seconds."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. Return 0 if all parts succeeded, 1 if one did not, 2 without a GPU."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("kernels/results"), help="folder of the results")
    parser.add_argument("--seconds", type=float, default=480.0, help="for all parts together")
    parser.add_argument("--parts", nargs="+", choices=results.PARTS, help="only these")
    results.add_flags(parser)
    parser.add_argument("--one", choices=results.PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    if options.one:
        return _one(options)
    parts = options.parts or [name for name in results.PARTS if name != "torchao" or find_spec("torchao")]
    whole, end = sum(results.PARTS[name] for name in parts), time.monotonic() + options.seconds
    statuses = []
    for place, name in enumerate(parts):
        # In a smoke run each part may take all the time that is left: it tests that parts run, not their figures.
        share = 1.0 if options.smoke else results.PARTS[name] / whole
        seconds = max(1.0, share * (end - time.monotonic() - START_UP))
        whole -= results.PARTS[name]
        print(f"[{place + 1}/{len(parts)}] {name} …", flush=True)
        command = [sys.executable, "-m", "scripts.benchmarks.gpu.kernels", *given, "--one", name]
        try:
            done = subprocess.run([*command, "--seconds", str(seconds)], timeout=seconds + START_UP, check=False)
            statuses.append(done.returncode)
        except subprocess.TimeoutExpired:
            statuses.append(1)
        except KeyboardInterrupt:  # What was measured is in the results.
            return 1
        if statuses[-1] == 2:  # There is no GPU.
            return 2
        if statuses[-1]:
            print(f"    {name}: not complete (status {statuses[-1]})", flush=True)
    return int(any(statuses))


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
    new = {**results.empty(options.commit, options.dirty, options.run, options.smoke), **facts}
    path = results.file_of(options.out, facts["device"]["name"])
    old = results.earlier(path)

    def keep(part: Mapping[str, Any]) -> None:
        write(path, results.merged(old, {**new, "parts": {options.one: results.stamped(part, new)}}))

    part = run_part(_part_named(options.one), Lab(stopwatch_of(device), options.smoke), options.seconds, keep)
    problem = f"; {part['problem']}" if part["problem"] else ""
    cases = f"{len(part['cases'])} cases in {part['seconds']:.0f} s"
    print(f"    {options.one}: {part['status']}, {cases}{problem}", flush=True)
    return int(part["problem"] is not None)


def _part_named(name: str) -> Part:
    from scripts.benchmarks.gpu.experts import Experts
    from scripts.benchmarks.gpu.jobs import Jobs
    from scripts.benchmarks.gpu.linears import Crossover, Linears, Torchao
    from scripts.benchmarks.gpu.matmuls import Matmuls
    from scripts.benchmarks.gpu.memory import Memory
    from scripts.benchmarks.gpu.sustained import Sustained
    from scripts.benchmarks.gpu.updates import Updates

    if name.startswith("matmul_"):
        return Matmuls(name.removeprefix("matmul_"))
    parts: dict[str, Part] = {"linears": Linears(), "experts": Experts(), "crossover": Crossover()}
    parts |= {"torchao": Torchao(), "memory": Memory(), "update": Updates(), "sustained": Sustained(), "job": Jobs()}
    return parts[name]


def run_part(
    part: Part,
    lab: Lab,
    seconds: float,
    keep: Callable[[Mapping[str, Any]], None],
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """Measure the cases of a part until the time is up. Calls ``keep`` after each case.

    A case that raises gets a "problem". The part ends after an error that loses the device.
    """
    start = clock()
    cases: list[Case] = []
    # What is read if this process is ended.
    result: dict[str, Any] = {"status": "cut off", "problem": "not finished"}
    result |= {"seconds": 0.0, "cases": cases, "figures": {}}
    keep(result)
    planned = part.plan(lab)
    for place, one in enumerate(planned):
        left = seconds - (clock() - start)
        if left <= 0:
            result["problem"] = f"out of time after {place} of {len(planned)} cases"
            break
        # The other 40 % of the share are for checking results and compiling.
        lab.share = left / (len(planned) - place)
        lab.seconds = 0.0 if lab.smoke else min(LONGEST, 0.6 * lab.share)
        try:
            cases.append(part.measure(lab, one))
        except Exception as error:
            problem = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
            cases.append({"name": str(getattr(one, "name", one)), "problem": problem})
            if "CUDA error" in problem and "CUBLAS" not in problem:
                result |= {"status": "failed", "problem": problem}
                break
        result |= {"seconds": clock() - start, "figures": part.figures(cases)}
        keep(result)
    else:
        problems = [case["problem"] for case in cases if case.get("problem")]
        failed = bool(cases) and len(problems) == len(cases)
        result |= {"status": "failed" if failed else "done", "problem": problems[0] if problems else None}
    result |= {"seconds": clock() - start, "figures": part.figures(cases)}
    keep(result)
    return result


if __name__ == "__main__":
    sys.exit(main())
