"""Orchestrators of the CUDA kernels: facts of formats, launches, the order of steps."""
