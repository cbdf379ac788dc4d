// Weights in the layout "fragments/1": a lane's 32 codes of 16 rows x 64 columns -> operands of matrix
// products. cuquant/array/fragments.py says where which code lies.
#pragma once
#include "format.cuh"
#include "device/mma.cuh"

namespace cuquant {

constexpr int kStrip = 16, kUnit = 64;  // rows, columns

// ---- loading ------------------------------------------------------------------------------------

template <int kBits>
struct Words {  // of one lane and unit
    u32 w[kBits];

    __device__ static constexpr i64 unit_words() { return 32 * kBits; }
    // Where a lane's words of a unit are, for each size of a load.
    struct Place {
        const u8 *sixteen, *eight, *four;

        __device__ void set(const u32* unit, int lane) {
            const u8* at = reinterpret_cast<const u8*>(unit);
            sixteen = at + lane * 16; eight = at + kBits / 4 * 512 + lane * 8; four = at + (kBits - 1) * 128 + lane * 4;
        }
        __device__ void move(int units) {
            const i64 bytes = static_cast<i64>(units) * (128 * kBits);
            sixteen += bytes; eight += bytes; four += bytes;
        }
    };
    __device__ void load(const u32* unit, int lane) {
        Place from;
        from.set(unit, lane);
        load(from, 0);
    }
    // Of the unit that is so many behind.
    __device__ void load(const Place& from, int behind) {
        const int at = behind * 128 * kBits;
#pragma unroll
        for (int v = 0; v < kBits / 4; ++v) {
            const uint4 part = load16_once(from.sixteen + at + v * 512);
            w[4 * v] = part.x; w[4 * v + 1] = part.y; w[4 * v + 2] = part.z; w[4 * v + 3] = part.w;
        }
        constexpr int fours = kBits / 4 * 4;
        if constexpr (kBits & 2) {
            const uint2 part = load8_once(from.eight + at);
            w[fours] = part.x; w[fours + 1] = part.y;
        }
        if constexpr (kBits & 1) w[kBits - 1] = load4_once(from.four + at);
    }
    // The same of a unit in shared memory.
    __device__ void load_shared(u32 unit, int lane) {
#pragma unroll
        for (int v = 0; v < kBits / 4; ++v) {
            const uint4 part = load16_shared(unit + (v * 32 + lane) * 16);
            w[4 * v] = part.x; w[4 * v + 1] = part.y; w[4 * v + 2] = part.z; w[4 * v + 3] = part.w;
        }
        constexpr int fours = kBits / 4 * 4;
        if constexpr (kBits & 2) {
            const uint2 part = load8_shared(unit + fours * 128 + lane * 8);
            w[fours] = part.x; w[fours + 1] = part.y;
        }
        if constexpr (kBits & 1) w[kBits - 1] = load4_shared(unit + (kBits - 1) * 128 + lane * 4);
    }
};

// ---- where a pair's codes are -------------------------------------------------------------------

// Of a lane's words in the layout "fragments/1".
template <int kBits>
struct FragmentPairs {
    static constexpr bool odd = kBits == 3 || kBits == 5;
    static constexpr int fields = (odd ? 15 : 16) / kBits;  // pairs of a word
    __device__ static constexpr int word(int pair) { return pair / fields; }
    __device__ static constexpr int field(int pair) { return pair % fields; }  // of its word
    // One field holds the whole code: all pairs of 1, 2, 4, 8 bits, and 15 of the 16 of 3 and 5.
    __device__ static constexpr bool one_field(int pair) { return odd ? pair < 15 : kBits < 6 || kBits == 8; }
};
template <>
struct FragmentPairs<0> {  // joined: of 4 bits, a byte a pair
    static constexpr int fields = 4;
    __device__ static constexpr bool one_field(int) { return true; }
};
template <class Codec, int kBits> using PairsOf = FragmentPairs<is_joined<Codec, kBits> ? 0 : kBits>;
// Of a row's words, in runs of kRun pairs: see matmul/stream_rows.cuh.
template <int kBits, int kRun>
struct RowPairs {
    static constexpr int fields = 16 / kBits, words = (kRun + fields - 1) / fields;  // of a run
    __device__ static constexpr int word(int pair) { return pair / kRun * words + pair % kRun / fields; }
    __device__ static constexpr int field(int pair) { return pair % kRun % fields; }
    __device__ static constexpr bool one_field(int) { return true; }
};

// Of strings of codes as a row lies, of kRun pairs and kWords words: neighbours, which are looked up.
template <int kRun, int kWords> struct JoinedString {};
// Of a string of 32 codes of 3 or 5 bits: those that lie 15 or 18 bits apart, so that some 32 bits have one in each half;
// and of 5 bits the last two.
template <int kBits>
struct ApartString {
    static constexpr bool five = kBits == 5;
    __device__ static constexpr bool last(int pair) { return five && pair == 15; }
    __device__ static constexpr int low(int pair) { return five ? pair / 3 * 6 + pair % 3 : pair < 6 ? pair : pair < 11 ? pair + 6 : pair + 11; }
    __device__ static constexpr int high(int pair) { return low(pair) + (last(pair) ? 1 : five ? 3 : pair < 6 ? 6 : 5); }
    // Where these 32 bits begin, if the lowest `reach` of each half will do: neighbours share them, or they are a word.
    __device__ static constexpr int from(int pair, int reach) {
        int at = 0;
        for (int p = 0;; ++p) {
            const int first = kBits * low(p), second = kBits * high(p) - 16, most = first < second ? first : second;
            const int least = first + second - most + kBits - reach, word = most / 32 * 32;
            if (at < least || at > most) at = word < least || word > most ? most : word;
            if (p == pair) return at;
        }
    }
};

// 16 bits or more of a string of kWords, from bit `at` on.
template <int kWords>
__device__ u32 bits_from(const u32* string, int at) {
    const int i = at / 32;
    return at % 32 == 0 ? string[i] : i + 1 < kWords ? __funnelshift_r(string[i], string[i + 1], at % 32) : string[i] >> at % 32;
}

template <class Pairs, int kBits, int kPair>
__device__ u32 raw_codes(const u32* w) {  // a pair's codes, each in the low bits of its half
    constexpr u32 ones = 0x00010001u;
    if constexpr (is_same<Pairs, FragmentPairs<0>>) {
        const u32 byte = w[kPair / 4] >> 8 * (kPair % 4);
        return (byte & 15u) | (byte & 0xF0u) << 12;
    }
    else if constexpr (Pairs::one_field(kPair)) {
        return w[Pairs::word(kPair)] >> kBits * Pairs::field(kPair) & ((1u << kBits) - 1) * ones;
    }
    else if constexpr (kBits == 6) return raw_codes<FragmentPairs<4>, 4, kPair>(w) | raw_codes<FragmentPairs<2>, 2, kPair>(w + 4) << 4;
    else if constexpr (kBits == 7) return raw_codes<FragmentPairs<6>, 6, kPair>(w) | raw_codes<FragmentPairs<1>, 1, kPair>(w + 6) << 6;
    else {
        u32 codes = 0;
#pragma unroll
        for (int i = 0; i < kBits; ++i) codes |= (w[i] >> (15 - i)) & (ones << i);
        return codes;
    }
}

// ---- integers -----------------------------------------------------------------------------------

// Or-ing a code into the bits of 1024 (bfloat16: 128) makes 1024 + code; further up by `place` bits it
// makes 1024 + 2^place code. One fused multiply-add makes that code - offset, exactly.
template <class T, class Pairs, int kBits, int kPair>
struct Magic {
    static constexpr int reach = is_same<T, Half> ? 10 : 7;
    static constexpr double base = is_same<T, Half> ? 1024 : 128;
    static constexpr u32 bits = is_same<T, Half> ? 0x64006400u : 0x43004300u;
    static constexpr bool direct = Pairs::one_field(kPair);
    static constexpr int at = direct ? kBits * Pairs::field(kPair) : 0;
    // Neighbours share a shift by 8 where that brings the field into reach.
    static constexpr bool by_8 = at + kBits > reach && at >= 8 && at - 8 + kBits <= (reach < 8 ? reach : 8);
    // Of 3 and 5 bits, float16, those of a word share the shift that also brings its uppermost bits, which belong to the
    // last pair, where they belong: word i has that pair's bit i.
    static constexpr bool shared = reach == 10 && is_same<Pairs, FragmentPairs<kBits>> && FragmentPairs<kBits>::odd;
    __device__ static constexpr int shared_shift(int word) { return 15 - (reach - kBits) - word; }
    static constexpr int shift = at + kBits <= reach ? 0 : shared ? shared_shift(kPair / Pairs::fields) : by_8 ? 8 : at;
    static constexpr int place = shared && !direct ? reach - kBits : at - shift;

    __device__ static u32 raised(const u32* w) {
        if constexpr (shared && !direct) {
            u32 codes = bits;
#pragma unroll
            for (int i = 0; i < kBits; ++i) codes = and_or(w[i] >> shared_shift(i), 0x10001u << (place + i), codes);
            return codes;
        }
        else if constexpr (kBits == 8) return __byte_perm(w[kPair / 2], bits, kPair % 2 ? 0x7351 : 0x7250);
        else if constexpr (!direct) return raw_codes<Pairs, kBits, kPair>(w) | bits;
        else return and_or(w[Pairs::word(kPair)] >> shift, (((1u << kBits) - 1) << place) * 0x10001u, bits);
    }
    static constexpr u32 factor = constant_pair<T>(1.0 / (1 << place));
    // To be added then.
    __device__ static constexpr u32 zero(int offset) { return constant_pair<T>(-base / (1 << place) - offset); }
};
// Places differ in the halves.
template <class T, int kBits, int kPair>
struct Magic<T, ApartString<kBits>, kBits, kPair> {
    using Usual = Magic<T, FragmentPairs<1>, 1, 0>;
    using String = ApartString<kBits>;
    static constexpr int from = String::last(kPair) ? 0 : String::from(kPair, Usual::reach);
    static constexpr int low = String::last(kPair) ? 1 : kBits * String::low(kPair) - from;
    static constexpr int high = String::last(kPair) ? 0 : kBits * String::high(kPair) - 16 - from;
    static constexpr u32 mask = (1u << kBits) - 1;
    static_assert(low >= 0 && high >= 0 && low + kBits <= Usual::reach && high + kBits <= Usual::reach, "codes in reach");

    __device__ static u32 window(const u32* w) {
        if constexpr (String::last(kPair)) return __byte_perm(w[kBits - 1] >> (31 - 2 * kBits), w[kBits - 1] >> (32 - kBits), 0x5410);
        else if constexpr (from < 0) return w[0] << -from;
        else return bits_from<kBits>(w, from);
    }
    __device__ static u32 raised(const u32* w) { return and_or(window(w), mask << low | mask << (16 + high), Usual::bits); }
    static constexpr u32 factor = constant<T>(1.0 / (1 << low)) | constant<T>(1.0 / (1 << high)) << 16;
    __device__ static constexpr u32 zero(int offset) {
        return constant<T>(-Usual::base / (1 << low) - offset) | constant<T>(-Usual::base / (1 << high) - offset) << 16;
    }
};

// A pair of codes minus an offset: one that is told, a pair of T with its sign turned (of float16 minus 1024 more, which
// makes such a pair of a byte's bits), or one that is known.
template <class T, class Pairs, int kBits, int kPair>
__device__ u32 integers(const u32* w, u32 minus_offset) {
    if constexpr (kBits == 8 && !is_same<T, Half>) {
        // 8 bits are more than bfloat16's 7 hold beside the leading one.
        const u32 word = w[kPair / 2];
        const float low = float_of(__byte_perm(word, 0x4B000000u, 0x7650 + kPair % 2));
        const float high = float_of(__byte_perm(word, 0x4B000000u, 0x7652 + kPair % 2));
        const float minus = low_of<T>(minus_offset) - 8388608.0f;
        return pair_of<T>(low + minus, high + minus);
    } else {
        using M = Magic<T, Pairs, kBits, kPair>;
        return fma_pair<T>(M::raised(w), M::factor, add_pair<T>(minus_offset, M::zero(is_same<T, Half> ? -1024 : 0)));
    }
}
template <class T, class Pairs, int kBits, int kPair, int kOffset>
__device__ u32 integers(const u32* w, u32 nothing) {
    if constexpr (kBits == 8 && !is_same<T, Half>) {
        return integers<T, Pairs, kBits, kPair>(w, constant_pair<T>(-kOffset));
    } else {
        using M = Magic<T, Pairs, kBits, kPair>;
        return fma_pair<T>(M::raised(w), M::factor + nothing, M::zero(kOffset));
    }
}

// ---- one decoder a codec ------------------------------------------------------------------------

// two<Pairs, kPair, kZeroPoint>: pairs kPair, which is even, and kPair + 1. `tables` are in shared memory, and `lane`
// is lane_table of it: where the lane's own part of an entry lies; `first_offset` and `second_offset` have a row's
// minus zero point as a pair of T. Filling<kThreads> is what so many threads do to fill the tables: they load levels,
// which takes a while, and later store entries.
template <class Codec, class T, int kBits, bool kWide> struct PairDecoder;

struct NoTable {
    __device__ void load(const float*, int, bool) {}
    __device__ void store(u8*, int) const {}
};

template <int kLow, int kHigh, Rounding kRounding, class T, int kBits, bool kWide>
struct PairDecoder<Uniform<kLow, kHigh, kRounding>, T, kBits, kWide> {
    static constexpr int table_bytes = 0;
    template <int> using Filling = NoTable;
    __device__ static u32 lane_table(int) { return 0; }

    // `nothing`: see matmul/stream.cu.
    template <class Pairs, int kPair, bool kZeroPoint>
    __device__ static void two(const u32* w, const u8*, u32 nothing, u32 first_offset, u32 second_offset, u32& first, u32& second) {
        if constexpr (kZeroPoint) {
            first = integers<T, Pairs, kBits, kPair>(w, first_offset);
            second = integers<T, Pairs, kBits, kPair + 1>(w, second_offset);
        } else {
            constexpr int offset = Uniform<kLow, kHigh, kRounding>::offset;
            first = integers<T, Pairs, kBits, kPair, offset>(w, nothing);
            second = integers<T, Pairs, kBits, kPair + 1, offset>(w, nothing);
        }
    }
};

// The level of a code: of a codebook from the values that are told.
template <class Codec> struct Levels {
    // NVRTC 12.9 and 13.0 drop a mask of codes that they know to be less than 32, and other bits come with them.
    __device__ static float level(const float*, u32 code) { return Codec::decode(static_cast<u32>(anew(static_cast<int>(code)))); }
};
template <int kCount, Grid kGrid, bool kSorted, int kCodes> struct Levels<Codebook<kCount, kGrid, kSorted, kCodes>> {
    __device__ static float level(const float* values, u32 code) { return values[code]; }
};

// Tables of levels in shared memory. Up to 4 bits an entry is a pair of levels, above it is one level. Each lane has a
// copy of its own, but of 7 and 8 bits without kWide, where some lanes share one. Pairs of 4 bits are a byte (`joined`); the
// entry of a byte is found by one permutation where entries are 256 bytes apart (kWide).
template <class Codec, class T, int kBits, bool kWide>
struct TableDecoder {
    static constexpr bool pairs = kBits <= 4, joined = kBits == 4;
    static constexpr int entries = pairs ? 1 << 2 * kBits : 1 << kBits;
    static constexpr bool by_byte = kWide && (joined || kBits == 8);
    static constexpr int copies = pairs || kBits < 7 || kWide ? 32 : kBits == 7 ? 16 : 8;
    static constexpr int apart = by_byte ? 256 : copies * 4;  // bytes from entry to entry
    static constexpr int table_bytes = entries * apart;
    static constexpr u32 mask = (1u << kBits) - 1;

    template <int kThreads>
    struct Filling {
        static constexpr int each = (entries + kThreads - 1) / kThreads, parts = copies / 4;
        float first[each], second[each];

        // `turned`: the first code of a byte is the one in its upper bits.
        __device__ void load(const float* values, int thread, bool turned) {
#pragma unroll
            for (int i = 0; i < each; ++i) {
                const int e = (thread + i * kThreads) % entries, low = e & mask, high = e >> kBits & mask;
                first[i] = Levels<Codec>::level(values, !pairs ? e : turned ? high : low);
                second[i] = Levels<Codec>::level(values, !pairs ? e : turned ? low : high);
            }
        }
        __device__ void store(u8* table, int thread) const {
#pragma unroll
            for (int i = 0; i < each; ++i) {
                const int e = thread + i * kThreads;
                if (e >= entries) return;
                const u32 v = pair_of<T>(first[i], second[i]);
#pragma unroll
                for (int part = 0; part < parts; ++part)  // neighbours begin with different banks
                    *reinterpret_cast<uint4*>(table + e * apart + (part + e) % parts * 16) = make_uint4(v, v, v, v);
            }
        }
    };
    __device__ static u32 lane_table(int lane) { return lane % copies * 4; }
    // Entry `code`, where that stands `at` bits from the low end of a word.
    __device__ static u32 look_up(u32 word, int at, const u8* tables, u32 lane) {
        return entry_at(at < size ? word << (size - at) : word >> (at - size), tables, lane);
    }
    static constexpr int size = copies == 32 ? 7 : copies == 16 ? 6 : 5;  // log2 of `apart`
    __device__ static u32 entry_at(u32 moved, const u8* tables, u32 lane) {
        return *reinterpret_cast<const u32*>(tables + and_or(moved, static_cast<u32>(entries - 1) << size, lane));
    }
    template <int kByte>
    __device__ static u32 entry_of_byte(u32 word, const u8* tables, u32 lane) {
        if constexpr (by_byte) return *reinterpret_cast<const u32*>(tables + __byte_perm(word, lane, 0x5504 | kByte << 4));
        else return look_up(word, 8 * kByte, tables, lane);
    }

    // Of the bits from `kBit` of a string on.
    template <int kBit>
    __device__ static u32 entry_of_string(const u32* w, const u8* tables, u32 lane) {
        constexpr int at = kBit % 32, word = kBit / 32;
        if constexpr (at + (pairs ? 2 * kBits : kBits) > 32) return entry_at(__funnelshift_r(w[word], w[word + 1], at - size), tables, lane);
        else return look_up(w[word], at, tables, lane);
    }
    __device__ static u32 both(u32 low, u32 high) { return __byte_perm(low, high, 0x5410); }

    template <class Pairs, int kPair, bool>
    __device__ static void two(const u32* w, const u8* tables, u32 lane, u32, u32, u32& first, u32& second) {
        if constexpr (joined) {
            first = entry_of_byte<kPair % 4>(w[kPair / 4], tables, lane);
            second = entry_of_byte<kPair % 4 + 1>(w[kPair / 4], tables, lane);
        } else {
            first = One<Pairs, kPair>::get(w, tables, lane);
            second = One<Pairs, kPair + 1>::get(w, tables, lane);
        }
    }
    template <class Pairs, int kPair>
    struct One {
        __device__ static u32 get(const u32* w, const u8* tables, u32 lane) {
            if constexpr (kBits == 8) {
                return both(entry_of_byte<kPair % 2>(w[kPair / 2], tables, lane), entry_of_byte<kPair % 2 + 2>(w[kPair / 2], tables, lane));
            } else if constexpr (!pairs && Pairs::one_field(kPair)) {
                const u32 word = w[Pairs::word(kPair)];
                constexpr int at = kBits * Pairs::field(kPair);
                return both(look_up(word, at, tables, lane), look_up(word, at + 16, tables, lane));
            } else {
                const u32 codes = raw_codes<Pairs, kBits, kPair>(w);
                if constexpr (pairs) return look_up(codes | codes >> (16 - kBits), 0, tables, lane);
                else return both(look_up(codes, 0, tables, lane), look_up(codes, 16, tables, lane));
            }
        }
    };
    template <int kRun, int kWords, int kPair>
    struct One<JoinedString<kRun, kWords>, kPair> {
        static constexpr int at = 32 * kWords * (kPair / kRun) + 2 * kBits * (kPair % kRun);
        __device__ static u32 get(const u32* w, const u8* tables, u32 lane) {
            if constexpr (pairs) return entry_of_string<at>(w, tables, lane);
            else return both(entry_of_string<at>(w, tables, lane), entry_of_string<at + kBits>(w, tables, lane));
        }
    };
};

template <int kCount, Grid kGrid, bool kSorted, int kCodes, class T, int kBits, bool kWide>
struct PairDecoder<Codebook<kCount, kGrid, kSorted, kCodes>, T, kBits, kWide> : TableDecoder<Codebook<kCount, kGrid, kSorted, kCodes>, T, kBits, kWide> {};
template <int kExponent, int kMantissa, Specials kSpecials, class T, bool kWide>
struct PairDecoder<Minifloat<kExponent, kMantissa, kSpecials>, T, 4, kWide> : TableDecoder<Minifloat<kExponent, kMantissa, kSpecials>, T, 4, kWide> {};

template <int kExponent, int kMantissa, Specials kSpecials, class T, int kBits, bool kWide>
struct PairDecoder<Minifloat<kExponent, kMantissa, kSpecials>, T, kBits, kWide> {
    using Codec = Minifloat<kExponent, kMantissa, kSpecials>;
    static constexpr int table_bytes = 0;
    template <int> using Filling = NoTable;
    __device__ static u32 lane_table(int) { return 0; }

    template <class Pairs, int kPair, bool>
    __device__ static void two(const u32* w, const u8*, u32, u32, u32, u32& first, u32& second) {
        first = one<Pairs, kPair>(w);
        second = one<Pairs, kPair + 1>(w);
    }
    template <class Pairs, int kPair>
    __device__ static u32 one(const u32* w) {
        if constexpr (kBits == 8) {
            const u32 word = w[kPair / 2];
            u32 halves;
            if constexpr (kExponent == 5) {
                halves = __byte_perm(word, 0, kPair % 2 ? 0x3414 : 0x2404);
            } else {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
                halves = halves_of_e4m3_pair(__byte_perm(word, 0, kPair % 2 ? 0x4431 : 0x4420));
#else
                halves = halves_of(Codec::decode(word >> 8 * (kPair % 2) & 0xFFu), Codec::decode(word >> (16 + 8 * (kPair % 2)) & 0xFFu));
#endif
            }
            if constexpr (is_same<T, Half>) return halves;
            else return pair_of<T>(float_of_half(halves), float_of_high_half(halves));
        } else {
            // The bits of a 16-bit float of which it has a part; only the bias differs.
            constexpr int mantissa = is_same<T, Half> ? 10 : 7, excess = is_same<T, Half> ? 15 : 127;
            constexpr u32 sign = 1u << (kBits - 1);
            const u32 codes = raw_codes<Pairs, kBits, kPair>(w);
            const u32 placed = (codes & sign * 0x10001u) << (16 - kBits) | (codes & (sign - 1) * 0x10001u) << (mantissa - kMantissa);
            return mul_pair<T>(placed, static_cast<u32>(2 * excess - Codec::excess) << mantissa | static_cast<u32>(2 * excess - Codec::excess) << (mantissa + 16));
        }
    }
};

template <class Codec, class T, int kBits, bool kWide = false>
struct Decoder : PairDecoder<Codec, T, kBits, kWide> {
    using Two = PairDecoder<Codec, T, kBits, kWide>;

    // The four pairs of step kStep of a unit, in the order of mma's registers: rows g, g + 8, g, g + 8.
    template <int kStep, bool kZeroPoint>
    __device__ static void decode(const u32* w, const u8* tables, u32 lane, const u32 (&offset)[2], u32 (&a)[4]) {
        using Pairs = FragmentPairs<kBits>;
        Two::template two<Pairs, 4 * kStep, kZeroPoint>(w, tables, lane, offset[0], offset[1], a[0], a[1]);
        Two::template two<Pairs, 4 * kStep + 2, kZeroPoint>(w, tables, lane, offset[0], offset[1], a[2], a[3]);
    }
    // The same of two rows, of RowWords; each pair has its own offset.
    template <class Pairs, int kStep, bool kZeroPoint>
    __device__ static void decode_rows(const u32* first, const u32* second, const u8* tables, u32 lane, const u32 (&offset)[4], u32 (&a)[4]) {
        Two::template two<Pairs, 2 * kStep, kZeroPoint>(first, tables, lane, offset[0], offset[2], a[0], a[2]);
        Two::template two<Pairs, 2 * kStep, kZeroPoint>(second, tables, lane, offset[1], offset[3], a[1], a[3]);
    }
};

}  // namespace cuquant
