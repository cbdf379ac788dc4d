"""Measuring: how fast operations are on this GPU, beside its ceilings and beside other libraries.

timing     a round of calls, as a CUDA graph where it can be captured
gpu        what a benchmark needs of CuPy; tests put NumPy in its place
roofline   the ceilings (copy, read, write), and the picture of results beside them
peers      other libraries, in the same process and on the same data
report     what the results of all benchmarks share, as values and as JSON
quantize   the benchmark of quantize and dequantize; quantize_report has its results
tiles      what Hopper's tiles take, from which the way to divide a product is chosen
checked    products: what some columns are in float64, and how near is right
matmul     that of linear, with matmul_report and matmul_peers; product_report has what it shares
gemm       that of products of two quantized arrays, with gemm_report and gemm_peers
formats    memory, speed and error of formats on the demo's model
markdown   tables of results, for the guide to benchmarks; speedup draws one
"""
