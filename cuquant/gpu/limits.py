"""What launch rules know of GPUs, by compute capability: 90 for 9.0."""

# Bytes of shared memory that a thread block may have.
SHARED = {75: 64 << 10, 80: 163 << 10, 86: 99 << 10, 87: 163 << 10, 89: 99 << 10, 90: 227 << 10}
SHARED |= {100: 227 << 10, 103: 227 << 10, 120: 99 << 10, 121: 99 << 10}
SHARED_OF_ALL = SHARED[86]  # on every GPU from sm_80 on


def is_hopper(arch: int) -> bool:
    """Whether a GPU has the clusters, and the shared memory beside them, that rules were measured
    with. Newer ones have them too; nothing was measured there."""
    return 90 <= arch < 100
