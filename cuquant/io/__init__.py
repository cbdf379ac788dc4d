"""Model files: quantized tensors saved and loaded, checkpoints quantized tensor by tensor.

It may import whatever computes; how bytes lie in a file is known in `container` alone.
"""
