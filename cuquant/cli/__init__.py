"""The command `cuquant`: its commands, and how errors become messages and exit codes.

0: done. 1: something the user can mend, said in one line. 2: wrong usage. 128 + n: signal n came.
"""

import inspect
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Annotated, Any, NoReturn

import typer

import cuquant
from cuquant.cli import comparison, conversion, files, inspection, system
from cuquant.cli.advice import for_shell, options_of
from cuquant.cli.bench import bench
from cuquant.cli.demo import demo
from cuquant.cli.options import Commands
from cuquant.cli.show import abbreviated, console, printable
from cuquant.errors import BackendUnavailable

# FormatError is a ValueError. Everything else is a defect of ours and keeps its traceback.
MENDABLE = (ValueError, OSError, BackendUnavailable, MemoryError)


class Main(Commands):
    """All commands; an error that the user can mend is one line on stderr and exit code 1."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with _short_errors_of_usage():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        try:
            with _short_errors_of_usage():
                return super().invoke(ctx)
        except BrokenPipeError:  # `cuquant formats | head`: typer leaves quietly
            raise
        except MENDABLE as error:
            if ctx.params["debug"]:
                raise
            command = self.get_command(ctx, ctx.invoked_subcommand or "")
            text = for_shell(explain(error), options_of(command))
            line = f"error: {printable(text, limit=2000)}"
            console(stderr=True).print(
                line, style="red", markup=False, highlight=False, soft_wrap=True
            )
            raise typer.Exit(1) from error


@contextmanager
def _short_errors_of_usage() -> Iterator[None]:
    """They repeat what was typed, which may be long."""
    try:
        yield
    except Exception as error:
        if isinstance(message := getattr(error, "message", None), str):
            text = message.replace("Value error, ", "", 1)  # pydantic's, which typer asks
            error.message = abbreviated(text, 1000)  # type: ignore[attr-defined]
        raise


def explain(error: BaseException) -> str:
    """The message of an error; an OSError's names the file without its number."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{abbreviated(str(error.filename), 1000)}: {error.strerror}"
    return str(error) or ("out of memory" if isinstance(error, MemoryError) else repr(error))


def in_paragraphs(command: Callable[..., None]) -> str:
    """The docstring of a command, whose lines rich would break where the source does."""
    text = inspect.getdoc(command) or ""
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def _version(asked: bool) -> None:
    if asked:
        print(f"cuquant {cuquant.__version__}")
        raise typer.Exit


app = typer.Typer(
    cls=Main,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", callback=_version, is_eager=True, help="Print the version."
        ),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option("--debug", envvar="CUQUANT_DEBUG", help="Show the traceback of an error."),
    ] = False,
) -> None:
    """Quantize model files and look into them, in every format people use."""


for command in (
    files.quantize,
    conversion.convert,
    comparison.compare,
    inspection.inspect,
    system.formats,
    system.doctor,
    system.cache,
    system.precompile,
    demo,
):
    app.command(help=in_paragraphs(command))(command)
app.add_typer(bench)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line `arguments` (None: that of the process) and exit."""
    for stream in (sys.stdout, sys.stderr):  # names hold what an old terminal cannot print
        with suppress(AttributeError, ValueError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP, and nohup ignores it
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _leave)
    code: Any = 0
    try:
        app(arguments)
    except SystemExit as leaving:
        code = leaving.code
    written = [_flush(stream) for stream in (sys.stdout, sys.stderr)]
    raise SystemExit(code if code or all(written) else 1)


def _flush(stream: Any) -> bool:
    """Print what is left; False, and quiet from now on, where it cannot be: nobody reads it."""
    if stream is None:  # pythonw on Windows
        return True
    try:
        stream.flush()
    except (OSError, ValueError) as error:
        is_pipe = isinstance(error, (BrokenPipeError, ValueError))
        if not is_pipe and stream is sys.stdout:
            print(f"error: the output cannot be written: {error.strerror}", file=sys.stderr)
        with suppress(OSError, ValueError, AttributeError):  # the interpreter flushes once more
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return False
    return True


def _leave(number: int, _: object) -> NoReturn:
    """Exit by an exception, so that half-written files are removed on the way out."""
    signal.signal(number, signal.SIG_IGN)  # a second one must not interrupt that
    raise SystemExit(128 + number)
