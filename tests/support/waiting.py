"""Calls that wait for a GPU, which torch's debug mode names."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def refused(torch: Any) -> Iterator[None]:
    """RuntimeError inside for an operation of torch's that waits for the GPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # once a process torch says that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
