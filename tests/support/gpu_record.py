"""tests/gpu_record.json: which kernels ran on which GPUs, and with what result.

`pytest -m gpu --gpu-record` adds a run. `python tests/support/gpu_record.py sanitizer FOLDER` adds
what compute-sanitizer said, from its logs memcheck.log, racecheck.log, ... in a folder.
"""

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "tests" / "gpu_record.json"
WATCHED = ("kernels", "cuquant/ops", "cuquant/gpu")
COUNTS = ("passed", "failed", "skipped")
FIELDS = {"device": str, "driver": str, "versions": dict, **dict.fromkeys(COUNTS, int)}
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
CLEAN = "0 errors"

Record = dict[str, Any]


# ---- which kernels ------------------------------------------------------------------------------


def tree(root: Path = ROOT) -> str:
    """sha256 of what `git ls-files -s` says about the kernels and what launches them, once what
    lies there is committed: git's own list may be of other files than those that run."""
    return hashlib.sha256(listing(root).encode()).hexdigest()


def listing(root: Path) -> str:
    """What git says once these files are committed, of which none is executable."""
    lines = []
    for path in sorted(_files(root), key=lambda p: p.relative_to(root).as_posix().encode()):
        data = path.read_bytes()
        digest = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        lines.append(f"100644 {digest} 0\t{path.relative_to(root).as_posix()}\n")
    return "".join(lines)


def _files(root: Path) -> list[Path]:
    found = []
    for name in WATCHED:
        place = root / name
        inside = [place] if place.is_file() else place.rglob("*")
        found += [p for p in inside if p.is_file() and "__pycache__" not in p.parts]
    return found


# ---- runs ---------------------------------------------------------------------------------------


def read(path: Path = RECORD) -> Record:
    return json.loads(path.read_text(encoding="utf-8"))


def write(record: Record, path: Path = RECORD) -> None:
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def add(run: Record, hash_: str, path: Path = RECORD) -> None:
    """Add a run; those of other kernels go, and one with the same device and versions too."""
    runs = []
    if path.exists():
        record = read(path)
        runs = record["runs"] if record["tree"] == hash_ else []
    same = [r for r in runs if _place(r) == _place(run)]
    if same and "sanitizer" in same[-1]:
        run = {**run, "sanitizer": same[-1]["sanitizer"]}
    write({"tree": hash_, "runs": [*(r for r in runs if r not in same), run]}, path)


def _place(run: Record) -> tuple:
    return run["device"], run["driver"], tuple(sorted(run["versions"].items()))


def here() -> Record:
    """The device, its driver, and the versions of what takes part."""
    import cupy
    import numpy

    import cuquant

    runtime = cupy.cuda.runtime
    name = runtime.getDeviceProperties(0)["name"].decode()
    number = runtime.driverGetVersion()
    versions = {
        "cuquant": cuquant.__version__,
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "cupy": cupy.__version__,
        "nvrtc": _nvrtc(cupy),
    }
    if importlib.util.find_spec("torch"):  # xdist's workers import it, this process need not
        versions["torch"] = importlib.metadata.version("torch")
    return {"device": name, "driver": _driver(number), "versions": versions}


def _driver(number: int) -> str:
    """The driver's own version where nvidia-smi tells it, and CUDA's that it supports."""
    cuda = f"CUDA {number // 1000}.{number % 1000 // 10}"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return cuda
    return f"{said} ({cuda})"


def _nvrtc(cupy: Any) -> str:
    """Of the machine, or of the folder of cubins that is used in its place."""
    folder = os.environ.get("CUQUANT_CUBINS")
    if not folder:
        return ".".join(map(str, cupy.cuda.nvrtc.getVersion()))
    named = Path(folder) / "nvrtc.txt"
    version = named.read_text(encoding="utf-8").strip() if named.exists() else "unknown"
    return f"{version} (cubins)"


# ---- checks -------------------------------------------------------------------------------------


def problems(record: Any) -> list[str]:
    """What is wrong with a record: its form, failures, or a sanitizer's complaints."""
    if not (isinstance(record, dict) and set(record) == {"tree", "runs"}):
        return ["a record has a tree and runs"]
    found = []
    if not re.fullmatch(r"[0-9a-f]{64}", str(record["tree"])):
        found.append(f"tree {record['tree']!r} is no sha256")
    if not (isinstance(record["runs"], list) and record["runs"]):
        return [*found, "there are no runs"]
    for number, run in enumerate(record["runs"]):
        found += [f"run {number}: {text}" for text in _problems_of(run)]
    return found


def _problems_of(run: Any) -> list[str]:
    if not isinstance(run, dict):
        return ["it is no object"]
    found = []
    for field, kind in FIELDS.items():
        if type(run.get(field)) is not kind:
            found.append(f"{field} is {run.get(field)!r}")
    if unknown := set(run) - set(FIELDS) - {"sanitizer"}:
        found.append(f"unknown fields {sorted(unknown)}")
    if found:
        return found
    if run["failed"]:
        found.append(f"{run['failed']} tests failed")
    if run["passed"] <= 0:
        found.append("nothing passed")
    for tool, result in run.get("sanitizer", {}).items():
        if tool not in TOOLS or result != CLEAN:
            found.append(f"{tool} found {result}")
    return found


# ---- compute-sanitizer --------------------------------------------------------------------------


def verdict(log: str) -> str:
    """ "0 errors" or what a log of compute-sanitizer says in its last lines."""
    if found := re.findall(r"RACECHECK SUMMARY: (\d+) hazards? displayed", log):
        return f"{found[-1]} errors"
    if found := re.findall(r"ERROR SUMMARY: (\d+) errors?", log):
        return f"{found[-1]} errors"
    return "no summary"


def add_sanitizer(folder: Path, path: Path = RECORD) -> dict[str, str]:
    """Put what the logs of a folder say under the last run of the record."""
    record = read(path)
    logs = [(tool, folder / f"{tool}.log") for tool in TOOLS]
    said = {tool: verdict(log.read_text(errors="replace")) for tool, log in logs if log.exists()}
    own = [run for run in record["runs"] if "cubins" not in run["versions"]["nvrtc"]]
    (own or record["runs"])[-1]["sanitizer"] = said
    write(record, path)
    return said


if __name__ == "__main__":
    if sys.argv[1:2] == ["sanitizer"] and len(sys.argv) == 3:
        sys.stdout.write(f"{add_sanitizer(Path(sys.argv[2]))}\n")
    else:
        raise SystemExit(__doc__)
