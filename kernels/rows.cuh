// Rows of a QuantArray, as they are packed -> operands of matrix products: the codes of 64 columns of two
// rows, and the same columns of x.
//
// Of each 64 columns, lane 4 g + t loads the 16 from 16 t on, of rows g and g + 8: `bits` half words. It multiplies
// them in any order, as long as x has the same one; but 16 columns that meet in one step of a product must share a
// scale. Where a unit has kFine groups, 2 or 4, the four lanes of a row therefore exchange theirs first, so that step
// s has columns 16 s .. 16 s + 15. From shared memory a lane reads, of 4 bits, 8 columns of each half of the unit
// instead, from 8 t on: then 2 groups need no exchange, and 4 a shorter one; and of 3 bits, where groups are not shorter,
// the 32 columns of two units from 32 t on, which are whole words (rows on 16 bytes have an even number of units).
#pragma once
#include "cluster.cuh"
#include "dot.cuh"
#include "chunk_scales.cuh"

namespace cuquant {

// kJoined: neighbouring codes are a pair, which is looked up: see PairDecoder. kRing: units of a chunk in shared memory, or 0.
// kLong: groups are two units or more.
template <class Packing, int kFine, bool kJoined, int kRing, bool kLong>
struct RowWords {
    static constexpr int bits = Packing::bits;
    static constexpr int span = kRing > 0 && kLong && bits == 3 ? 2 : 1;  // units that are multiplied together
    static constexpr int loaded = (bits * span + 1) / 2;              // words of a row
    static constexpr bool string = bits == 3 && (kJoined || span == 2);  // codes stay where they are
    using Pairs = Choice<!string, RowPairs<bits>, Choice<kJoined, JoinedString, ApartString>>;
    // Whether pairs are 16 bits apart as they lie. Where not, a row's codes 0 .. 7 are brought to the low halves
    // of words, and 8 .. 15 to the high ones.
    static constexpr bool in_place = bits == 2 || bits == 4 || bits == 8;
    static constexpr int words = in_place || string ? loaded : (8 + RowPairs<bits>::fields - 1) / RowPairs<bits>::fields;
    static constexpr bool halves = kRing > 0 && bits == 4;                    // a lane has columns of both halves of a unit
    static constexpr bool fours = kFine == 4 || (kFine == 2 && !halves);  // of each 16 columns it gets four
    static constexpr int row_bytes = kRing * 8 * bits + (bits == 3 ? 16 : 0);  // of a chunk: of 3 bits lanes would meet banks twice
    u32 w[2 * loaded];

    // Where a lane's words begin among the 8 * bits bytes of a unit.
    __device__ static constexpr int byte_of(int t) { return 2 * bits * span * t & ~3; }
    struct Place {  // of a unit
        const u8 *first, *second;
        __device__ void move(int units) { first += units * 8 * bits; second += units * 8 * bits; }
    };
    __device__ void load(const Place& from, int behind) {
        load_row(from.first + behind * 8 * bits, w);
        load_row(from.second + behind * 8 * bits, w + loaded);
    }
    __device__ static void load_row(const u8* from, u32* to) {
        if constexpr (bits == 8) { const uint4 v = load16_once(from); to[0] = v.x; to[1] = v.y; to[2] = v.z; to[3] = v.w; }
        else if constexpr (bits == 4) { const uint2 v = load8_once(from); to[0] = v.x; to[1] = v.y; }
        else {
#pragma unroll
            for (int i = 0; i < loaded; ++i) to[i] = load4_once(from + 4 * i);
        }
    }

    // The same of a unit of a chunk in shared memory, see ChunkCopies; `line`: ring_line, from where the chunk begins.
    __device__ void load_shared(u32 line, int unit) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if constexpr (halves) {
                const u32 at = (line ^ unit * 32) + r * 8 * row_bytes;
                w[2 * r] = load4_shared(at);
                w[2 * r + 1] = load4_shared(at ^ 16);
            } else {
#pragma unroll
                for (int i = 0; i < loaded; ++i) w[r * loaded + i] = load4_shared(line + unit * 8 * bits + r * 8 * row_bytes + 4 * i);
            }
        }
    }
    __device__ static constexpr int ring_line(int g, int t) { return g * row_bytes + (halves ? g * 16 | t * 4 : byte_of(t)); }

    // Row g + 8 kRow as PairDecoder takes it.
    template <int kRow>
    __device__ void row(int t, u32 (&to)[words]) const {
        const u32* own = w + kRow * loaded;
        if constexpr (in_place) {
#pragma unroll
            for (int i = 0; i < loaded; ++i) to[i] = own[i] ^ Packing::flip;
            if constexpr (fours) exchange(t, to);
        } else {
            static_assert(kFine == 1, "only codes that lie in place are exchanged");
            u32 codes[loaded];  // from its lowest bit on: odd lanes begin in the middle of a word
#pragma unroll
            for (int i = 0; i < loaded; ++i)
                codes[i] = bits % 2 && span == 1 ? __funnelshift_r(own[i], i + 1 < loaded ? own[i + 1] : 0u, t % 2 * 16) : own[i];
            constexpr int each = RowPairs<bits>::fields * bits;
#pragma unroll
            for (int i = 0; i < words; ++i)
                to[i] = string ? codes[i] : __byte_perm(bits_from<loaded>(codes, i * each), bits_from<loaded>(codes, 8 * bits + i * each), 0x5410);
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
            if constexpr (kJoined) {
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
        if (string) return e ? ApartString::high(pair) : ApartString::low(pair);
        constexpr int apart = fours ? 2 : bits == 8 ? 2 : bits == 4 ? 4 : 8;
        return Packing::place(fours ? pair % 2 + 2 * e : pair / apart * 2 * apart + pair % apart + e * apart);
    }
    template <int kPair, int kCount>
    __device__ static u32 pair_of_x(const u32 (&x)[kCount]) {
        if constexpr (kJoined) return x[kPair];
        constexpr int low = column(kPair, 0), high = column(kPair, 1);
        return __byte_perm(x[low / 2], x[high / 2], (low % 2 ? 0x32 : 0x10) | (high % 2 ? 0x7600 : 0x5400));
    }
    // Where lane 4 g + t reads x's line of a unit and token g, and what keeps tokens apart: 2 that are read together, or 4.
    __device__ static constexpr int x_place(int t) { return fours ? place_in_step(t) * 2 : (halves ? t : 2 * span * t) * 16; }
    static constexpr int x_pad = fours ? 32 : halves ? 64 : 16;
    // The second operands of the steps, four a unit; `line` is at x_place.
    __device__ static void read_x(u32 line, u32 (&b)[8 * span]) {
        if constexpr (fours) {
            read_step<0>(line, b);
            read_step<1>(line, b);
            read_step<2>(line, b);
            read_step<3>(line, b);
        } else {
            u32 x[8 * span];
#pragma unroll
            for (int v = 0; v < 2 * span; ++v) {
                const uint4 own = load16_shared(line + v * (halves ? 64 : 16));
                x[4 * v] = own.x; x[4 * v + 1] = own.y; x[4 * v + 2] = own.z; x[4 * v + 3] = own.w;
            }
            pairs_of_x<0>(x, b);
        }
    }
    template <int kPair, int kCount>
    __device__ static void pairs_of_x(const u32 (&x)[kCount], u32 (&b)[kCount]) {
        b[kPair] = pair_of_x<kPair>(x);
        if constexpr (kPair + 1 < kCount) pairs_of_x<kPair + 1>(x, b);
    }
    template <int kStep>
    __device__ static void read_step(u32 line, u32 (&b)[8]) {
        const uint2 four = load8_shared(line + kStep * 32);
        const u32 x[2] = {four.x, four.y};
        b[2 * kStep] = pair_of_x<0>(x);
        b[2 * kStep + 1] = pair_of_x<1>(x);
    }
};

// Chunks of kUnits, of 16 rows, on their way to a warp's ring in shared memory: whole lines take the cache fewer
// requests than what lanes load of rows. Rows lie kRowBytes apart, and vector v of a row of 4 bits at v ^ row % 8. Rows begin
// on 16 bytes.
template <int kBits, int kUnits, int kRowBytes>
struct ChunkCopies {
    static constexpr int vectors = kUnits * kBits / 2, at_once = vectors > 8 ? 2 : 4;  // of a row, and rows
    u32 from, to;  // the lane's first vector, counted from where the first row begins
    bool here;

    __device__ ChunkCopies(i64 row_bytes, int lane) {
        const int row = lane / vectors, vector = lane % vectors;
        from = static_cast<u32>(row * row_bytes) + vector * 16;
        to = place(row, vector);
        here = row < at_once;
    }
    __device__ static constexpr int place(int row, int vector) { return row * kRowBytes + (kBits == 4 ? vector ^ row % 8 : vector) * 16; }
    // `first`: where the chunk of the first row begins; of rows that are not there it gets the last one.
    __device__ void copy(u8* ring, const u8* first, i64 row_bytes, i64 rows, int units, int lane) const {
        if (rows >= kStrip && units >= kUnits) {
            if (!here) return;
#pragma unroll
            for (int i = 0; i < kStrip / at_once; ++i)
                copy_ahead(ring + i * at_once * kRowBytes + (kBits == 4 ? to ^ i % 2 * 64 : to), first + from + i * at_once * row_bytes);
        } else {
#pragma unroll 1
            for (int v = lane; v < kStrip * vectors; v += 32) {
                const int row = v / vectors, vector = v % vectors;
                if (vector * 16 < units * 8 * kBits) copy_ahead(ring + place(row, vector), first + min(static_cast<i64>(row), rows - 1) * row_bytes + vector * 16);
            }
        }
    }
};

}  // namespace cuquant
