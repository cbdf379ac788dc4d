"""`quantize`: its public function, arrays on a GPU, and the kernels that encode.

It may import ops.dequantize, whose kernels decode nested scales, and what that may import.
"""
