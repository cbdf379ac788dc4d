// Tiles of arrays whose blocks run along an axis that is not the last, turned in shared memory.
#pragma once
#include "format/chunk.cuh"

namespace cuquant {

// kDepth x kWidth elements of [depth, width], in shared memory by column. A column's elements lie in
// words of kPair, and its pitch is odd, so that columns do not meet in a bank.
template <typename T, int kDepth, int kWidth>
struct Turned {
    static constexpr int kVector = 16 / sizeof(T);       // elements of a 16-byte load
    static constexpr int kPair = 4 / sizeof(T);          // elements of a word
    static constexpr int kPitch = kDepth / kPair + 1;    // words of a column
    u32 words[kWidth * kPitch];

    // What a word's place is changed by: every other 32 words of a column, and every other 32 columns,
    // swap the halves of each 8 words. Else a warp's lanes meet in pairs, 32 words apart in a column
    // when they read 16-bit elements, and 32 columns apart when they write them.
    __device__ static int swap(int word, int column) {
        return kPair == 2 ? ((word >> 5 ^ column >> 5) & 1) * 4 : 0;
    }

    // Each thread loads 16 bytes of kPair rows and writes them as words of kPair elements. `corner` is
    // the tile's first element, of which `rows` x `columns` exist.
    __device__ void load(const T* corner, i64 width, i64 rows, i64 columns, int thread, int threads) {
        constexpr int kLoads = kWidth / kVector * (kDepth / kPair);
        for (int i = thread; i < kLoads; i += threads) {
            const int column = i % (kWidth / kVector) * kVector, row = i / (kWidth / kVector) * kPair;
            uint4 part[kPair];
#pragma unroll
            for (int r = 0; r < kPair; ++r)
                part[r] = column < columns && row + r < rows
                        ? load16(corner + (row + r) * width + column) : make_uint4(0, 0, 0, 0);
            const u32 a[4] = {part[0].x, part[0].y, part[0].z, part[0].w};
            u32* to = words + column * kPitch + (row / kPair ^ swap(row / kPair, column));
            if constexpr (sizeof(T) == 4) {
#pragma unroll
                for (int j = 0; j < 4; ++j) to[j * kPitch] = a[j];
            } else {
                const u32 b[4] = {part[1].x, part[1].y, part[1].z, part[1].w};
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    to[2 * j * kPitch] = (a[j] & 0xFFFFu) | b[j] << 16;
                    to[(2 * j + 1) * kPitch] = a[j] >> 16 | (b[j] & 0xFFFF0000u);
                }
            }
        }
    }

    // kElements of a column from row `first` on.
    template <int kElements>
    __device__ void values(int column, int first, float* x) const {
        constexpr int kWords = kElements / kPair;
        const u32* from = words + column * kPitch;
        const int base = first / kPair, shift = swap(base, column);  // the same for all of these words
#pragma unroll
        for (int j = 0; j < kWords; ++j) {
            const int word = kWords < 8 ? (base ^ shift) + j : base + (j & 4 ? j - shift : j + shift);
            Element<T>::of_word(from[word], x + j * kPair);
        }
    }

    // One of them.
    __device__ float value(int column, int row) const {
        const int word = row / kPair;
        float x[kPair];
        Element<T>::of_word(words[column * kPitch + (word ^ swap(word, column))], x);
        return row % kPair ? x[kPair - 1] : x[0];
    }
};

}  // namespace cuquant
