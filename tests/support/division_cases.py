"""What tests of the rules that divide products share: GPUs, formats and problems of every size."""

import prepack_cases
from hypothesis import strategies as st

import cuquant as cq
from cuquant.ops.layout import packed_weight as prepacked
from cuquant.ops.layout.packed_weight import Groups

ARCHS = (75, 80, 86, 89, 90, 100, 120)
# Bytes of shared memory that a block may have (CUDA C programming guide, compute capabilities).
SHARED = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
LAID = {name: cq.get_format(name) for name in prepack_cases.LAID}
TABLES = sorted({prepacked.table_bytes(fmt) for fmt in LAID.values()})

sizes = st.one_of(st.integers(1, 300), st.integers(1, 70_000), st.integers(1, 2_000_000))
depths = st.one_of(st.integers(1, 300), st.integers(1, 30_000), st.integers(1, 400_000))
kinds = st.one_of(
    st.builds(Groups, st.just(0), st.just(1)),
    st.builds(Groups, st.integers(1, 300), st.just(1)),
    st.builds(Groups, st.just(1), st.sampled_from([2, 4])),
)
processors = st.sampled_from([1, 2, 14, 20, 46, 68, 82, 108, 132, 144, 170])
