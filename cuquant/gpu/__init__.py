"""GPUs: sources to text, cubins and loaded kernels; devices, streams, memory and the vendor's GEMM.

It knows no format. It may import errors, disk, lazy and libraries.
"""
