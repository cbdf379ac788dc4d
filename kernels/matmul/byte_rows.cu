// Rows of bytes along one axis of an array with any strides, for kernels that multiply bytes: 8-bit integers as they are,
// 4-bit ones out of their nibbles, or signs as -1 and +1; or, for those that multiply bits, eight signs in a byte. A
// thread block makes a tile of 128 rows and 128 bytes, or 32 bytes of bits, which passes through shared memory: columns
// of the array may become rows.
#include "device/vector.cuh"

namespace cuquant {

using i8 = signed char;
using i16 = short;
using i32 = int;

// How threads read: 16 rows that lie beside each other; rows, or columns, that are nearer to each other than the others.
enum Way { kTurned = 0, kAcross = 1, kAlong = 2 };

struct Given {
    static constexpr int most = 5;
    const void* at;
    i64 rows, row_step, column_step;  // steps in elements
    i64 dims, sizes[most], steps[most];  // of matrices, the last fastest
    int way, vectors;  // a Way; whether 16 rows are an aligned vector (kTurned; else each 4 are), or 4 columns, of bits 8

    __device__ i64 base(i64 matrix) const {
        i64 sum = 0;
        for (int d = static_cast<int>(dims) - 1; d >= 0; --d) {
            sum += matrix % sizes[d] * steps[d];
            matrix /= sizes[d];
        }
        return sum;
    }
};

// ---- what a byte is made of: column k of a row that begins at an element --------------------------------------------

struct Bytes {
    using Type = u8;
    __device__ static u32 made(u8 x) { return x; }
};

__device__ inline bool is_negative(Half x) { return float_of_half(x.bits) < 0.0f; }
__device__ inline bool is_negative(Bfloat16 x) { return float_of(static_cast<u32>(x.bits) << 16) < 0.0f; }
template <typename T> __device__ bool is_negative(T x) { return x < static_cast<T>(0); }

// -1 or +1; 0, -0.0 and NaN are +1.
template <typename T>
struct Signs {
    using Type = T;
    __device__ static u32 made(T x) { return is_negative(x) ? 0xFFu : 1u; }
};

// Signed integers of 4 bits, two in a byte, the first in the low nibble: steps count bytes.
struct Nibbles {
    using Type = u8;
};

template <class Element>
__device__ u32 byte_at(const Given& given, i64 row, i64 k) {
    const auto* const from = static_cast<const typename Element::Type*>(given.at) + row;
    if constexpr (is_same<Element, Nibbles>) {
        const u32 pair = from[k / 2 * given.column_step], own = k % 2 ? pair >> 4 : pair & 0xFu;
        return ((own ^ 8u) - 8u) & 0xFFu;
    } else {
        return Element::made(from[k * given.column_step]);
    }
}

// Signs as bits, eight columns in a byte, the first in the lowest bit: 1 is +1. Steps count elements.
template <typename T>
struct Bits {
    using Type = T;
    __device__ static u32 made(T x) { return is_negative(x) ? 0u : 1u; }
};
template <class Element> constexpr bool kIsBits = false;
template <typename T> constexpr bool kIsBits<Bits<T>> = true;

// Byte b, whose bits are columns 8 b .. 8 b + 7; those from `depth` on are 0, which no product counts.
template <class Element>
__device__ u8 bits_at(const Given& given, i64 row, i64 b, i64 depth) {
    using T = typename Element::Type;
    struct alignas(8 * sizeof(T)) Eight { T x[8]; };
    const i64 k = 8 * b;
    const T* const from = static_cast<const T*>(given.at) + row + k * given.column_step;
    u32 byte = 0;
    if (given.vectors && k + 8 <= depth) {
        const Eight eight = *reinterpret_cast<const Eight*>(from);
#pragma unroll
        for (int i = 0; i < 8; ++i) byte |= Element::made(eight.x[i]) << i;
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (k + i < depth) byte |= Element::made(from[i * given.column_step]) << i;
    }
    return static_cast<u8>(byte);
}

// Columns k .. k + 3, of which those from `depth` on are 0.
template <class Element>
__device__ u32 word_at(const Given& given, i64 row, i64 k, i64 depth) {
    u32 word = 0;
    if constexpr (!is_same<Element, Nibbles>) {
        using T = typename Element::Type;
        struct alignas(4 * sizeof(T)) Four { T x[4]; };
        if (given.vectors && k + 4 <= depth) {
            const Four four = *reinterpret_cast<const Four*>(static_cast<const T*>(given.at) + row + k);
#pragma unroll
            for (int i = 0; i < 4; ++i) word |= Element::made(four.x[i]) << 8 * i;
            return word;
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (k + i < depth) word |= byte_at<Element>(given, row, k + i) << 8 * i;
    return word;
}

// ---- the tile -------------------------------------------------------------------------------------------------------

constexpr int kTile = 128, kWords = kTile / 4, kThreads = 256;
// Bytes of a row of a tile: of bits fewer, which are made of eight columns each.
template <class Element> constexpr int kWidth = kIsBits<Element> ? 32 : kTile;

// Where a word of a tile's row lies. Groups of 4 words are turned, by another count in each of 8 neighbouring rows and in
// each of 8 rows that lie 16 apart, so that neither way of writing meets a bank twice that reading does not.
__device__ inline int place_of(int row, int word) { return row * kWords + (word + 4 * (row + row / 16)) % kWords; }

// Of words a, b, c, d of four columns, four rows each: the four words of rows.
__device__ inline void turn(u32 a, u32 b, u32 c, u32 d, u32 (&rows)[4]) {
    const u32 low = __byte_perm(a, b, 0x5140), other_low = __byte_perm(c, d, 0x5140);
    const u32 high = __byte_perm(a, b, 0x7362), other_high = __byte_perm(c, d, 0x7362);
    rows[0] = __byte_perm(low, other_low, 0x5410), rows[1] = __byte_perm(low, other_low, 0x7632);
    rows[2] = __byte_perm(high, other_high, 0x5410), rows[3] = __byte_perm(high, other_high, 0x7632);
}

// 16 rows of a column of bytes, of which there may be fewer; each 4 of them are aligned, or all.
__device__ inline uint4 rows_of_column(const u8* from, i64 rows, bool aligned) {
    if (rows >= 16 && aligned) return load16(from);
    u32 words[4] = {};
    if (rows >= 16) {
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = reinterpret_cast<const u32*>(from)[i];
        return make_uint4(words[0], words[1], words[2], words[3]);
    }
#pragma unroll
    for (int i = 0; i < 16; ++i)
        if (i < rows) words[i / 4] |= static_cast<u32>(from[i]) << i % 4 * 8;
    return make_uint4(words[0], words[1], words[2], words[3]);
}

template <class Element>
__global__ void __launch_bounds__(kThreads) byte_rows(
    const __grid_constant__ Given given, u8* __restrict__ out, i64 depth, i64 stride, i64 row_tiles, i64 column_tiles) {
    __shared__ __align__(16) u32 words[kTile * kWords];  // 16 KB
    const i64 index = blockIdx.x, down = index / column_tiles;
    constexpr i64 kWide = kWidth<Element>;
    const i64 first_column = index % column_tiles * kWide, first_row = down % row_tiles * kTile, matrix = down / row_tiles;
    const i64 base = given.base(matrix);
    const int rows = static_cast<int>(min(given.rows - first_row, static_cast<i64>(kTile)));
    const int used = static_cast<int>(min(stride - first_column, kWide)) / 4;  // words of a row
    if (given.way == kTurned) {
        // A thread takes 16 rows of 4 columns; 8 neighbours take 128 bytes of the array together.
        const int row = threadIdx.x % 8 * 16, word = threadIdx.x / 8;
        uint4 columns[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const i64 k = first_column + word * 4 + i;
            const bool some = k < depth && row < rows;
            const u8* const from = static_cast<const u8*>(given.at) + base + k * given.column_step + first_row + row;
            columns[i] = some ? rows_of_column(from, rows - row, given.vectors) : make_uint4(0, 0, 0, 0);
        }
        const auto write = [&](int first, u32 a, u32 b, u32 c, u32 d) {
            u32 turned[4];
            turn(a, b, c, d, turned);
#pragma unroll
            for (int i = 0; i < 4; ++i) words[place_of(row + first + i, word)] = turned[i];
        };
        write(0, columns[0].x, columns[1].x, columns[2].x, columns[3].x);
        write(4, columns[0].y, columns[1].y, columns[2].y, columns[3].y);
        write(8, columns[0].z, columns[1].z, columns[2].z, columns[3].z);
        write(12, columns[0].w, columns[1].w, columns[2].w, columns[3].w);
    } else {
        const bool across = given.way == kAcross;
        // A thread makes words, or bytes of bits.
        constexpr int kParts = kIsBits<Element> ? 4 : 1;
        const int parts = used * kParts;
#pragma unroll 4
        for (int i = threadIdx.x; i < rows * parts; i += kThreads) {
            const int row = across ? i % rows : i / parts, part = across ? i / rows : i % parts;
            const i64 from = base + (first_row + row) * given.row_step;
            if constexpr (kIsBits<Element>) {
                u8* const word = reinterpret_cast<u8*>(words + place_of(row, part / 4));
                word[part % 4] = bits_at<Element>(given, from, first_column + part, depth);
            } else {
                words[place_of(row, part)] = word_at<Element>(given, from, first_column + part * 4, depth);
            }
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < rows * used / 4; i += kThreads) {
        const int row = i / (used / 4), word = i % (used / 4) * 4;
        const uint4 vector = *reinterpret_cast<const uint4*>(words + place_of(row, word));
        store16(out + (matrix * given.rows + first_row + row) * stride + first_column + word * 4, vector);
    }
}

}  // namespace cuquant
