"""Measuring: how fast operations are on this GPU, beside its ceilings and beside other libraries.

timing     a round of calls, as a CUDA graph where it can be captured
gpu        what a benchmark needs of CuPy; tests put NumPy in its place
roofline   the ceilings (copy, read, write), and the picture of results beside them
peers      other libraries, in the same process and on the same data
report     results as values, as JSON and as rows of a table
quantize   the benchmark of quantize and dequantize
matmul     that of linear; matmul_peers and matmul_report are what peers and report are to quantize
"""
