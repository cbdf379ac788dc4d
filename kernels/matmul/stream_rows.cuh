// Rows of a QuantArray, as they are packed -> operands of matrix products: the codes of 64 columns of two
// rows, and the same columns of x.
//
// Lane 4 g + t has 16 of each 64 columns of rows g and g + 8. It multiplies them in any order, as long as x has the same
// one; but 16 columns that meet in one step of a product must share a scale. Where a unit is one group these are the
// columns from 16 t on. Where it has kFine groups, 2 or 4, a lane has as many of each, in runs; but codes of 2, 4 and 8
// bits are loaded in one run, or of 4 bits from shared memory in two, and the lanes of a row exchange what they have then,
// so that step s has columns 16 s .. 16 s + 15. Of up to 3 bits in shared memory, or 5, where groups are not shorter, a lane has
// the 32 columns of two units from 32 t on, which are whole words; lanes 2 and 3 the second 16 of them first, since lanes
// that read x together would meet banks twice.
#pragma once
#include "device/dot.cuh"
#include "matmul/stream_scales.cuh"

namespace cuquant {

// Where the runs of lane t of a row lie, in bits from where the units begin.
template <int kRuns, int kBits, int kApart>
struct RunPlaces {
    __device__ static constexpr int first_bit(int run, int t) { return run * kApart + t * kBits; }
    __device__ static constexpr int last_word(int run, int t) { return (first_bit(run, t) + kBits - 1) / 32; }
    __device__ static constexpr int words(int run, int t) { return last_word(run, t) - first_bit(run, t) / 32 + 1; }
    __device__ static constexpr int most_words() {
        int most = 0;
        for (int i = 0; i < 4 * kRuns; ++i) most = words(i / 4, i % 4) > most ? words(i / 4, i % 4) : most;
        return most;
    }
    __device__ static constexpr bool all_have(int count) {
        for (int i = 0; i < 4 * kRuns; ++i)
            if (words(i / 4, i % 4) != count) return false;
        return true;
    }
    // Word i of those in which a run lies; behind the last one that one again.
    __device__ static constexpr int word(int run, int i, int t) {
        const int at = first_bit(run, t) / 32 + i;
        return i == 0 || all_have(most_words()) || at < last_word(run, t) ? at : last_word(run, t);
    }
};

// kLooked: levels of codes are looked up. kRing: units of a chunk in shared memory, or 0. kSpan: units that
// are multiplied together.
template <class Packing, int kFine, bool kLooked, int kRing, int kSpan>
struct RowWords {
    static constexpr int bits = Packing::bits;
    static constexpr bool halves = kRing > 0 && bits == 4;
    static constexpr bool exchanged = kFine > 1 && (bits == 2 || bits == 4 || bits == 8);
    static constexpr bool fours = exchanged ? kFine == 4 || !halves : kFine == 4;  // a lane has four columns of each 16
    static constexpr int span = kSpan;
    static_assert(span == 1 || (kFine == 1 && (bits <= 3 || (bits == 5 && !kLooked)) && kRing > 0), "pairs of units");
    static constexpr int runs = halves ? 2 : exchanged ? 1 : kFine;
    static constexpr int run_columns = 16 * span / runs, run_bits = run_columns * bits, run_words = (run_bits + 31) / 32;
    using Places = RunPlaces<runs, run_bits, 4 * run_bits>;
    static constexpr bool in_place = bits == 2 || bits == 4 || bits == 8 || (bits == 1 && span == 2);  // pairs are 16 bits apart
    static constexpr bool joined = kLooked && bits < 8 && !(bits == 2 && exchanged);                   // pairs are neighbours
    static constexpr bool string = (joined && bits != 4) || ((bits == 3 || bits == 5) && span == 2);  // a run stays as it is
    // Else its first half is brought to the low halves of words, and the second to the high ones.
    using InHalves = RowPairs<bits, in_place ? 8 * span : run_columns / 2>;
    using Pairs = Choice<!string, InHalves, Choice<joined, JoinedString<run_columns / 2, run_words>, ApartString<bits>>>;
    static constexpr int loads = Places::most_words(), loaded = runs * loads;  // words of a run, and of a row
    static constexpr int words = string || in_place ? runs * run_words : runs * InHalves::words;
    // Of a chunk: lanes that read together meet no bank twice. Of 4 bits vector v of a row lies at v ^ turned(row).
    static constexpr int row_bytes = kRing * 8 * bits + (bits <= 3 || bits == 5 && span == 2 ? 16 : 0);
    __device__ static constexpr int turned(int row) { return bits == 4 ? row % 8 : 0; }
    static_assert(!string || Packing::order != Order::High, "neighbours are in order");
    u32 w[2 * loaded];

    // Where a lane's words begin among the 8 * bits bytes of a unit.
    __device__ static constexpr int byte_of(int t) { return 4 * Places::word(0, 0, t); }
    // And word i of a run, from there.
    __device__ static constexpr int byte_from(int run, int i, int t) { return 4 * (Places::word(run, i, t) - Places::word(0, 0, t)); }
    struct Place {  // of a unit
        const u8 *first, *second;
        __device__ void move(int units) { first += units * 8 * bits; second += units * 8 * bits; }
    };
    __device__ void load(const Place& from, int behind, int t) {
        load_row(from.first + behind * 8 * bits, w, t);
        load_row(from.second + behind * 8 * bits, w + loaded, t);
    }
    __device__ static void load_row(const u8* from, u32* to, int t) {
        if constexpr (bits == 8) { const uint4 v = load16_once(from); to[0] = v.x; to[1] = v.y; to[2] = v.z; to[3] = v.w; }
        else if constexpr (bits == 4) { const uint2 v = load8_once(from); to[0] = v.x; to[1] = v.y; }
        else {
#pragma unroll
            for (int i = 0; i < loaded; ++i) to[i] = load4_once(from + byte_from(i / loads, i % loads, t));
        }
    }

    // What lanes 2 and 3 do in another order, of two units: the words behind the middle of a run lie from `last` bytes behind where its
    // first one would on, and the third and fourth vector of x `across` bytes behind the first two; `pieces`: of neighbouring words.
    struct Sides {
        int last, across;
        u32 pieces;
        __device__ explicit Sides(int t) : last(0), across(0), pieces(0) {
            if constexpr (span == 2) {
                const bool first = t < 2;
                last = anew(first ? 4 * (loaded - loaded / 2) : -4 * (loaded / 2));
                across = anew(first ? 32 : -32);
                if constexpr (run_bits % 64) pieces = anew(first ? 0x3210 : 0x5432);
            }
        }
    };
    // The same of a unit of a chunk in shared memory, see ChunkCopies; `line`: ring_line, from where the chunk begins.
    __device__ void load_shared(u32 line, int unit, int t, const Sides& sides) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if constexpr (halves) {
                const u32 at = (line ^ unit * 32) + r * 8 * row_bytes;
                w[2 * r] = load4_shared(at);
                w[2 * r + 1] = load4_shared(at ^ 16);
            } else {
#pragma unroll
                for (int i = 0; i < loaded; ++i) {
                    const int at = span == 1 ? byte_from(i / loads, i % loads, t) : i < loaded - loaded / 2 ? 4 * i : sides.last + 4 * (i - (loaded - loaded / 2));
                    w[r * loaded + i] = load4_shared(line + at + unit * 8 * bits + r * 8 * row_bytes);
                }
            }
            if constexpr (span == 2 && run_bits % 64) {  // half a word is left to turn
                u32 own[loaded];
#pragma unroll
                for (int i = 0; i < loaded; ++i) own[i] = __byte_perm(w[r * loaded + i], w[r * loaded + (i + 1) % loaded], sides.pieces);
#pragma unroll
                for (int i = 0; i < loaded; ++i) w[r * loaded + i] = own[i];
            }
        }
    }
    __device__ static constexpr int ring_line(int g, int t) {
        const int second = span == 2 && t >= 2 ? loaded / 2 * 4 : 0;
        return g * row_bytes + (halves ? g * 16 | t * 4 : byte_of(t) + second);
    }

    // Row g + 8 kRow as PairDecoder takes it.
    template <int kRow>
    __device__ void row(int t, u32 (&to)[words]) const {
        const u32* own = w + kRow * loaded;
        if constexpr (in_place && !string) {
#pragma unroll
            for (int i = 0; i < loaded; ++i) to[i] = own[i] ^ Packing::flip;
            if constexpr (fours) exchange(t, to);
        } else {
#pragma unroll
            for (int run = 0; run < runs; ++run) {
                u32 codes[run_words];  // from its lowest bit on: lanes begin anywhere in a word
#pragma unroll
                for (int i = 0; i < run_words; ++i) {
                    const u32 *word = own + run * loads + i, next = i + 1 < loads ? word[1] : 0u;
                    codes[i] = run_bits % 32 ? __funnelshift_r(word[0], next, Places::first_bit(run, t) % 32) : word[0];
                }
                constexpr int each = InHalves::fields * bits;
#pragma unroll
                for (int i = 0; i < words / runs; ++i)
                    to[run * (words / runs) + i] = string ? codes[i]
                        : __byte_perm(bits_from<run_words>(codes, i * each), bits_from<run_words>(codes, run_bits / 2 + i * each), 0x5410);
            }
        }
    }

    // Lane t has the codes of columns 16 t .. of its row (`halves`: 8 t .. of each half); it gets those from place_in_step
    // on of each 16.
    __device__ static void exchange(int t, u32 (&w)[words]) {
        const bool upper = t & 2, odd = t & 1;
        if constexpr (bits == 8) {
            swap<2>(upper, w[0], w[2]);
            swap<2>(upper, w[1], w[3]);
            swap<1>(odd, w[0], w[1]);
            swap<1>(odd, w[2], w[3]);
        } else if constexpr (bits == 4) {
            constexpr int distance = halves ? 2 : 1;
            const bool second = halves ? upper : odd;
            if constexpr (!halves) swap<2>(upper, w[0], w[1]);
            const u32 got = __shfl_xor_sync(~0u, __byte_perm(w[0], w[1], second ? 0x5410 : 0x7632), distance);
            if constexpr (joined) {
                w[0] = __byte_perm(w[0], got, second ? 0x3254 : 0x5410);
                w[1] = __byte_perm(w[1], got, second ? 0x3276 : 0x7610);
            } else {
                w[0] = __byte_perm(w[0], got, second ? 0x3524 : 0x5140);  // two bytes of two steps, alternately
                w[1] = __byte_perm(w[1], got, second ? 0x3726 : 0x7160);
            }
        } else {
            w[0] = __byte_perm(w[0], __shfl_xor_sync(~0u, w[0], 2), upper ? 0x3276 : 0x5410);
            w[0] = __byte_perm(w[0], __shfl_xor_sync(~0u, w[0], 1), odd ? 0x3715 : 0x6240);  // a byte a step
            const u32 low = w[0] & 0x0F0F0F0Fu, high = w[0] >> 4 & 0x0F0F0F0Fu;
            w[0] = __byte_perm(low | low >> 4, high | high >> 4, 0x6420);
        }
    }
    // The first of a lane and the second of another one change places.
    template <int kDistance>
    __device__ static void swap(bool second, u32& a, u32& b) {
        const u32 got = __shfl_xor_sync(~0u, second ? a : b, kDistance);
        (second ? a : b) = got;
    }

    // ---- x ----------------------------------------------------------------------------------------

    __device__ static constexpr int place_in_step(int t) { return halves ? t % 2 * 8 + t / 2 * 4 : 4 * t; }
    // Which of a lane's columns (`fours`: of its 4 of a step) pair `pair` has as element e.
    __device__ static constexpr int column(int pair, int e) {
        if (string) return e ? ApartString<bits>::high(pair) : ApartString<bits>::low(pair);
        constexpr int apart = in_place ? 16 / bits : run_columns / 2;
        return Packing::place(fours ? pair % 2 + 2 * e : pair / apart * 2 * apart + pair % apart + e * apart);
    }
    // Where lane 4 g + t reads x's line of a unit and token g, and what keeps tokens apart: 2 that are read together, or 4.
    __device__ static constexpr int x_place(int t) { return fours ? place_in_step(t) * 2 : (runs == 2 ? t : 2 * span * t + (span == 2 && t >= 2 ? 2 : 0)) * 16; }
    static constexpr int x_pad = fours ? 32 : runs == 2 ? 64 : 16;
    // Where vector v of those that a lane reads lies: of four columns, or of eight.
    static constexpr int vectors = fours ? 4 : 2 * span;
    __device__ static constexpr int vector_at(int v) { return fours ? v * 32 : v % 2 * (runs == 2 ? 64 : 16); }
    // The second operands of the steps, four a unit; `line` is at x_place, and `behind` where the third and fourth vector begin.
    __device__ static void read_x(u32 line, u32 behind, u32 (&b)[8 * span]) {
        if constexpr (joined || pairs_x) return read_columns(line, behind, b);
        u32 x[8 * span];
        read_columns(line, behind, x);
        pairs_of_x<0>(x, b);
    }
    __device__ static void read_columns(u32 line, u32 behind, u32 (&b)[8 * span]) {
#pragma unroll
        for (int v = 0; v < vectors; ++v) {
            if constexpr (fours) {
                const uint2 own = load8_shared(line + vector_at(v));
                b[2 * v] = own.x; b[2 * v + 1] = own.y;
            } else {
                const uint4 own = load16_shared((v < 2 ? line : behind) + vector_at(v));
                b[4 * v] = own.x; b[4 * v + 1] = own.y; b[4 * v + 2] = own.z; b[4 * v + 3] = own.w;
            }
        }
    }
    // Where neighbours are no pair, columns of x that are one become neighbours: when they are read, or once for all
    // warps before, where that takes longer than what comes from memory.
    static constexpr bool pairs_x = !joined && bits <= 2 && span == 2;  // columns by eights
    __device__ static void pair_x(u8* line, u32 address, const Sides& sides) {
        u32 x[8 * span], b[8 * span];
        read_columns(address, address + sides.across, x);
        pairs_of_x<0>(x, b);
#pragma unroll
        for (int v = 0; v < vectors; ++v) {
            *reinterpret_cast<uint4*>(line + v / 2 * sides.across + vector_at(v)) = make_uint4(b[4 * v], b[4 * v + 1], b[4 * v + 2], b[4 * v + 3]);
        }
    }
    template <int kPair, int kCount>
    __device__ static void pairs_of_x(const u32 (&x)[kCount], u32 (&b)[kCount]) {
        constexpr int first = fours ? kPair / 2 * 4 : 0, low = first + column(kPair, 0), high = first + column(kPair, 1);
        b[kPair] = __byte_perm(x[low / 2], x[high / 2], (low % 2 ? 0x32 : 0x10) | (high % 2 ? 0x7600 : 0x5400));
        if constexpr (kPair + 1 < kCount) pairs_of_x<kPair + 1>(x, b);
    }
};

// Chunks of kUnits, of 16 rows, on their way to a warp's ring in shared memory: whole lines take the cache fewer
// requests than what lanes load of rows. They lie there as Rows, a RowWords, says. Rows begin on 16 bytes.
template <class Rows, int kUnits>
struct ChunkCopies {
    static constexpr int bits = Rows::bits;
    static constexpr int vectors = kUnits * bits / 2, at_once = vectors > 16 ? 1 : vectors > 8 ? 2 : vectors > 4 ? 4 : 8;  // of a row, and rows
    static_assert(vectors * at_once <= 32, "a lane each");
    u32 from, to;  // the lane's first vector, counted from where the first row begins
    int end;       // where it is in a row of a chunk; far behind where the lane has no row

    __device__ ChunkCopies(i64 row_bytes, int lane) {
        const int row = lane / vectors, vector = lane % vectors;
        from = static_cast<u32>(row * row_bytes) + vector * 16;
        to = place(row, vector);
        end = row < at_once ? vector * 16 : 1 << 30;
    }
    __device__ static constexpr int place(int row, int vector) { return row * Rows::row_bytes + (vector ^ Rows::turned(row)) * 16; }
    // `first`: where the chunk of the first row begins; of rows that are not there it gets the last one.
    __device__ void copy(u8* ring, const u8* first, i64 row_bytes, i64 rows, int units, int lane) const {
        if (rows >= kStrip) {
            if (end >= units * 8 * bits) return;
#pragma unroll
            for (int i = 0; i < kStrip / at_once; ++i)
                copy_ahead(ring + i * at_once * Rows::row_bytes + (to ^ Rows::turned(i * at_once) * 16), first + from + i * at_once * row_bytes);
        } else {
#pragma unroll 1
            for (int v = lane; v < kStrip * vectors; v += 32) {
                const int row = v / vectors, vector = v % vectors;
                if (vector * 16 < units * 8 * bits) copy_ahead(ring + place(row, vector), first + min(static_cast<i64>(row), rows - 1) * row_bytes + vector * 16);
            }
        }
    }
};

}  // namespace cuquant
