"""`python -m cuquant.ops.print_source quantize nf4`: what NVRTC is given for a format."""

import sys
from collections import defaultdict

from cuquant.formats import get_format
from cuquant.gpu.jit import source
from cuquant.ops import programs


def main(arguments: list[str]) -> None:
    """Print the texts of an operation for a format: each once, after the kernels made of it."""
    known = programs.PROGRAMS
    if len(arguments) != 2 or arguments[0] not in known:
        usage = "usage: python -m cuquant.ops.print_source OPERATION FORMAT"
        raise SystemExit(f"{usage}\nOPERATION: {' | '.join(sorted(known))}")
    operation, name = arguments
    try:
        fmt = get_format(name)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    texts: defaultdict[str, list[str]] = defaultdict(list)
    for program in known[operation](fmt):
        texts[source(program)].append(program.name)
    for text, names in texts.items():
        sys.stdout.write("".join(f"// {name}\n" for name in names) + text)


if __name__ == "__main__":
    main(sys.argv[1:])
