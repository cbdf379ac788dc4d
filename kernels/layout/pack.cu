// Codes to packed words and back, in every order. pack: a thread makes one word. unpack: one code.
#include "format.cuh"

namespace cuquant {

template <class Packing, typename Code, typename Word>
__global__ void pack(
    const Code* __restrict__ codes, Word* __restrict__ packed, i64 rows, i64 columns, i64 row_words, u32 pad) {
    const i64 item = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (item >= rows * row_words) return;
    const Code* row = codes + item / row_words * columns;
    packed[item] = static_cast<Word>(Packing::word(item % row_words, [&](i64 i) -> u32 {
        return i < columns ? row[i] : pad;
    }));
}

template <class Packing, typename Code, typename Word>
__global__ void unpack(
    const Word* __restrict__ packed, Code* __restrict__ codes, i64 rows, i64 columns, i64 row_words) {
    const i64 item = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (item >= rows * columns) return;
    codes[item] = static_cast<Code>(Packing::get(packed + item / columns * row_words, item % columns));
}

}  // namespace cuquant
