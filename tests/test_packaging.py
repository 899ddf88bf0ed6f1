"""The wheel and the sdist contain every module, including kernels, and the editable install maps them."""

from __future__ import annotations

import configparser
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import fp8dist
from fp8dist.parallel.torch_internals import TESTED
from tests.support.main_job import SIZE

ROOT = Path(__file__).resolve().parents[1]
MODULES = sorted(
    ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    for root, package in ((ROOT, "fp8dist"), (ROOT / "kernels", "fp8dist_kernels"))
    for path in (root / package).rglob("*.py")
)


def _run(*command: str, cwd: Path, **variables: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONWARNINGS")} | variables
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _bare_python(home: Path) -> str:
    """Return the interpreter of a new venv with torch and other dependencies, but without fp8dist."""
    venv.create(home, with_pip=False)
    (site,) = (home / "lib").glob("python*/site-packages")
    # Python does not follow a .pth in that folder, such as our own editable one.
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])
    return str(home / "bin" / "python")


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(wheel made from the sdist, sdist), built from a copy of the source."""
    source = tmp_path_factory.mktemp("source")
    for name in ("fp8dist", "kernels"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    _run(sys.executable, "-m", "build", "--no-isolation", "--sdist", "--outdir", "out", cwd=source)
    (sdist,) = (source / "out").glob("*.tar.gz")
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (tree,) = unpacked.iterdir()
    _run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", "out", cwd=tree)
    (wheel,) = (tree / "out").glob("*.whl")
    return wheel, sdist


@pytest.mark.long
def test_wheel_imports_every_module_in_a_clean_venv(distributions: tuple[Path, Path], tmp_path: Path) -> None:
    """The installed wheel also launches a program, without a folder launch/."""
    wheel, _ = distributions
    (tmp_path / "program.py").write_text("import os, sys\nprint(os.environ['RANK'], *sys.argv[1:])\n")
    python = _bare_python(tmp_path / "venv")
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:  # As pip unpacks a pure wheel, but without pip's start-up time.
        archive.extractall(site)
    script = (
        "import importlib, sys\n"
        f"for name in {MODULES!r}:\n"
        "    try:\n"
        "        module = importlib.import_module(name)\n"
        "    except ImportError as error:  # A trainer that is not installed.\n"
        "        extra = name.removeprefix('fp8dist.integrations.')\n"
        "        assert f\"pip install 'fp8dist[{extra}]'\" in str(error), (name, error)\n"
        "        continue\n"
        f"    assert module.__file__.startswith({str(site)!r}), (name, module.__file__)\n"
        "assert 'kernels' not in sys.modules\n"
        "print(len(sys.modules['fp8dist'].__all__), flush=True)\n"
        "sys.exit(sys.modules['fp8dist.cli.main'].main(['launch', 'program.py', '--steps']))\n"
    )
    out = _run(python, "-I", "-c", script, cwd=tmp_path, NPROC="1")
    assert out.splitlines()[-2:] == [str(len(fp8dist.__all__)), "0 --steps"]


@pytest.mark.slow
def test_sdist_and_wheel_carry_licence_type_marker_and_tables(distributions: tuple[Path, Path]) -> None:
    wheel, sdist = distributions
    names = zipfile.ZipFile(wheel).namelist()
    assert "fp8dist/py.typed" in names
    tables = {str(path.relative_to(ROOT / "kernels")) for path in (ROOT / "kernels").rglob("tables/*.json")}
    assert tables
    assert tables <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    with tarfile.open(sdist) as archive:
        assert any(name.endswith("kernels/fp8dist_kernels/reference/casts.py") for name in archive.getnames())


@pytest.mark.long
def test_a_clone_that_is_not_installed_runs(tmp_path: Path) -> None:
    """PYTHONPATH is enough: no symlink, no copy, no editable install."""
    flags = [*SIZE, "--steps", "2", "--precision", "fp8", "--out", "run"]
    script = (
        "import fp8dist, fp8dist_kernels, runpy\n"
        "print(fp8dist.__file__, fp8dist_kernels.__file__)\n"
        "runpy.run_module('launch.train_gpt', run_name='__main__')\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"}
    command = [_bare_python(tmp_path / "bare"), "-c", script, *flags]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    places = [ROOT / "fp8dist" / "__init__.py", ROOT / "kernels" / "fp8dist_kernels" / "__init__.py"]
    assert done.stdout.splitlines()[0].split() == [str(place) for place in places]
    assert (tmp_path / "run" / "summary.json").exists()


def test_version_is_written_once_in_metadata_and_package() -> None:
    assert importlib.metadata.version("fp8dist") == fp8dist.__version__


def _release(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def test_what_is_claimed_was_run() -> None:
    """Each Python and the oldest torch have passed scripts/test-versions."""
    rows = json.loads((ROOT / "scripts" / "results" / "versions.json").read_text())
    passed = [row for row in rows if row["passed"] and not row["failed"]]
    pythons, releases = ({_release(row[name]) for row in passed} for name in ("python", "torch"))
    claims = configparser.ConfigParser()
    claims.read(ROOT / "setup.cfg")
    classifiers = re.findall(r"Python :: (3\.\d+)", claims["metadata"]["classifiers"])
    assert {_release(version) for version in classifiers} == pythons
    assert claims["options"]["python_requires"] == ">={}.{}".format(*min(pythons))
    (oldest,) = re.findall(r"^torch>=([\d.]+)$", claims["options"]["install_requires"], re.MULTILINE)
    assert _release(oldest) == min(releases)
    assert list(map(_release, TESTED)) == sorted(releases)
