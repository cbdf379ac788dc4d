// Rows of a matrix by their numbers, decoded: the lookup of embeddings. A thread makes a chunk of a row of the result.
// A source says how numbers are stored: CodeRows, codes beside scales; BlockRows, ggml's blocks.
#include "dequantize/values.cuh"
#include "format/blocks.cuh"

namespace cuquant {

// kAbsmax: values are (code * absmax) * inverse, in this order; where the first product is beyond float32 the other comes
// first.
template <class Format, typename Word, int kAbsmax>
struct CodeRows {
    using Codec = typename Format::Codec;
    using Packing = typename Format::Packing;
    using Tables = typename Codec::DecodeTables;

    const Word* packed;  // [rows, row_words]
    ScaleArrays arrays;
    Tiles tiles;
    i64 row_words, last_word;
    float limit;  // values of blocks whose scale or minimum is above it may not fit into the elements
    float inverse;

    template <typename T>
    __device__ float decoded(u32 code, i64 block, const Tables& tables) const {
        const float scale = scale_at<Format::stored>(arrays, block), shift = shift_of<Format>(arrays, block);
        if constexpr (kAbsmax) {
            const float number = Codec::decode(code, shift, tables), product = __fmul_rn(number, scale);
            const bool far = fabsf(product) > kFloatMax;
            const float x = far ? __fmul_rn(number, __fmul_rn(scale, inverse)) : __fmul_rn(product, inverse);
            return __fadd_rn(is_finite(x) ? saturated(x, Element<T>::top) : x, 0.0f);
        }
        const float minimum = minimum_at<Format>(arrays, block);
        const float x = value_of<Format>(code, scale, minimum, shift, tables);
        const bool fits = !(fmaxf(fabsf(scale), fabsf(minimum)) > limit);
        return fits ? x : saturated_value<Format, T>(x, code, scale, minimum, shift, tables);
    }
    template <typename T>
    __device__ float value(i64 row, i64 column, const Tables& tables) const {
        const i64 block = Format::stored == Stored::None ? 0 : tiles.block(row, column);
        return decoded<T>(Packing::get(packed + row * row_words, column), block, tables);
    }
    // Chunk `c` of the array, which is in one block and begins at this row and column; words follow each other.
    template <typename T>
    __device__ void chunk(i64 row, i64 column, i64 c, const Tables& tables, float* x) const {
        const u64 bits = load_packed<Packing>(reinterpret_cast<const u8*>(packed), c, last_word);
        const i64 block = tiles.block(row, column);
#pragma unroll
        for (int i = 0; i < kChunk; ++i) x[i] = decoded<T>(code_at<Packing>(bits, i), block, tables);
    }
};

template <class Format>
struct BlockRows {
    using Codec = typename Format::Codec;
    using Layout = typename Format::Layout;
    using Tables = typename Codec::DecodeTables;
    struct Anywhere : Layout { static constexpr int align = 1; };  // blocks may start on any byte

    const u8* blocks;
    i64 row_bytes;

    template <typename T>
    __device__ static float decoded(const ChunkFields& fields, int i, const Tables& tables) {
        const u32 code = static_cast<u32>(fields.codes >> 8 * i) & 0xFFu;
        float x = __fmul_rn(Codec::decode(code, Codec::shift_of(0), tables), fields.scale);
        if constexpr (Layout::minimum_byte >= 0) x = __fadd_rn(x, fields.minimum);
        return is_finite(x) ? saturated(x, Element<T>::top) : x;  // infinite scales are ggml's
    }
    __device__ const u8* block_of(i64 row, i64 column) const {
        return blocks + row * row_bytes + column / Layout::elements * Layout::bytes;
    }
    template <typename T>
    __device__ float value(i64 row, i64 column, const Tables& tables) const {
        const int in_block = static_cast<int>(column % Layout::elements), i = in_block % kChunk;
        return decoded<T>(read_chunk<Anywhere>(block_of(row, column), in_block - i), i, tables);
    }
    // Blocks start where Layout::align says.
    template <typename T>
    __device__ void chunk(i64 row, i64 column, i64, const Tables& tables, float* x) const {
        const int first = static_cast<int>(column % Layout::elements);
        const ChunkFields fields = read_chunk<Layout>(block_of(row, column), first);
#pragma unroll
        for (int i = 0; i < kChunk; ++i) x[i] = decoded<T>(fields, i, tables);
    }
};

// Numbers of rows: int64, or int32.
struct Ids {
    const void* ids;
    i64 wide;

    __device__ i64 at(i64 i) const { return wide ? static_cast<const i64*>(ids)[i] : static_cast<const int*>(ids)[i]; }
};

// Where an element of row `id` of the matrix is stored: a sum of multiples of its row and its column.
struct Places {
    i64 row_of_id, row_of_column, column_of_id, column_of_column;
    const i64* order;  // where the stored columns lie in another order: the place of each

    __device__ i64 row(i64 id, i64 column) const { return id * row_of_id + column * row_of_column; }
    __device__ i64 column(i64 id, i64 column) const {
        const i64 at = id * column_of_id + column * column_of_column;
        return order ? order[at] : at;
    }
};

// out [count, columns]; rows whose number is not in 0..known - 1 become NaN. kWhole: rows are whole chunks that lie as
// they are stored, in words on 8 bytes, and out is contiguous on 16.
template <class Source, typename T, int kThreads, int kWhole>
__global__ void __launch_bounds__(kThreads) decode_rows(
    Source source, Lookup lookup, Ids ids, Places places, T* __restrict__ out, Strided target, i64 count, i64 columns, i64 known) {
    using Codec = typename Source::Codec;
    __shared__ typename Codec::DecodeTables tables;
    if constexpr (Codec::is_codebook) {
        Codec::fill(tables, lookup, threadIdx.x, kThreads);
        __syncthreads();
    }
    const i64 per_row = (columns + kChunk - 1) / kChunk, chunks = count * per_row;
    const i64 item = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x, c = min(item, chunks - 1);
    // Arrays of less than 2^32 chunks divide by 32 bits, which is several times quicker.
    const i64 row = chunks >> 32 ? c / per_row : static_cast<i64>(static_cast<u32>(c) / static_cast<u32>(per_row));
    const i64 column = (c - row * per_row) * kChunk, id = ids.at(row);
    const bool there = id >= 0 && id < known;
    const float nan = float_of(0x7FC00000u);
    if constexpr (kWhole) {
        float x[kChunk];
#pragma unroll
        for (int i = 0; i < kChunk; ++i) x[i] = nan;
        if (there) {
            const i64 chunk = id * per_row + column / kChunk;
            source.template chunk<T>(places.row(id, column), places.column(id, column), chunk, tables, x);
        }
        store_values(out + item * kChunk, x, item < chunks);  // all lanes take part, each at its own place
    } else {
        if (item >= chunks) return;
        T* to = out + target.row(row, target.strides);
        for (int i = 0; i < kChunk && column + i < columns; ++i) {
            const i64 j = column + i;
            const float x = there ? source.template value<T>(places.row(id, j), places.column(id, j), tables) : nan;
            Element<T>::store(to + j * target.column_stride, x);
        }
    }
}

}  // namespace cuquant
