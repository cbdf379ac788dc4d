"""`dequantize`: its public function, QuantArrays on a GPU, and the kernels that decode.

It may import ops.layout and what that may import.
"""
