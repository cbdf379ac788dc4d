"""The exceptions that cuquant raises beside ValueError and TypeError."""


class FormatError(ValueError):
    """A file or a piece of packed data is malformed, truncated or inconsistent."""


class BackendUnavailable(RuntimeError):
    """A GPU, CuPy or NVRTC is needed and not here; the message names the pip command."""


class CompileError(RuntimeError):
    """NVRTC rejected a kernel; the message names the kernel, the true file and line."""
