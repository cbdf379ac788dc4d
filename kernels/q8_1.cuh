// ggml's blocks times activations: how a warp copies groups of 256 columns to shared memory and reads scales and
// codes there, for matmul_blocks.cu too; and how it multiplies 16 rows of weights by q8_1's tokens on the tensor cores.
//
// For every 32 columns of a row w and a token a
//   part = sum over sub-blocks of (float)(integer dot product) * scale [+ (integer sum of a) * minimum]
//   total = part * (a's scale) + total
// with one rounding for each product and each multiply-add, in the order of the columns.
#pragma once
#include "blocks.cuh"
#include "dot.cuh"

namespace cuquant {

extern __shared__ __align__(16) u8 dynamic_shared[];

constexpr int kRows = 16, kSteps = 8;  // of a warp; of 32 columns in a group
constexpr int kTokenBytes = 36, kTokenVectors = 19;  // of q8_1's block of 32; of a token's group
constexpr int kTokenPitch = 16 * kTokenVectors, kTokenGroup = kSteps * kTokenBytes;
constexpr int kTokenStride = kSteps + 4;  // floats of a token's row of scales
// Warps of a multiprocessor that shared memory has room for; registers must not be what limits them.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 870 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)
constexpr int kResident = 8;
#else
constexpr int kResident = 16;
#endif

// Integers start here: the bits of 1.5 * 2^23, where the next float is one more.
constexpr int kIntegerStart = 0x4B400000;
__device__ inline float float_of_sum(int sum) { return __fadd_rn(float_of(static_cast<u32>(sum)), -12582912.0f); }

// How the groups of a row of weights lie in shared memory. Vectors that start on 16 bytes are copied, so
// a group begins up to 14 bytes after its first one; an odd number of them lets 8 rows use all banks.
template <class Layout>
struct Geometry {
    static constexpr int blocks = kGroup / Layout::elements, bytes = blocks * Layout::bytes;
    // Whether the groups of a row keep their place in a word; where not, shifts are made at run time.
    static constexpr bool in_place = bytes % 4 == 0;
    static constexpr int vectors = (bytes + (in_place ? 12 : 14) + 15) / 16, pitch = 16 * (vectors | 1);
    static constexpr int group_bytes = kRows * pitch;  // of all rows
    static constexpr int subs = kGroup / Layout::sub_block, stride = subs + 4;  // a row of scales, padded
    static constexpr int tables = Layout::minimum_byte >= 0 ? 2 : 1, table_bytes = 4 * kRows * stride;
};

// Places in shared memory are 32-bit numbers: bytes from its start.
template <class T> __device__ inline T& shared_at(int place) { return *reinterpret_cast<T*>(dynamic_shared + place); }

// A row's group in shared memory: words from any byte on.
template <bool kInPlace>
struct Row {
    int place;  // a multiple of 4
    int skip;   // bytes before the group, less than 4; 0 where groups are in place

    // Little-endian, as all of ggml's numbers.
    __device__ u32 word(int offset) const {
        const int first = place + (offset & ~3);
        if constexpr (kInPlace) {
            const u32 low = shared_at<u32>(first);
            return offset & 3 ? __funnelshift_r(low, shared_at<u32>(first + 4), 8 * (offset & 3)) : low;
        } else {
            const int odd = skip + (offset & 3), low = first + (odd & ~3);
            return __funnelshift_r(shared_at<u32>(low), shared_at<u32>(low + 4), 8 * (odd & 3));
        }
    }
    __device__ u32 half(int offset) const { return shared_at<u16>(place + skip + offset); }  // an even place
    __device__ u32 byte(int offset) const { return shared_at<u8>(place + skip + offset); }
    __device__ Row after(int bytes) const { return {place + bytes, skip}; }  // a multiple of 4
};

// ---- scales -------------------------------------------------------------------------------------

// Small integers i .. i + 3, a byte each, from a word that has those of neighbouring bytes.
template <class R, int kByte, int kCount, int kFirst, int kLow, int kBits, int kShift, int kStep>
__device__ u32 four_of(Run<kByte, kCount, kFirst, kLow, kBits, kShift, kStep>, const R& row, int i) {
    if constexpr (kStep == 1 && kCount % 4 == 0 && kFirst % 4 == 0) {
        if (i < kFirst || i >= kFirst + kCount) return 0;
        return (row.word(kByte + i - kFirst) >> kLow & ((1u << kBits) - 1) * 0x01010101u) << kShift;
    } else {
        u32 four = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int at = (i + j - kFirst) / kStep;
            if (i + j < kFirst || at >= kCount || (i + j - kFirst) % kStep) continue;
            four |= (row.byte(kByte + at) >> kLow & ((1u << kBits) - 1)) << (kShift + 8 * j);
        }
        return four;
    }
}
template <class R, class... Parts>
__device__ u32 four_of(Runs<Parts...>, const R& row, int i) { return (four_of(Parts{}, row, i) | ... | 0u); }

// float(byte i of `four`) - bias, exactly.
__device__ inline float float_of_byte(u32 four, int i, float bias) {
    return __fadd_rn(float_of(__byte_perm(four, 0x4B000000u, 0x7440u | i)), -8388608.0f - bias);
}

template <class Block> __device__ float in_units(float scale) {
    if constexpr (Block::unit == 1.0f) return scale;
    else return __fmul_rn(scale, Block::unit);
}

__device__ inline float float_of_e8m0(u32 byte) {
    return float_of(byte == 0 ? 0x00400000u : byte == 255 ? 0x7FC00000u : byte << 23);
}

template <bool kFirst, class A, class B> struct Either { using Type = A; };
template <class A, class B> struct Either<false, A, B> { using Type = B; };

// kCount of a group's scales (kMinimum: minimums): the first half of them, or the second one where `upper`.
template <class Block, bool kMinimum, int kCount, class R>
__device__ void numbers_in(const R& row, bool upper, float* out) {
    using Layout = typename Block::Layout;
    constexpr int subs = Layout::elements / Layout::sub_block;
    constexpr int at = kMinimum ? Layout::minimum_byte : Layout::scale_byte;
    if constexpr (subs > kCount) {  // the integers of one block
        using Integers = typename Either<kMinimum, typename Layout::MinimumRuns, typename Layout::ScaleRuns>::Type;
        constexpr u32 flip = kMinimum ? 0u : 0x80808080u;  // scales have signs, minimums have none
        constexpr float bias = kMinimum ? 0.0f : 128.0f + Layout::scale_zero;
        const float d = float_of_half(row.half(at)), common = kMinimum ? -d : in_units<Block>(d);
#pragma unroll
        for (int i = 0; i < kCount; i += 4) {
            const u32 low = four_of(Integers{}, row, i), high = four_of(Integers{}, row, kCount + i);
            const u32 four = (upper ? high : low) ^ flip;
#pragma unroll
            for (int j = 0; j < 4; ++j) out[i + j] = __fmul_rn(common, float_of_byte(four, j, bias));
        }
    } else {
        constexpr int blocks = kCount / subs;
        const R mine = row.after(upper ? blocks * Layout::bytes : 0);
#pragma unroll
        for (int i = 0; i < blocks; ++i) {
            const int byte = i * Layout::bytes + at;
            if constexpr (kMinimum) {
                out[i] = float_of_half(mine.half(byte));
            } else if constexpr (Block::stored == Stored::Float16) {
                out[i] = in_units<Block>(float_of_half(mine.half(byte)));
            } else if constexpr (Block::stored == Stored::E8M0) {
                out[i] = in_units<Block>(float_of_e8m0(mine.byte(byte)));
            } else {
                const u32 four = mine.word(byte);
#pragma unroll
                for (int j = 0; j < subs; ++j)
                    out[i * subs + j] = in_units<Block>(Minifloat<4, 3, Specials::OneNan>::decode(four >> 8 * j & 0x7Fu));
            }
        }
    }
}

// Between registers and tables, by 16 bytes.
template <int kCount>
__device__ inline void put(int place, const float (&from)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4)
        shared_at<float4>(place + 4 * i) = make_float4(from[i], from[i + 1], from[i + 2], from[i + 3]);
}
template <int kCount>
__device__ inline void get(float (&to)[kCount], int place) {
    if constexpr (kCount == 1) to[0] = shared_at<float>(place);
    if constexpr (kCount == 2) {
        const float2 two = shared_at<float2>(place);
        to[0] = two.x, to[1] = two.y;
    }
#pragma unroll
    for (int i = 0; i + 4 <= kCount; i += 4) {
        const float4 four = shared_at<float4>(place + 4 * i);
        to[i] = four.x, to[i + 1] = four.y, to[i + 2] = four.z, to[i + 3] = four.w;
    }
}

// ---- codes --------------------------------------------------------------------------------------

// Of a sub-block's columns e + 4 t .. e + 4 t + 3 as signed bytes, times 2^left: one field's bits. e is a
// multiple of 16, known when this is compiled.
template <class R, int kByte, int kBits, int kSpan, int kShift>
__device__ u32 field_of(Field<kByte, kBits, kSpan, kShift>, const R& row, int block, int e, int t, int left) {
    constexpr u32 ones = 0x01010101u, mask = (1u << kBits) - 1;
    if constexpr (kSpan == 1) {
        const u32 four = row.word(block + kByte) >> (e % 32 + 4 * t) & 15u;
        // The product puts bit i at bit 8 i + kShift + left, among others.
        return four * (0x00204081u << (kShift + left)) & ones << (kShift + left);
    } else {
        const int lane = e / kSpan % (8 / kBits), byte = kByte + e / (kSpan * (8 / kBits)) * kSpan + e % kSpan;
        const int place = kShift + left - lane * kBits;
        const u32 word = row.after(4 * t).word(block + byte);
        return (place >= 0 ? word << place : word >> -place) & mask * ones << (kShift + left);
    }
}
template <class R, class... Parts>
__device__ u32 codes_of(Fields<Parts...>, const R& row, int block, int e, int t, int left) {
    return (field_of(Parts{}, row, block, e, t, left) | ...);
}

// The levels of four codes, in the nibbles of the low 16 bits.
__device__ inline u32 levels_of(u32 nibbles, const uint4& levels) {
    const u32 in_half = nibbles & 0x7777u, half = (nibbles >> 1 & 0x4444u) | 0x3210u;
    return __byte_perm(__byte_perm(levels.x, levels.y, in_half), __byte_perm(levels.z, levels.w, in_half), half);
}

template <class... Parts> struct FirstOf;
template <int kByte, int kBits, int kSpan, int kShift, class... Rest>
struct FirstOf<Fields<Field<kByte, kBits, kSpan, kShift>, Rest...>> {
    static constexpr int byte = kByte, span = kSpan;
};

// The operand words of columns 32 step .. of a row: four bytes of the first 16 columns and of the others.
// Where codes are looked up, a word has the columns that share bytes of nibbles: see operand_of.
template <class Block, class R>
__device__ void weights_of(const R& row, int step, int t, const uint4& levels, u32& first, u32& second) {
    using Layout = typename Block::Layout;
    const int block = 32 * step / Layout::elements * Layout::bytes, e = 32 * step % Layout::elements;
    if constexpr (Block::lookup) {
        constexpr int byte = FirstOf<typename Layout::Codes>::byte, span = FirstOf<typename Layout::Codes>::span;
        if constexpr (span == 8) {
            const R pair{row.place + 2 * t, row.skip};
            first = levels_of(pair.half(block + byte + e / 2), levels);
            second = levels_of(pair.half(block + byte + e / 2 + 8), levels);
        } else {
            static_assert(span == 16, "nibbles of 32 columns in 16 bytes");
            const u32 word = row.after(4 * t).word(block + byte + e / 2);
            first = levels_of(word, levels);
            second = levels_of(word >> 16, levels);
        }
    } else {
        const u32 flip = Block::centred ? levels.x : 0u;  // the top bit of each byte
        constexpr int left = Block::centred ? 8 - Block::bits : 0;
        first = codes_of(typename Layout::Codes{}, row, block, e, t, left) ^ flip;
        second = codes_of(typename Layout::Codes{}, row, block, e + 16, t, left) ^ flip;
    }
}

// The same of a token's 32 columns, in the weights' order.
template <class Block>
__device__ void operand_of(int quants, int t, u32& first, u32& second) {
    constexpr int span = Block::lookup ? FirstOf<typename Block::Layout::Codes>::span : 0;
    if constexpr (span == 8) {  // columns 2 t, 8 + 2 t, 1 + 2 t, 9 + 2 t
        const int pairs = quants + 2 * t;
        first = __byte_perm(shared_at<u16>(pairs), shared_at<u16>(pairs + 8), 0x5140);
        second = __byte_perm(shared_at<u16>(pairs + 16), shared_at<u16>(pairs + 24), 0x5140);
    } else {
        first = shared_at<u32>(quants + 4 * t), second = shared_at<u32>(quants + 4 * t + 16);
        if constexpr (span == 16) {  // columns 4 t, 16 + 4 t, 1 + 4 t, 17 + 4 t; and the next
            const u32 low = first, high = second;
            first = __byte_perm(low, high, 0x5140);
            second = __byte_perm(low, high, 0x7362);
        }
    }
}

// ---- copies -------------------------------------------------------------------------------------

// How many groups come before one whose vectors may reach beyond the row: none does where rows end with a
// group and with a vector, else the last one.
__device__ inline int easy_groups(i64 columns, i64 row_bytes) {
    return static_cast<int>((columns + kGroup - 1) / kGroup) - (columns % kGroup == 0 && row_bytes % 16 == 0 ? 0 : 1);
}

// What one of kThreads threads copies of each group of kRowsOf rows, of which kLanes of them share one at a
// time; a group has kBytes.
template <int kRowsOf, int kThreads, int kLanes, int kBytes, int kPitch>
struct Copies {
    static constexpr int at_once = kThreads / kLanes, count = kRowsOf / at_once;
    const u8* from[count];  // of the next group
    int to;
    bool here;  // whether this thread takes part

    // Rows that are not there are copies of the last one, or nothing where a thread has no other.
    // `first`: of the first row's first group.
    __device__ void begin(const u8* first, i64 row_bytes, int rows, int thread) {
        const int row = thread / kLanes, column = thread % kLanes * 16;
#pragma unroll
        for (int i = 0; i < count; ++i) from[i] = first + min(row + at_once * i, rows - 1) * row_bytes + column;
        to = row * kPitch + column;
        here = count > 1 || row < rows;
    }
    // An easy group, and on to the next, `step` bytes further.
    __device__ void copy(int stage, int step, int thread) {
#pragma unroll
        for (int i = 0; i < count; ++i) {
            const u8* const start = reinterpret_cast<const u8*>(reinterpret_cast<u64>(from[i]) & ~15ull);
            u8* const end = dynamic_shared + stage + to + at_once * i * kPitch;
            const int bytes = static_cast<int>(reinterpret_cast<u64>(from[i]) & 15) + kBytes - thread % kLanes * 16;
#pragma unroll
            for (int j = 0; 16 * j < kBytes + 15; j += kLanes)
                if (here && (16 * (j + kLanes) <= kBytes || 16 * j < bytes)) copy_ahead(end + 16 * j, start + 16 * j);
            from[i] += step;
        }
    }
};

// The same of a group whose rows have `left` bytes more: zeros follow. `first` is the first row's.
template <int kThreads, int kVectors, int kPitch>
__device__ __noinline__ void copy_last(int stage, const u8* first, i64 row_bytes, i64 left, int rows, int thread) {
    const int most = static_cast<int>(min(left, static_cast<i64>(16 * kVectors)));
#pragma unroll 1
    for (int vector = thread; vector < rows * kVectors; vector += kThreads) {
        const int row = vector / kVectors, column = vector % kVectors * 16;
        const u64 place = reinterpret_cast<u64>(first + row * row_bytes + column);
        const int phase = static_cast<int>(place & 15);
        copy_ahead(dynamic_shared + stage + row * kPitch + column, reinterpret_cast<const u8*>(place - phase), max(0, min(16, most + phase - column)));
    }
}

// An easy group of rows of weights. Rows that are not there are copies of the last one.
template <int kBytes, int kVectors, int kPitch>
__device__ __noinline__ void copy_easy(int stage, const u8* first, i64 row_bytes, int rows, int lane) {
#pragma unroll
    for (int i = 0; 32 * i < kRows * kVectors; ++i) {
        const int v = lane + 32 * i, row = v / kVectors, column = 16 * (v - row * kVectors);
        if (v >= kRows * kVectors) break;
        const u8* const from = first + min(row, rows - 1) * row_bytes + column;
        const int phase = static_cast<int>(reinterpret_cast<u64>(from) & 15);
        if (column < phase + kBytes) copy_ahead(dynamic_shared + stage + row * kPitch + column, from - phase);
    }
}

// Rows whose groups start at places that no word has: byte by byte, so that each begins on a word.
template <int kPitch, int kBytes>
__device__ __noinline__ void copy_bytes(int stage, const u8* first, i64 row_bytes, i64 left, int rows, int lane) {
#pragma unroll 1
    for (int i = lane; i < kRows * kBytes; i += 32) {
        const int row = i / kBytes, at = i % kBytes;
        dynamic_shared[stage + row * kPitch + at] = row < rows && at < left ? first[row * row_bytes + at] : 0;
    }
}

// A warp's 16 rows of weights: groups of them on their way to shared memory.
template <class Block>
struct Weights {
    using Layout = typename Block::Layout;
    using Place = Geometry<Layout>;
    const u8* first;  // of the first row
    i64 row_bytes;
    int rows;    // that are there
    int easy;    // groups
    bool level;  // whether all rows are there and start on 16 bytes, and all groups are easy
    bool by_bytes;

    // `row`: the first one, of m; a multiple of 16.
    __device__ void begin(const u8* weights, i64 row, i64 m, i64 columns) {
        row_bytes = columns / Layout::elements * Layout::bytes;
        first = weights + row * row_bytes;
        rows = static_cast<int>(max(static_cast<i64>(0), min(static_cast<i64>(kRows), m - row)));
        by_bytes = Place::in_place && row_bytes % 4 != 0;
        easy = by_bytes ? 0 : easy_groups(columns, row_bytes);
        level = rows == kRows && columns % kGroup == 0 && row_bytes % 16 == 0 && row_bytes < 1 << 27;
    }
    __device__ void copy(int stage, int group, int lane) const {
        const i64 at = static_cast<i64>(group) * Place::bytes;
        if (level) copy_level(stage, first + at, lane);
        else if (group < easy) copy_easy<Place::bytes, Place::vectors, Place::pitch>(stage, first + at, row_bytes, rows, lane);
        else if (by_bytes) copy_bytes<Place::pitch, Place::bytes>(stage, first + at, row_bytes, row_bytes - at, rows, lane);
        else copy_last<32, Place::vectors, Place::pitch>(stage, first + at, row_bytes, row_bytes - at, rows, lane);
    }
    // Of level rows. As many lanes as a row has vectors copy it at once, so that each sector of 32 bytes is asked
    // for once; what is beyond 16 vectors comes in the end.
    __device__ void copy_level(int stage, const u8* start, int lane) const {
        constexpr int step = Place::bytes & -Place::bytes;  // a power of two
        constexpr int vectors = (Place::bytes + (step < 16 ? 16 - step : 0) + 15) / 16;
        constexpr int lanes = vectors < 16 ? vectors : 16, at_once = 32 / lanes;
        const int phase = static_cast<int>(reinterpret_cast<u64>(start) & 15), row = lane / lanes, column = 16 * (lane - row * lanes);
        const u32 bytes = static_cast<u32>(row_bytes);
        const u8* const aligned = start - phase;
        const u8* const from = aligned + (row * bytes + column);
        u8* const to = dynamic_shared + stage + row * Place::pitch + column;
        const bool here = row < at_once && ((Place::bytes + 15) / 16 == vectors || column < phase + Place::bytes);
#pragma unroll
        for (int first_row = 0; first_row < kRows; first_row += at_once)
            if (here && (first_row + at_once <= kRows || row < kRows - first_row))
                copy_ahead(to + first_row * Place::pitch, from + static_cast<u64>(first_row) * bytes);
        if constexpr (vectors > 16) {
            static_assert(vectors <= 18, "two lanes for each row");
            const int last_row = lane % kRows, last_column = 256 + 16 * (lane / kRows);
            if (last_column < 16 * vectors) copy_ahead(dynamic_shared + stage + last_row * Place::pitch + last_column, aligned + (last_row * bytes + last_column));
        }
    }
    // Where a row of a group begins: row bytes modulo 16 decide.
    __device__ Row<Place::in_place> at(int stage, int row, int group) const {
        const int start = group % 16 * (Place::bytes % 16);
        const int phase = by_bytes ? 0 : (row * static_cast<int>(row_bytes % 16) + start) & 15;
        return {stage + row * Place::pitch + (phase & ~3), Place::in_place ? 0 : phase & 3};
    }
    // A group's scales, and behind them its minimums, to tables of rows of floats.
    __device__ void put_scales(int table, int stage, int group, int lane) const {
        constexpr int half = Place::subs / 2;
        const Row<Place::in_place> row = at(stage, lane % kRows, group);
        const bool upper = lane >= kRows;
        const int to = table + 4 * (lane % kRows * Place::stride + (upper ? half : 0));
        float numbers[half];
        numbers_in<Block, false, half>(row, upper, numbers);
        put(to, numbers);
        if constexpr (Place::tables == 2) {
            numbers_in<Block, true, half>(row, upper, numbers);
            put(to + Place::table_bytes, numbers);
        }
    }
};

// A thread's share of the scales of kTokens tokens' group to a table of rows of floats; where weights have
// minimums, behind it a table of the sums of their integers over sub-blocks.
template <class Block, int kTokens, int kThreads>
__device__ void put_token_scales(int table, int stage, int tokens, int token_step, int thread) {
    using Place = Geometry<typename Block::Layout>;
    constexpr int per_step = Place::subs / kSteps;
    constexpr int kPer = kTokens * kSteps / kThreads, kLanes = kSteps / kPer;  // steps a thread; threads a token
    const int token = thread / kLanes, step = thread % kLanes * kPer;
    if (token >= tokens) return;
    const int from = stage + token * kTokenPitch + (token * token_step & 15) + step * kTokenBytes;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
        shared_at<float>(table + 4 * (token * kTokenStride + step + i)) = float_of_half(shared_at<u16>(from + i * kTokenBytes));
        if constexpr (Place::tables == 2) {
            const int sums = table + 4 * (kTokens * kTokenStride + token * Place::stride + (step + i) * per_step);
#pragma unroll
            for (int j = 0; j < per_step; ++j) {
                int sum = kIntegerStart;
#pragma unroll
                for (int word = 0; word < 8 / per_step; ++word)
                    sum = __dp4a(0x01010101, shared_at<int>(from + i * kTokenBytes + 4 + 4 * (8 / per_step * j + word)), sum);
                shared_at<float>(sums + 4 * j) = float_of_sum(sum);
            }
        }
    }
}
// Bytes of these tables.
template <class Block, int kTokens>
constexpr int token_tables = 4 * kTokens * (kTokenStride + (Geometry<typename Block::Layout>::tables == 2 ? Geometry<typename Block::Layout>::stride : 0));

// ---- products -----------------------------------------------------------------------------------

// 16 rows times kTokens tokens: 4, of which each has two of the tensor core's 8 columns and a lane looks at
// one of its two, or a multiple of 8. Tokens that are not there give results that nobody stores.
template <class Block, int kTokens>
struct Products {
    using Place = Geometry<typename Block::Layout>;
    static constexpr bool has_minimum = Place::tables == 2;
    static constexpr int own = kTokens < 8 ? 8 / kTokens : 1;  // the tensor core's columns of a token
    static constexpr int tiles = (kTokens + 7) / 8, per_step = Place::subs / kSteps;
    // Steps whose scales are in registers.
    static constexpr int ahead = tiles > 2 ? 1 : 4 / per_step / Place::tables;
    float total[tiles][4];  // rows g and g + 8, columns 2 t and 2 t + 1

    __device__ void clear() {
#pragma unroll
        for (int n = 0; n < tiles; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) total[n][i] = 0.0f;
    }
    // The token of total[n][i], and its row.
    __device__ static int token(int n, int i, int lane) { return own == 2 ? lane % 4 : 8 * n + 2 * (lane % 4) + i % 2; }
    __device__ static int row(int i, int lane) { return lane / 4 + i / 2 * 8; }

    // Add a group. `scales`, `token_scales`: the tables; `stage`: the tokens' group.
    template <class R>
    __device__ void add(const R& upper, const R& lower, int scales, int stage, int token_scales, int token_step, const uint4& levels, int lane) {
        const int g = lane / 4, t = lane % 4;
        // 8 tokens further the phase is the same: their bytes are a multiple of 32.
        const int quants = stage + g / own * kTokenPitch + (g / own * token_step & 15) + 4;
#pragma unroll
        for (int q = 0; q < kSteps; q += ahead) {
            // The tables are full; and where loads are made too far ahead, registers are spilled.
            if (q % 4 == 0 || has_minimum || tiles > 2) __syncwarp();
            float scale[2][ahead * per_step], minimum[2][ahead * per_step];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int from = scales + 4 * ((g + 8 * h) * Place::stride + q * per_step);
                get(scale[h], from);
                if constexpr (has_minimum) get(minimum[h], from + Place::table_bytes);
            }
            float token_scale[tiles][2][ahead], sum[tiles][2][ahead * per_step];
#pragma unroll
            for (int n = 0; n < tiles; ++n)
#pragma unroll
                for (int i = 0; i < 2; i += own) {
                    const int own_token = token(n, i, lane);
                    get(token_scale[n][i], token_scales + 4 * (own_token * kTokenStride + q));
                    if constexpr (has_minimum)
                        get(sum[n][i], token_scales + 4 * (kTokens * kTokenStride + own_token * Place::stride + q * per_step));
                }
#pragma unroll
            for (int s = 0; s < ahead; ++s) {
                if (s == 2) __syncwarp();
                u32 a[4];
                weights_of<Block>(upper, q + s, t, levels, a[0], a[2]);
                weights_of<Block>(lower, q + s, t, levels, a[1], a[3]);
#pragma unroll
                for (int n = 0; n < tiles; ++n) {
                    u32 b[2];
                    float part[4];
                    operand_of<Block>(quants + 8 * n * kTokenPitch + (q + s) * kTokenBytes, t, b[0], b[1]);
#pragma unroll
                    for (int j = 0; j < per_step; ++j) {
                        int dot[4];
                        if constexpr (per_step == 1) dot_32(dot, a[0], a[1], a[2], a[3], b[0], b[1], kIntegerStart);
                        else dot_16(dot, a[2 * j], a[2 * j + 1], b[j], kIntegerStart);
#pragma unroll
                        for (int i = 0; i < 4; i += own) {  // i / 2: the row, i % 2: the column
                            const float product = float_of_sum(dot[i]), factor = scale[i / 2][per_step * s + j];
                            part[i] = j ? __fmaf_rn(product, factor, part[i]) : __fmul_rn(product, factor);
                            if constexpr (has_minimum)
                                part[i] = __fmaf_rn(sum[n][i % 2][per_step * s + j], minimum[i / 2][per_step * s + j], part[i]);
                        }
                    }
#pragma unroll
                    for (int i = 0; i < 4; i += own) total[n][i] = __fmaf_rn(part[i], token_scale[n][i % 2][s], total[n][i]);
                }
            }
        }
    }
};

}  // namespace cuquant
