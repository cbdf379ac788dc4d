// A weight's scales that are powers of two, in the operands of matmul_hopper. Groups of four units that follow each other
// share the largest of their scales, which meets the sums. By how many octaves a group's own is smaller goes into its
// numbers, which stay exact. Groups that lie too far below have operands of 0, and a tile that met any multiplies them
// one by one when it is done: what a zero's scale is, or a hostile one, changes no result, but it may take long.
#pragma once
#include "layout/byte_fragments.cuh"
#include "matmul/hopper_codes.cuh"

namespace cuquant {

struct NotFolded {};  // in its place where scales meet sums

// Of one warp and strip.
template <class Format, class Tile>
struct Fold {
    using Own = Group<Format, Tile::lie>;
    using Rows = LowerE2m1;
    static_assert(Own::stored == Stored::E8M0 || !Pace<Tile, true>::folded, "scales that are powers of two");
    static constexpr int kFine = Tile::fine, kUnits = 4, kWords = (kFine + 1) / 2;
    static constexpr u32 kFar = 0x80808080u;  // marks in `below`
    static constexpr u32 kMet = 1u << 31;     // of a word about a tile: there was one
    Own coming[kFine];  // of the next four units: the groups of unit t, for lane 4 g + t
    u32 below[kWords];  // of these: octaves, for rows g and g + 8 of a group, and of the next one; or a mark
    u32 own[kWords];    // the same of the unit that is decoded next
    u32 largest;        // the scales that the four share, as a Group has them

    __device__ static u32 group_of(u32 unit) {
        return kFine > 1 ? unit * kFine : unit / (Tile::group_units ? Tile::group_units : 1);
    }
    __device__ static Own load(const typename Own::Strip& lies, const Prepacked& w, int unit, int fine) {
        const u32 group = group_of(min(unit, w.units - 1)) + fine;
        Own own;
        own.load(lies, min(group, static_cast<u32>(w.groups) - 1));  // beyond the last one x is 0
        return own;
    }
    // Groups of a unit.
    __device__ void fetch(const typename Own::Strip& lies, const Prepacked& w, int unit) {
#pragma unroll
        for (int f = 0; f < kFine; ++f) coming[f] = load(lies, w, unit, f);
    }
    // The units whose groups came, by all lanes; whether a group of them has a mark.
    __device__ bool begin() {
        u32 most = 0, marks = 0;  // most: 16 bits for each of the two rows
#pragma unroll
        for (int f = 0; f < kFine; ++f) most = __vmaxu2(most, __byte_perm(coming[f].scale[0], 0, 0x4140));
#pragma unroll
        for (int d = 1; d < kUnits; d *= 2) most = __vmaxu2(most, __shfl_xor_sync(~0u, most, d));
        largest = __byte_perm(most, 0, 0x2020);
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
            const u32 own = __byte_perm(coming[2 * i].scale[0], coming[min(2 * i + 1, kFine - 1)].scale[0], 0x5410);
            const u32 octaves = largest - own;  // of each byte: none is larger than that of `largest`
            below[i] = octaves | (((octaves & ~kFar) + (0x7F - Rows::octaves) * 0x01010101u) & kFar);
            marks |= below[i] & kFar;
        }
        return __any_sync(~0u, marks);
    }
    // That of row g + 8 h: of numbers that are `worth` as much.
    __device__ static float scale_of(u32 largest, int h) {
        Own own;
        own.scale[0] = largest;
        return own.value(h) * (1.0f / Rows::worth);
    }
    // Unit `n` of the four is decoded next.
    __device__ void choose(int n) {
#pragma unroll
        for (int i = 0; i < kWords; ++i) own[i] = __shfl_sync(~0u, below[i], n, 4);
    }
    // The operand of half of its columns.
    template <int kOperands>
    __device__ void decode(const u32 (&w)[4], int half, u32 (&to)[kOperands][4]) const {
        static_assert(kOperands == 2, "of 32 columns each");
#pragma unroll
        for (int part = 2 * half; part < 2 * half + 2; ++part) {
            const int f = part * kFine / 4;
            const u32 at = 0x4440 + f % 2 * 2;
            const Rows first(__byte_perm(own[f / 2], 0, at)), second(__byte_perm(own[f / 2], 0, at + 1));
            const u32 near = ~permuted(own[f / 2], 0, f % 2 ? 0xBABA : 0x9898);  // bytes of rows without a mark
            u32 (&operand)[4] = to[half];
            Rows::row_pair(w[part], near, first, second, operand[part % 2 * 2], operand[part % 2 * 2 + 1]);
        }
    }

    // What the warp left out: of units unit_at(0), unit_at(1), ... below `stop` of a strip, which
    // `strip` counts through all experts, times rows of x from `token` on. x's scales meet whole sums but where kOfX.
    template <int kTokens, bool kOfX, class UnitAt>
    __device__ void add_far(float (&sum)[kTokens / 2], const Prepacked& w, const typename Own::Strip& lies, i64 strip,
                            const UnitAt& unit_at, int stop, const TokenScales& x, int token, int lane) {
#pragma unroll 1
        for (int n = 0; unit_at(n) < stop; n += kUnits) {
            fetch(lies, w, unit_at(n + lane % kUnits));
            begin();
#pragma unroll 1
            for (int m = 0; m < kUnits && unit_at(n + m) < stop; ++m) {
                const int unit = unit_at(n + m);
                const u32* const codes = w.codes + (strip * w.units + unit) * 128 + lane / 4 * 16;
#pragma unroll 1
                for (int f = 0; f < kFine; ++f) {
                    const u32 own = __shfl_sync(~0u, f < 2 ? below[0] : below[kWords - 1], m, 4) >> f % 2 * 16;
                    if (!__any_sync(~0u, own & 0x8080u)) continue;
                    const Own group = load(lies, w, unit, f);
                    const float scale[2] = {own & 0x80u ? group.value(0) : 0.0f, own & 0x8000u ? group.value(1) : 0.0f};
#pragma unroll 1
                    for (int i = 16 / kFine * f; i < 16 / kFine * (f + 1); ++i) {  // four columns
                        const u32 word = codes[i % 4 * 4 + i / 4];
                        add_columns<kTokens, kOfX>(sum, word, scale, x, token, unit, i, lane);
                    }
                }
            }
        }
    }
    // Of columns 4 i .. 4 i + 3 of a unit, as they lie.
    template <int kTokens, bool kOfX>
    __device__ static void add_columns(float (&sum)[kTokens / 2], u32 word, const float (&scale)[2],
                                       const TokenScales& x, int token, int unit, int i, int lane) {
        float numbers[2][4];
        bool any = false;
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                numbers[h][c] = Format::Codec::decode(word >> (c / 2 * 16 + 8 * h + c % 2 * 4) & 15u) * scale[h];
                any |= numbers[h][c] != 0.0f;
            }
        const i64 column = static_cast<i64>(unit) * kUnit + 4 * i;
        if (!__any_sync(~0u, any) || column >= x.stride) return;
        token = anew(token);  // the compiler would keep where each row begins
        const float* const scales = x.scale + (kOfX ? min(unit / max(x.units, 1), x.groups - 1) * x.pitch : 0);
#pragma unroll
        for (int j = 0; j < kTokens / 4; ++j) {
            const i64 row = token + j / 2 * 8 + lane % 4 * 2 + j % 2;
            const u32 bytes = *reinterpret_cast<const u32*>(x.codes + min(row, x.rows - 1) * x.stride + column);
            float own[2] = {0.0f, 0.0f};
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const float of_x = Minifloat<4, 3, Specials::OneNan>::decode(bytes >> 8 * c & 0xFFu);
#pragma unroll
                for (int h = 0; h < 2; ++h) own[h] = __fmaf_rn(of_x, numbers[h][c], own[h]);
            }
#pragma unroll
            for (int h = 0; h < 2; ++h) sum[j / 2 * 4 + 2 * h + j % 2] += kOfX ? own[h] * scales[row] : own[h];
        }
    }
};

}  // namespace cuquant
