"""Products with quantized operands: the public functions, the choice of a kernel, and the kernels.

A family of kernels is a module (any, stream, hopper, ggml, q8_1, vendor); `choose` names the one of
a product. It may import ops.layout, ops.dequantize and what these may import.
"""
