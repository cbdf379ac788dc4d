"""QuantArray and PackedWeight: component arrays that stand for one array, sliced and compared.

It may import formats, reference and libraries, and launches nothing: operations register themselves
in `components.OPERATIONS`.
"""
