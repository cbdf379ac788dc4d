// A weight to the layout "fragments/1" and back; cuquant/array/fragments.py says where which bit lies.
// fragments_of_rows, fragments_of_blocks: a thread makes the words of one lane of a unit, 32 codes.
// rows_of_fragments: 32 codes of a row. blocks_of_fragments: a byte. The scales: one number a thread.
#include "format/blocks.cuh"

namespace cuquant {

constexpr int kStrip = 16, kUnit = 64;  // rows, columns
constexpr u32 kPairOfOnes = 0x00010001u;

// A weight: every expert is [rows, columns] and has strips x units of its own.
struct Laid {
    i64 experts, rows, columns, strips, units;
};

// item / n, and `item` becomes the rest; by 32 bits where they fit, which is several times quicker.
__device__ inline i64 split(i64& item, i64 n) {
    const i64 quotient = (item | n) >> 32 ? item / n : static_cast<i64>(static_cast<u32>(item) / static_cast<u32>(n));
    item -= quotient * n;
    return quotient;
}

// ---- words of a lane ----------------------------------------------------------------------------

__device__ constexpr bool is_odd(int bits) { return bits == 3 || bits == 5; }
__device__ constexpr int fields_of(int bits) { return (is_odd(bits) ? 15 : 16) / bits; }

// Put a pair's codes, the low one in bits 0.. and the high one in bits 16.. of `codes`, into a lane's words.
// kJoined: of 4 bits, the pair becomes a byte.
template <int kBits, bool kJoined, int kPair>
__device__ void put(u32* words, u32 codes) {
    if constexpr (kJoined) {
        static_assert(kBits == 4, "codes of 4 bits are joined");
        words[kPair / 4] |= ((codes | codes >> 12) & 0xFFu) << 8 * (kPair % 4);
    } else if constexpr (kBits == 6) {
        put<4, false, kPair>(words, codes & 0xFu * kPairOfOnes);
        put<2, false, kPair>(words + 4, codes >> 4 & 0x3u * kPairOfOnes);
    } else if constexpr (kBits == 7) {
        put<6, false, kPair>(words, codes & 0x3Fu * kPairOfOnes);
        put<1, false, kPair>(words + 6, codes >> 6 & kPairOfOnes);
    } else if constexpr (is_odd(kBits) && kPair == 15) {
#pragma unroll
        for (int i = 0; i < kBits; ++i) words[i] |= (codes >> i & kPairOfOnes) << 15;
    } else {
        words[kPair / fields_of(kBits)] |= codes << kBits * (kPair % fields_of(kBits));
    }
}

// All pairs from kPair on. pair(half, chunk): the one that is the lane's in chunk 0..7 of its row in the
// upper (0) or lower (1) eight rows.
template <int kBits, bool kJoined, int kPair = 0, class Pair>
__device__ void put_pairs(u32* words, Pair pair) {
    put<kBits, kJoined, kPair>(words, pair(kPair % 2, kPair / 2));
    if constexpr (kPair < 15) put_pairs<kBits, kJoined, kPair + 1>(words, pair);
}

// The same of single codes: code(row, column) of the unit.
template <int kBits, bool kJoined, class Code>
__device__ void put_codes(u32* words, int lane, Code code) {
    put_pairs<kBits, kJoined>(words, [&](int half, int chunk) -> u32 {
        const int row = lane / 4 + half * 8, column = chunk * kChunk + lane % 4 * 2;
        return code(row, column) | code(row, column + 1) << 16;
    });
}

// Where a lane's word is among the 32 * kBits words of a unit.
template <int kBits>
__device__ constexpr int word_in_unit(int lane, int word) {
    constexpr int fours = kBits / 4 * 4;
    if (word < fours) return (word / 4 * 32 + lane) * 4 + word % 4;
    if (kBits % 4 >= 2 && word < fours + 2) return fours * 32 + lane * 2 + word - fours;
    return (kBits - 1) * 32 + lane;
}

// A lane's words to a unit that starts on 16 bytes.
template <int kBits>
__device__ void store_words(u32* unit, int lane, const u32* words) {
#pragma unroll
    for (int w = 0; w + 4 <= kBits; w += 4)
        store16(unit + word_in_unit<kBits>(lane, w), make_uint4(words[w], words[w + 1], words[w + 2], words[w + 3]));
    constexpr int fours = kBits / 4 * 4;
    if constexpr (kBits % 4 >= 2)
        *reinterpret_cast<u64*>(unit + word_in_unit<kBits>(lane, fours)) = static_cast<u64>(words[fours + 1]) << 32 | words[fours];
    if constexpr (kBits % 2) unit[word_in_unit<kBits>(lane, kBits - 1)] = words[kBits - 1];
}

// A code of a pair: `high` is 0 or 1. kBits of it, in words from `first` on, of a unit of kAll bits.
template <int kBits, bool kJoined, int kAll = kBits>
__device__ u32 code_of_pair(const u32* unit, int lane, int pair, int high, int first = 0) {
    if constexpr (kJoined) {
        return unit[word_in_unit<kAll>(lane, pair / 4)] >> (8 * (pair % 4) + 4 * high) & 15u;
    } else if constexpr (kBits == 6) {
        return code_of_pair<4, false, kAll>(unit, lane, pair, high, first) | code_of_pair<2, false, kAll>(unit, lane, pair, high, first + 4) << 4;
    } else if constexpr (kBits == 7) {
        return code_of_pair<6, false, kAll>(unit, lane, pair, high, first) | code_of_pair<1, false, kAll>(unit, lane, pair, high, first + 6) << 6;
    } else {
        if (is_odd(kBits) && pair == 15) {
            u32 code = 0;
#pragma unroll
            for (int i = 0; i < kBits; ++i) code |= (unit[word_in_unit<kAll>(lane, first + i)] >> (15 + 16 * high) & 1u) << i;
            return code;
        }
        const u32 word = unit[word_in_unit<kAll>(lane, first + pair / fields_of(kBits))];
        return word >> (kBits * (pair % fields_of(kBits)) + 16 * high) & ((1u << kBits) - 1);
    }
}

// The code of a weight at a row of all experts' and a column.
template <int kBits, bool kJoined>
__device__ u32 code_at(const u32* codes, const Laid& laid, i64 expert, i64 row, i64 column) {
    const i64 unit = (expert * laid.strips + row / kStrip) * laid.units + column / kUnit;
    const int r = static_cast<int>(row % kStrip), c = static_cast<int>(column % kUnit);
    return code_of_pair<kBits, kJoined>(codes + unit * 32 * kBits, r % 8 * 4 + c % 8 / 2, c / 16 * 4 + c % 16 / 8 * 2 + r / 8, c % 2);
}

// What a warp makes: one unit of a strip.
struct Unit {
    i64 expert, strip, unit, index;
    __device__ Unit(i64 at, const Laid& laid) : index(at) {
        unit = at;
        strip = split(unit, laid.units);
        expert = split(strip, laid.strips);
    }
};

// ---- rows ---------------------------------------------------------------------------------------

// A row of a unit in an order by chunks: 8 kBits bytes, of which the four lanes of a row load all.
template <class Packing>
struct RowOfUnit {
    u64 part[Packing::bits];

    __device__ void load(const u64* from) {
#pragma unroll
        for (int i = 0; i < Packing::bits; ++i) part[i] = from[i];
    }
    // Codes 2 t and 2 t + 1 of a chunk, known when compiling.
    __device__ u32 pair(int chunk, int t) const {
        constexpr int bits = Packing::bits;
        constexpr u32 flip = Packing::flip & 0x8080u;
        const int at = bits * chunk / 8, shift = bits * chunk % 8 * 8;
        u64 bytes = part[at] >> shift;
        if (shift + 8 * bits > 64) bytes |= part[at + 1] << (64 - shift);
        const u32 two = static_cast<u32>(bytes >> 2 * bits * t) ^ flip;
        const u32 low = two & Packing::mask, high = two >> bits & Packing::mask;
        return Packing::order == Order::High ? high | low << 16 : low | high << 16;
    }
};

// packed [experts, rows, row_words] -> codes, and where rows end inside a word: tail
// [experts, rows, tail_words]; and where words have bits to spare: spare [experts, rows, spare_bytes].
// `aligned`: rows start on 8 bytes.
template <class Packing, typename Word, int kJoined>
__global__ void fragments_of_rows(
    const Word* __restrict__ packed, Laid laid, i64 row_words, int aligned, u32* __restrict__ codes,
    Word* __restrict__ tail, i64 tail_words, u8* __restrict__ spare, i64 spare_bytes) {
    constexpr int bits = Packing::bits;
    // Units begin at whole words but for Order::Word, whose indices are those of the row.
    constexpr bool whole = Packing::order != Order::Word;
    const i64 thread = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if constexpr (Packing::order == Order::Word && 32 % bits) {
        constexpr int over = 32 % bits, per_byte = 8 / over;
        const i64 threads = static_cast<i64>(gridDim.x) * blockDim.x;
        for (i64 item = thread; item < laid.experts * laid.rows * spare_bytes; item += threads) {
            i64 byte = item;
            const Word* row = packed + split(byte, spare_bytes) * row_words;
            u32 above = 0;
            for (int i = 0; i < per_byte; ++i)
                if (byte * per_byte + i < row_words) above |= row[byte * per_byte + i] >> (32 - over) << i * over;
            spare[item] = static_cast<u8>(above);
        }
    }
    if (thread / 32 >= laid.experts * laid.strips * laid.units) return;
    const Unit at(thread / 32, laid);
    const int lane = threadIdx.x % 32;
    const i64 first_row = at.strip * kStrip, first_column = at.unit * kUnit;
    const Word* rows = packed + (at.expert * laid.rows + first_row) * row_words;
    const Word* own = rows + (whole ? at.unit * (kUnit * bits / 8 / static_cast<int>(sizeof(Word))) : 0);
    u32 words[bits] = {};
    const bool full = first_row + kStrip <= laid.rows && first_column + kUnit <= laid.columns;
    if (Packing::by_chunk && full && aligned) {
        if constexpr (Packing::by_chunk) {
            RowOfUnit<Packing> row[2];
            row[0].load(reinterpret_cast<const u64*>(own + lane / 4 * row_words));
            row[1].load(reinterpret_cast<const u64*>(own + (lane / 4 + 8) * row_words));
            put_pairs<bits, kJoined>(words, [&](int half, int chunk) { return row[half].pair(chunk, lane % 4); });
        }
    } else {
        put_codes<bits, kJoined>(words, lane, [&](int row, int column) -> u32 {
            if (first_row + row >= laid.rows || first_column + column >= laid.columns) return 0;
            return Packing::get(own + row * row_words, whole ? column : first_column + column);
        });
    }
    store_words<bits>(codes + at.index * 32 * bits, lane, words);
    if (tail_words && at.unit == laid.units - 1 && lane < kStrip && first_row + lane < laid.rows) {
#pragma unroll 1
        for (i64 w = 0; w < tail_words; ++w)
            tail[(at.expert * laid.rows + first_row + lane) * tail_words + w] = rows[lane * row_words + row_words - tail_words + w];
    }
}

// kBits words of four bytes, by the widest stores that they fill.
template <int kBits>
__device__ void store_words_of_row(void* to, const u32* made) {
#pragma unroll
    for (int i = 0; i < kBits; ++i) {
        if constexpr (kBits % 4 == 0) {
            if (i % 4 == 0) store16(static_cast<u32*>(to) + i, make_uint4(made[i], made[i + 1], made[i + 2], made[i + 3]));
        } else if constexpr (kBits % 2 == 0) {
            if (i % 2 == 0) static_cast<u64*>(to)[i / 2] = static_cast<u64>(made[i + 1]) << 32 | made[i];
        } else {
            static_cast<u32*>(to)[i] = made[i];
        }
    }
}

// The other way: a thread makes 32 codes of a row, a warp those of a unit; or a word, where 32 codes are no whole words.
// `aligned`: rows start on as many bytes as such 32 codes have, up to 16.
template <class Packing, typename Word, int kJoined>
__global__ void rows_of_fragments(
    const u32* __restrict__ codes, const Word* __restrict__ tail, const u8* __restrict__ spare, Laid laid,
    i64 row_words, int aligned, i64 tail_words, i64 spare_bytes, Word* __restrict__ packed) {
    constexpr int bits = Packing::bits, over = Packing::order == Order::Word ? 32 % bits : 0;
    const i64 thread = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x, body = row_words - tail_words;
    if constexpr (over) {
        if (thread >= laid.experts * laid.rows * row_words) return;
        i64 word = thread;
        const i64 line = split(word, row_words);
        if (word >= body) {
            packed[thread] = tail[line * tail_words + word - body];
            return;
        }
        i64 row = line;
        const i64 expert = split(row, laid.rows);
        constexpr int per_byte = 8 / over;
        const u32 above = spare[line * spare_bytes + word / per_byte] >> static_cast<int>(word % per_byte) * over;
        const u32 made = Packing::word(word, [&](i64 column) -> u32 { return code_at<bits, kJoined>(codes, laid, expert, row, column); });
        packed[thread] = made | above << (32 - over);
    } else {
        if (thread / 32 >= laid.experts * laid.strips * laid.units) return;
        const Unit at(thread / 32, laid);
        const u32 r = threadIdx.x % 32 / 2, half = threadIdx.x % 2;
        const i64 row = at.strip * kStrip + r;
        if (row >= laid.rows) return;
        const u32* unit = codes + at.index * 32 * bits;
        constexpr int size = sizeof(Word), per_u32 = 4 / size, each = bits * per_u32;
        u32 made[bits] = {};
#pragma unroll
        for (int w = 0; w < each; ++w)
            made[w / per_u32] |= Packing::word(w, [&](i64 column) -> u32 {
                const u32 i = static_cast<u32>(column);
                return code_of_pair<bits, kJoined>(unit, r % 8 * 4 + i % 8 / 2, half * 8 + i / 8 * 2 + r / 8, i % 2);
            }) << 8 * size * (w % per_u32);
        const i64 line = at.expert * laid.rows + row, first = (at.unit * 2 + half) * each;
        Word* to = packed + line * row_words + first;
        if (aligned && first + each <= body) {
            store_words_of_row<bits>(to, made);
            return;
        }
#pragma unroll
        for (int w = 0; w < each; ++w)
            if (first + w < body) to[w] = static_cast<Word>(made[w / per_u32] >> 8 * size * (w % per_u32));
            else if (first + w < row_words) to[w] = tail[line * tail_words + first + w - body];
    }
}

// ---- one number for each row and group ----------------------------------------------------------

// [experts, rows, groups] -> [experts, strips, groups, 16]; T is an integer of their size.
template <typename T>
__global__ void strips_of_scales(const T* __restrict__ scales, Laid laid, i64 groups, T* __restrict__ strips) {
    const i64 item = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (item >= laid.experts * laid.strips * groups * kStrip) return;
    const int place = static_cast<int>(item % kStrip);
    i64 group = item / kStrip;
    i64 strip = split(group, groups);
    const i64 expert = split(strip, laid.strips);
    const i64 row = strip * kStrip + place / 2 + place % 2 * 8;
    strips[item] = row < laid.rows ? scales[(expert * laid.rows + row) * groups + group] : T(0);
}

// Where the number of a row and group is in a strip's.
__device__ inline i64 place_in_strips(const Laid& laid, i64 groups, i64 expert, i64 row, i64 group) {
    const int r = static_cast<int>(row % kStrip);
    return ((expert * laid.strips + row / kStrip) * groups + group) * kStrip + r % 8 * 2 + r / 8;
}

template <typename T>
__global__ void scales_of_strips(const T* __restrict__ strips, Laid laid, i64 groups, T* __restrict__ scales) {
    const i64 item = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (item >= laid.experts * laid.rows * groups) return;
    i64 group = item;
    i64 row = split(group, groups);
    const i64 expert = split(row, laid.rows);
    scales[item] = strips[place_in_strips(laid, groups, expert, row, group)];
}

// ---- ggml's blocks ------------------------------------------------------------------------------

// What blocks hold beside codes, in strips; null where a type has none. Halves are their bits.
struct BlockFields {
    u16 *scale, *minimum, *sum;
    u8 *sub_scale, *sub_minimum;
};

// The bits of codes in a block, one code or one byte at a time: blocks may start anywhere.
template <class Part> struct Bits;
template <int kByte, int kBits, int kSpan, int kShift>
struct Bits<Field<kByte, kBits, kSpan, kShift>> {
    static constexpr int lanes = 8 / kBits;
    static constexpr u32 mask = (1u << kBits) - 1;

    __device__ static u32 of_code(const u8* block, int i) {
        const int byte = kSpan == 1 ? i / lanes : i / (kSpan * lanes) * kSpan + i % kSpan;
        const int lane = kSpan == 1 ? i % lanes : i / kSpan % lanes;
        return (block[kByte + byte] >> lane * kBits & mask) << kShift;
    }
    // Those of byte `b` of a block of kElements.
    template <int kElements, class Code>
    __device__ static u32 of_byte(int b, Code code) {
        const int at = b - kByte;
        if (at < 0 || at >= kElements / lanes) return 0;
        u32 bits = 0;
        for (int lane = 0; lane < lanes; ++lane) {
            const int i = kSpan == 1 ? at * lanes + lane : (at / kSpan * lanes + lane) * kSpan + at % kSpan;
            bits |= (code(i) >> kShift & mask) << lane * kBits;
        }
        return bits;
    }
};
template <class... Parts>
struct Bits<Fields<Parts...>> {
    __device__ static u32 of_code(const u8* block, int i) { return (Bits<Parts>::of_code(block, i) | ...); }
    template <int kElements, class Code>
    __device__ static u32 of_byte(int b, Code code) { return (Bits<Parts>::template of_byte<kElements>(b, code) | ...); }
};
// The bits of small integers that byte `b` holds.
template <int kByte, int kCount, int kFirst, int kLow, int kBits, int kShift, int kStep>
struct Bits<Run<kByte, kCount, kFirst, kLow, kBits, kShift, kStep>> {
    template <class Value>
    __device__ static u32 of_byte(int b, Value value) {
        const int at = b - kByte;
        if (at < 0 || at >= kCount) return 0;
        return (value(kFirst + at * kStep) >> kShift & ((1u << kBits) - 1)) << kLow;
    }
};
template <class... Parts>
struct Bits<Runs<Parts...>> {
    template <class Value>
    __device__ static u32 of_byte(int b, Value value) { return (Bits<Parts>::of_byte(b, value) | ... | 0u); }
};

// A warp's numbers of the groups that begin in its unit: to[...] = value(block, index in the block), for
// groups of kGroup columns, kEach of them in a block.
template <class Layout, int kGroupColumns, typename T, class Value>
__device__ void put_fields(T* to, const u8* rows, const Laid& laid, const Unit& at, int lane, Value value) {
    constexpr int own = kGroupColumns < kUnit ? kUnit / kGroupColumns : 1, each = Layout::elements / kGroupColumns;
    const i64 groups = laid.columns / kGroupColumns, row_bytes = laid.columns / Layout::elements * Layout::bytes;
    if (at.unit * kUnit % kGroupColumns) return;
    const i64 first = at.unit * kUnit / kGroupColumns;
    for (int i = lane; i < own * kStrip; i += 32) {
        const i64 group = first + i / kStrip;
        if (group >= groups) continue;
        const i64 row = at.strip * kStrip + i % kStrip / 2 + i % 2 * 8;
        const u8* block = rows + row * row_bytes + group / each * Layout::bytes;
        to[((at.expert * laid.strips + at.strip) * groups + group) * kStrip + i % kStrip] =
            row < laid.rows ? static_cast<T>(value(block, static_cast<int>(group % each))) : T(0);
    }
}

template <class Format>
__global__ void fragments_of_blocks(const u8* __restrict__ blocks, Laid laid, u32* __restrict__ codes, BlockFields fields) {
    using Layout = typename Format::Layout;
    constexpr int bits = Format::Packing::bits;
    constexpr bool joined = is_joined<typename Format::Codec, bits>;
    const i64 thread = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (thread / 32 >= laid.experts * laid.strips * laid.units) return;
    const Unit at(thread / 32, laid);
    const int lane = threadIdx.x % 32;
    const i64 first_row = at.strip * kStrip, first_column = at.unit * kUnit;
    const i64 row_bytes = laid.columns / Layout::elements * Layout::bytes;
    const u8* rows = blocks + at.expert * laid.rows * row_bytes;  // of the expert
    u32 words[bits] = {};
    put_codes<bits, joined>(words, lane, [&](int row, int column) -> u32 {
        if (first_row + row >= laid.rows || first_column + column >= laid.columns) return 0;
        // A unit begins in a block of 256, or has two of 32.
        const i64 block = first_column / Layout::elements + (Layout::elements < kUnit ? column / Layout::elements : 0);
        const int i = Layout::elements < kUnit ? column % Layout::elements : static_cast<int>(first_column % Layout::elements) + column;
        const u32 code = Bits<typename Layout::Codes>::of_code(rows + (first_row + row) * row_bytes + block * Layout::bytes, i);
        return Layout::is_signed ? code ^ 0x80u : code;
    });
    store_words<bits>(codes + at.index * 32 * bits, lane, words);
    const auto half = [](int byte) { return [byte](const u8* block, int) -> u32 { return block[byte] | block[byte + 1] << 8; }; };
    put_fields<Layout, Layout::elements>(fields.scale, rows, laid, at, lane, half(Layout::scale_byte));
    if constexpr (Layout::minimum_byte >= 0)
        put_fields<Layout, Layout::elements>(fields.minimum, rows, laid, at, lane, half(Layout::minimum_byte));
    if constexpr (Layout::sum_byte >= 0)
        put_fields<Layout, Layout::elements>(fields.sum, rows, laid, at, lane, half(Layout::sum_byte));
    if constexpr (Layout::ScaleRuns::any)
        put_fields<Layout, Layout::sub_block>(fields.sub_scale, rows, laid, at, lane, [](const u8* block, int i) { return Layout::ScaleRuns::read(block, i); });
    if constexpr (Layout::MinimumRuns::any)
        put_fields<Layout, Layout::sub_block>(fields.sub_minimum, rows, laid, at, lane, [](const u8* block, int i) { return Layout::MinimumRuns::read(block, i); });
}

template <class Format>
__global__ void blocks_of_fragments(const u32* __restrict__ codes, BlockFields fields, Laid laid, u8* __restrict__ blocks) {
    using Layout = typename Format::Layout;
    constexpr int bits = Format::Packing::bits;
    constexpr bool joined = is_joined<typename Format::Codec, bits>;
    const i64 row_blocks = laid.columns / Layout::elements, subs = laid.columns / Layout::sub_block;
    const i64 item = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (item >= laid.experts * laid.rows * row_blocks * Layout::bytes) return;
    const int byte = static_cast<int>(item % Layout::bytes);
    i64 block = item / Layout::bytes;
    i64 row = split(block, row_blocks);
    const i64 expert = split(row, laid.rows);
    u32 made = Bits<typename Layout::Codes>::template of_byte<Layout::elements>(byte, [&](int i) -> u32 {
        const u32 code = code_at<bits, joined>(codes, laid, expert, row, block * Layout::elements + i);
        return Layout::is_signed ? code ^ 0x80u : code;
    });
    const i64 place = place_in_strips(laid, row_blocks, expert, row, block);
    const auto put_half = [&](const u16* halves, int at) {
        if (byte == at || byte == at + 1) made |= halves[place] >> 8 * (byte - at) & 0xFFu;
    };
    put_half(fields.scale, Layout::scale_byte);
    if constexpr (Layout::minimum_byte >= 0) put_half(fields.minimum, Layout::minimum_byte);
    if constexpr (Layout::sum_byte >= 0) put_half(fields.sum, Layout::sum_byte);
    const auto sub = [&](const u8* from) {
        return [&, from](int i) -> u32 {
            return from[place_in_strips(laid, subs, expert, row, block * (Layout::elements / Layout::sub_block) + i)];
        };
    };
    if constexpr (Layout::ScaleRuns::any) made |= Bits<typename Layout::ScaleRuns>::of_byte(byte, sub(fields.sub_scale));
    if constexpr (Layout::MinimumRuns::any) made |= Bits<typename Layout::MinimumRuns>::of_byte(byte, sub(fields.sub_minimum));
    blocks[item] = static_cast<u8>(made);
}

}  // namespace cuquant
