"""Operations: a folder each, whose `door` checks, goes to the reference or to a GPU, and answers.

It may import everything below: formats, reference, libraries, gpu and array. Inside it imports go
up from cpp and geometry over layout, dequantize, quantize and matmul to programs and precompile.
"""
