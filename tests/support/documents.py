"""README.md and the guides in examples/: their blocks, and what running them prints.

A block is a fence. A ```text fence right behind one of Python or sh is what that block prints.
Lines <!-- NEED --> and <!-- /NEED --> around blocks say that they need a GPU with CuPy (gpu),
PyTorch (torch), or transformers and PEFT beside it (peft). A block of C++ begins with the name of
its file.

`python tests/support/documents.py FILE ... [NEED ...]` runs each document in a new folder of the
current one, called as the document is, as somebody does who copies its blocks one after the other,
and writes what they printed to stdout, as JSON: one list for each document.
"""

import importlib.util
import io
import json
import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
GUIDES = sorted((ROOT / "examples").glob("*.md"))
DOCUMENTS = [README, *GUIDES]
NEEDS = ("gpu", "torch", "peft")


@dataclass(frozen=True)
class Block:
    """One fence.

    Attributes
    ----------
    language
        "python", "sh", "cpp" or "text".
    text
        Without the fences.
    line
        Of the opening fence, from 1.
    needs
        What must be there.
    output
        What it prints; None where the document does not show it.
    """

    language: str
    text: str
    line: int
    needs: frozenset[str]
    output: str | None = None


def blocks(document: Path) -> list[Block]:
    """All blocks of a document but outputs, which belong to the block before."""
    found: list[Block] = []
    needs: set[str] = set()
    lines = document.read_text(encoding="utf-8").splitlines()
    inside, before = None, False  # the line of the open fence; whether a block ended just above
    for number, line in enumerate(lines, 1):
        if inside is not None:
            if line != "```":
                continue
            language = lines[inside - 1][3:]
            text = "".join(f"{held}\n" for held in lines[inside : number - 1])
            if language == "text" and before:
                last = found.pop()
                found.append(Block(last.language, last.text, last.line, last.needs, text))
            else:
                found.append(Block(language, text, inside, frozenset(needs)))
            inside, before = None, language in ("python", "sh")
        elif line.startswith("```"):
            inside = number
        elif mark := re.fullmatch(r"<!-- (/?)(\w+) -->", line):
            if mark[2] in NEEDS:
                (needs.discard if mark[1] else needs.add)(mark[2])
        elif line:
            before = False
    assert inside is None and not needs, f"{document}: a fence or a marker is not closed"
    return found


def between(text: str, marker: str) -> str:
    """What stands between <!-- marker --> and <!-- /marker -->."""
    name = re.escape(marker)
    found = re.search(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", text, re.DOTALL)
    assert found, f"no {marker} markers"
    return found[1]


def run(
    documents: list[Path], folder: Path, needs: frozenset[str]
) -> dict[Path, list[tuple[Block, str]]]:
    """Each document's blocks with an output, and what they print; all in one process.

    Blocks whose needs are not among `needs` are left out; so are shell commands without an output,
    which install things or take long.
    """
    warnings = ["-W", "error", "-W", "ignore::FutureWarning:transformers.modeling_utils"]  # of PEFT
    command = [sys.executable, *warnings, __file__, *map(str, documents), *sorted(needs)]
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "FORCE_COLOR")}
    # No empty entry: it stands for the working folder, where a document's folder named bitsandbytes
    # would be a package.
    paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    # g++ finds CUDA's headers and the driver where pip and containers put them.
    environment["CPATH"] = os.pathsep.join(map(str, headers()))
    environment["LIBRARY_PATH"] = environment.get("LD_LIBRARY_PATH", "")
    environment["PATH"] = os.pathsep.join([str(_commands(folder)), environment["PATH"]])
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = {}
    for document, printed in zip(documents, json.loads(done.stdout), strict=True):
        chosen = [block for block in blocks(document) if _runs(block, needs)]
        pairs = zip(chosen, printed, strict=True)
        found[document] = [(block, text) for block, text in pairs if block.output is not None]
    return found


def headers() -> list[Path]:
    """Folders with cuda.h that pip installed, the newest CUDA last."""
    spec = importlib.util.find_spec("nvidia")
    roots = (spec.submodule_search_locations or ()) if spec else ()
    return sorted(file.parent for root in roots for file in Path(root).glob("*/include/cuda.h"))


def _runs(block: Block, needs: frozenset[str]) -> bool:
    shown = block.language == "sh" and block.output is not None
    return (shown or block.language in ("python", "cpp")) and block.needs <= needs


def _commands(folder: Path) -> Path:
    """A folder with the commands `python` and `cuquant` of this interpreter and checkout."""
    made = folder / ".commands"
    made.mkdir(exist_ok=True)
    for name, arguments in (("python", ""), ("cuquant", "-m cuquant")):
        script = made / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        script.chmod(0o755)
    return made


def main(documents: list[Path], needs: frozenset[str]) -> None:
    """Run documents, each in a namespace and a folder of its own; see the top of this module."""
    printed, start = [], Path.cwd()
    for document in documents:
        folder = start / document.stem
        folder.mkdir()
        os.chdir(folder)
        printed.append(_printed(document, needs))
    json.dump(printed, sys.stdout)


def _printed(document: Path, needs: frozenset[str]) -> list[str]:
    printed, names = [], {"__name__": "__main__"}
    for block in blocks(document):
        if not _runs(block, needs):
            continue
        if block.language == "python":
            code = compile("\n" * block.line + block.text, str(document), "exec")
            with redirect_stdout(io.StringIO()) as output:
                exec(code, names)
            printed.append(output.getvalue())
        elif block.language == "cpp":
            Path(block.text.split("\n")[0].removeprefix("// ")).write_text(block.text)
            printed.append("")
        else:
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", block.text],
                stdout=subprocess.PIPE, text=True, check=True,
            )  # fmt: skip
            printed.append(done.stdout)
    return printed


if __name__ == "__main__":
    main([Path(a) for a in sys.argv[1:] if a not in NEEDS], frozenset(NEEDS) & {*sys.argv[1:]})
