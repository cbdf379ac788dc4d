"""`python -m cuquant.ops.print_source`."""

import subprocess
import sys

import pytest

from cuquant.ops import print_source


def test_the_text_of_an_operation_is_printed(kernels, operation, capsys):
    print_source.main(["quantize", "nf4"])
    text = capsys.readouterr().out
    assert text.count("using i64") == 1, "kernels of one text print it once"
    assert all(f"// cuquant::affine<formats::twice, {n}>\n" in text for n in (3, 10, 11))
    for wrong in ([], ["matmul", "nf4"], ["quantize", "nf5"]):
        with pytest.raises(SystemExit, match=r"quantize|nf5"):
            print_source.main(wrong)


def test_it_runs_as_a_module_without_a_warning():
    command = [sys.executable, "-W", "error", "-m", "cuquant.ops.print_source", "none", "nf4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.startswith(
        "usage: python -m cuquant.ops.print_source"
    )
