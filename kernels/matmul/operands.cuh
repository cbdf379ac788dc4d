// The operands of a product, as rows of float32: 8 neighbouring values at a time, decoded where they are
// quantized. Beyond the depth, which is the length of a row, there are zeros.
//
// An operand has Tables for shared memory and
//   row(base, n): row n of a matrix that begins at `base`, counted as the operand counts its rows
//   load(tables, row, k, depth, x): the values from column k on, a multiple of 8
#pragma once
#include "format/blocks.cuh"
#include "matmul/epilogue.cuh"
#include "dequantize/values.cuh"

namespace cuquant {

// An array of floats with any strides, in elements; bases are elements too.
struct Dense {
    const void* at;
    i64 row_stride, column_stride;
    int type;     // a Type
    int vectors;  // whether every chunk is an aligned vector

    struct Tables {};
    using Row = i64;
    __device__ void fill(Tables&, int, int) const {}
    __device__ Row row(i64 base, i64 n) const { return base + n * row_stride; }

    __device__ void load(const Tables&, Row row, i64 k, i64 depth, float* x) const {
        const bool wide = type == kFloat, whole = vectors && k + kChunk <= depth;
        if (whole && wide) {
            Raw<float> raw;
            raw.load(static_cast<const float*>(at) + row + k);
            return raw.values(x);
        }
        u32 bits[kChunk];
        if (whole) {
            const uint4 part = load16(static_cast<const u16*>(at) + row + k);
            const u32 words[4] = {part.x, part.y, part.z, part.w};
#pragma unroll
            for (int i = 0; i < kChunk; ++i) bits[i] = i % 2 ? words[i / 2] >> 16 : words[i / 2] & 0xFFFFu;
        } else {
#pragma unroll
            for (int i = 0; i < kChunk; ++i) {
                const i64 element = row + (k + i) * column_stride;
                bits[i] = 0;
                if (k + i < depth) bits[i] = wide ? static_cast<const u32*>(at)[element] : static_cast<const u16*>(at)[element];
            }
        }
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
            const float narrow = type == kHalf ? float_of_half(bits[i]) : float_of(bits[i] << 16);
            x[i] = wide ? float_of(bits[i]) : narrow;
        }
    }
};

// A quantized array in its own rows; bases are rows.
template <class Format, typename Word>
struct Rows {
    const Word* packed;
    ScaleArrays arrays;
    Lookup lookup;
    Tiles tiles;
    i64 row_step, row_words;  // rows from one of the operand to the next; words of each
    int shift;                // a block is 2^shift columns wide; below 0: not a power of two
    int vectors;              // whether every chunk is an aligned word, or of a stream of words
    int mixed;                // whether a chunk may lie in several blocks
    float limit;              // scales and minimums up to this never take a value beyond float32

    using Codec = typename Format::Codec;
    using Packing = typename Format::Packing;
    using Tables = typename Codec::DecodeTables;
    struct Row { const Word* packed; i64 block; };

    __device__ void fill(Tables& tables, int thread, int threads) const {
        if constexpr (Codec::is_codebook) Codec::fill(tables, lookup, thread, threads);
    }
    __device__ Row row(i64 base, i64 n) const {
        const i64 own = base + n * row_step;
        return {packed + own * row_words, Format::stored == Stored::None ? 0 : tiles.block(own, 0)};
    }

    __device__ void load(const Tables& tables, const Row& row, i64 k, i64 depth, float* x) const {
        u32 codes[kChunk];
        load_codes(row.packed, k, depth, codes);
        float scale = 1.0f, minimum = 0.0f, zero = 0.0f;
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
            if (i == 0 || mixed) {
                const i64 block = block_of(row, min(k + i, depth - 1));
                scale = scale_at<Format::stored>(arrays, block);
                minimum = minimum_at<Format>(arrays, block);
                zero = shift_of<Format>(arrays, block);
            }
            x[i] = value_of<Format>(codes[i], scale, minimum, zero, tables);
            if (fmaxf(fabsf(scale), fabsf(minimum)) > limit)  // seldom
                x[i] = saturated_value<Format, float>(x[i], codes[i], scale, minimum, zero, tables);
        }
        if (k + kChunk > depth) {
#pragma unroll
            for (int i = 0; i < kChunk; ++i) x[i] = k + i < depth ? x[i] : 0.0f;
        }
    }
    // The block of a column.
    __device__ i64 block_of(const Row& row, i64 k) const {
        if (Format::stored == Stored::None || tiles.across == 1) return row.block;
        if (shift >= 0) return row.block + (k >> shift);
        return row.block + (k >> 32 ? k / tiles.wide : static_cast<u32>(k) / static_cast<u32>(tiles.wide));
    }
    // The codes of the columns from k on, a multiple of 8; beyond the depth 0.
    __device__ void load_codes(const Word* row, i64 k, i64 depth, u32* codes) const {
        if constexpr (Packing::bits == 16) {
            if (vectors && k + kChunk <= depth) {
                const uint4 part = load16(row + k);
                const u32 words[4] = {part.x, part.y, part.z, part.w};
#pragma unroll
                for (int i = 0; i < kChunk; ++i) codes[i] = words[i / 2] >> 16 * (i % 2) & 0xFFFFu;
                return;
            }
        } else if constexpr (Packing::by_chunk) {
            if (vectors && k + kChunk <= depth) {
                const u64 bits = load_packed<Packing>(reinterpret_cast<const u8*>(row), k / kChunk, row_words - 1);
#pragma unroll
                for (int i = 0; i < kChunk; ++i) codes[i] = code_at<Packing>(bits, i);
                return;
            }
        }
#pragma unroll
        for (int i = 0; i < kChunk; ++i) codes[i] = k + i < depth ? Packing::get(row, k + i) : 0u;
    }
};

// ggml's blocks, of which every row has a whole number; bases are rows.
template <class Format>
struct Blocks {
    const u8* blocks;
    Lookup lookup;
    i64 row_step, row_bytes;

    using Codec = typename Format::Codec;
    using Layout = typename Format::Layout;
    using Tables = typename Codec::DecodeTables;
    using Row = const u8*;

    __device__ void fill(Tables& tables, int thread, int threads) const {
        if constexpr (Codec::is_codebook) Codec::fill(tables, lookup, thread, threads);
    }
    __device__ Row row(i64 base, i64 n) const { return blocks + (base + n * row_step) * row_bytes; }

    __device__ void load(const Tables& tables, Row row, i64 k, i64 depth, float* x) const {
        if (k >= depth) {
#pragma unroll
            for (int i = 0; i < kChunk; ++i) x[i] = 0.0f;
            return;
        }
        const ChunkFields fields = read_chunk<Layout>(row + k / Layout::elements * Layout::bytes, static_cast<int>(k % Layout::elements));
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
            const u32 code = static_cast<u32>(fields.codes >> 8 * i) & 0xFFu;
            x[i] = __fmul_rn(Codec::decode(code, Codec::shift_of(0), tables), fields.scale);
            if constexpr (Layout::minimum_byte >= 0) x[i] = __fadd_rn(x[i], fields.minimum);
        }
    }
};

}  // namespace cuquant
