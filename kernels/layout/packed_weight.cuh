// The arrays of a PackedWeight of layout "fragments/1" (or of a QuantArray by rows), and what a lane knows of the groups of its rows.
// cuquant/array/fragments.py says where everything lies.
#pragma once
#include "format/blocks.cuh"
#include "layout/fragments.cuh"

namespace cuquant {

constexpr int kAllRows = 1 << 30;  // Prepacked::tall of one scale for all rows, and for all experts

struct Prepacked {  // null where the format has none
    const u32* codes;           // [strips, units, 32 * bits]; by rows: [rows, 2 * units * bits]
    const void* scale;          // [strips, groups, 16], or by rows: see `tall`; ggml: [strips, blocks, 16]
    const u8* zero_point;       // the same
    const void* minimum;        // as `scale`
    const u8* sub_scale;        // K-quants: [strips, groups, 16]
    const u8* sub_minimum;
    const float* global_scale;  // nvfp4
    const float* nested_scale;  // double quantization
    const float* nested_offset;
    const float* nested_map;
    const float* values;        // [256], a codebook's level of each code
    i64 rows, groups, blocks;   // N, and groups and ggml's blocks of a row
    i64 scale_rows;             // where scales are by rows
    i64 nested_first;           // added to the number of a scale that double quantization counts: see of_expert
    int strips, units;
    int tall;                   // rows that share a scale, where these are not laid out in strips
    float reach;                // the largest magnitude that a code stands for before its scale
};

template <class Format, class = void> struct HasLayout { static constexpr bool value = false; };
template <class... > using Void = void;
template <class Format> struct HasLayout<Format, Void<typename Format::Layout>> { static constexpr bool value = true; };

// What there is beside codes and a scale.
template <class Format, bool kBlocks> struct Pieces {
    static constexpr bool sub_scales = false, minimums = Format::offset == Offset::Minimum;
    static constexpr int zero = 0, per_block = 1;  // groups of a block
};
template <class Format> struct Pieces<Format, true> {
    static constexpr bool sub_scales = Format::Layout::ScaleRuns::any, minimums = Format::Layout::minimum_byte >= 0;
    static constexpr int zero = Format::Layout::scale_zero, per_block = Format::Layout::elements / Format::Layout::sub_block;
};

// How scales lie: laid out in strips, [rows / tall, groups], or [rows, groups] as zero points then also do.
enum Lie { kInStrips = 0, kInBlocks = 1, kInRows = 2 };

// Byte h of `zeros`, a zero point, as Magic takes it.
template <class T>
__device__ u32 minus_zero(u32 zeros, int h) {
    if constexpr (is_same<T, Half>) return __byte_perm(zeros, 0xE4E4E4E4u, 0x4040u | h * 0x101u);
    const float z = -static_cast<float>(zeros >> 8 * h & 0xFFu);
    return pair_of<T>(z, z);
}

// Numbers of one group of rows g and g + 8, as they are stored.
template <class Format, int kLie>
struct Group {
    static constexpr bool blocks = HasLayout<Format>::value;
    static constexpr Stored stored = blocks ? Stored::Float16 : Format::stored;
    static constexpr bool zeros = !blocks && Format::offset == Offset::ZeroPoint;
    using Parts = Pieces<Format, blocks>;
    static constexpr bool minimums = !blocks && Parts::minimums;  // one for each scale, and stored as that is
    static constexpr bool halves = stored == Stored::Float16 || stored == Stored::BFloat16;
    static constexpr int bytes = stored == Stored::Float32 ? 4 : halves ? 2 : 1;
    using Both = u32[bytes == 4 ? 2 : 1];  // of rows g and g + 8

    Both scale, minimum;
    u32 zero, sub_scale, sub_minimum;
    float nested[2];  // the scale itself, of double quantization

    // Where the next groups of a strip are.
    struct Cursor {
        i64 strip, group;
        const u8 *scale, *zero, *minimum;
        i64 apart;  // groups from row g to row g + 8, of which the last may not exist

        __device__ void set(const Prepacked& w, i64 own_strip, i64 own_group, int g) {
            strip = own_strip; group = own_group;
            if constexpr (kLie == kInRows) {
                const i64 row = min(strip * kStrip + g, w.rows - 1), at = row * w.groups + group;
                apart = (min(strip * kStrip + g + 8, w.rows - 1) - row) * w.groups;
                scale = static_cast<const u8*>(w.scale) + at * bytes;
                if constexpr (zeros) zero = w.zero_point + at;
                if constexpr (minimums) minimum = static_cast<const u8*>(w.minimum) + at * bytes;
                return;
            }
            const i64 at = (strip * w.groups + group) * kStrip + 2 * g;
            scale = static_cast<const u8*>(w.scale) + at * bytes;
            if constexpr (zeros && kLie == kInStrips) zero = w.zero_point + at;
            if constexpr (minimums && kLie == kInStrips) minimum = static_cast<const u8*>(w.minimum) + at * bytes;
        }
        __device__ void move(int groups) {
            constexpr int apart = kLie == kInStrips ? kStrip : 1;
            group += groups;
            scale += static_cast<i64>(groups) * (apart * bytes);
            if constexpr (zeros) zero += static_cast<i64>(groups) * apart;
            if constexpr (minimums) minimum += static_cast<i64>(groups) * (apart * bytes);
        }
    };

    // Where the groups of a strip begin, of rows g and g + 8.
    struct Strip {
        const u8 *scale, *zero, *minimum, *sub_scale, *sub_minimum;
        i64 apart;               // where scales lie in blocks: from the group of row g to that of row g + 8
        const float *nested_map, *nested_scale;
        i64 nested_first[2];     // numbers of their first scales, of double quantization
        float nested_offset;

        // `before`: strips of the experts before, which `strip` does not count.
        __device__ void set(const Prepacked& w, i64 strip, i64 before, int g) {
            const i64 row = strip * kStrip + g;
            if constexpr (kLie == kInBlocks) {
                const i64 first = min(row / w.tall, w.scale_rows - 1) * w.groups;
                apart = min((row + 8) / w.tall, w.scale_rows - 1) * w.groups - first;
                scale = static_cast<const u8*>(w.scale) + first * bytes;
                if constexpr (zeros) zero = w.zero_point + first;
                if constexpr (minimums) minimum = static_cast<const u8*>(w.minimum) + first * bytes;
            } else {
                const i64 at = (before + strip) * w.groups * kStrip + 2 * g, block = blocks ? (before + strip) * w.blocks * kStrip + 2 * g : at;
                scale = static_cast<const u8*>(w.scale) + block * bytes;
                if constexpr (zeros) zero = w.zero_point + at;
                if constexpr (Parts::minimums) minimum = static_cast<const u8*>(w.minimum) + block * bytes;
                if constexpr (Parts::sub_scales) sub_scale = w.sub_scale + at;
                if constexpr (Parts::sub_scales && Parts::minimums) sub_minimum = w.sub_minimum + at;
            }
            if constexpr (stored == Stored::Double) {
                nested_map = w.nested_map; nested_scale = w.nested_scale; nested_offset = *w.nested_offset;
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    // Padding has no nested scale of its own.
                    i64 own = min((kLie == kInBlocks ? 0 : before * kStrip) + row + 8 * h, w.rows - 1);
                    if constexpr (kLie == kInBlocks) own = min(own / w.tall, w.scale_rows - 1);
                    nested_first[h] = w.nested_first + own * w.groups;
                }
            }
        }
    };
    // Group `group` of a strip; it must exist. `beside`: another one of the same block of ggml's, whose scale this is too.
    __device__ void load(const Strip& from, u32 group, const Group* beside = nullptr) {
        if constexpr (zeros && kLie == kInStrips) zero = *reinterpret_cast<const u16*>(from.zero + group * kStrip);
        if constexpr (blocks) {
            const u32 block = group / Parts::per_block * (kStrip * 2);
            scale[0] = beside ? beside->scale[0] : *reinterpret_cast<const u32*>(from.scale + block);
            if constexpr (Parts::minimums) minimum[0] = beside ? beside->minimum[0] : *reinterpret_cast<const u32*>(from.minimum + block);
            if constexpr (Parts::sub_scales) sub_scale = *reinterpret_cast<const u16*>(from.sub_scale + group * kStrip);
            if constexpr (Parts::sub_scales && Parts::minimums) sub_minimum = *reinterpret_cast<const u16*>(from.sub_minimum + group * kStrip);
        } else if constexpr (kLie == kInBlocks) {
            by_rows(scale, from.scale, group, from.apart + group);
            if constexpr (minimums) by_rows(minimum, from.minimum, group, from.apart + group);
            if constexpr (zeros) zero = from.zero[group] | from.zero[from.apart + group] << 8;
        } else {
            side_by_side(scale, from.scale + group * (kStrip * bytes));
            if constexpr (minimums) side_by_side(minimum, from.minimum + group * (kStrip * bytes));
        }
        if constexpr (stored == Stored::Double) {
#pragma unroll
            for (int h = 0; h < 2; ++h)
                nested[h] = unnested(from.nested_map[scale[0] >> 8 * h & 0xFFu], from.nested_scale[(from.nested_first[h] + group) / 256], from.nested_offset);
        }
    }
    // A scale of double quantization.
    __device__ static float unnested(float level, float scale, float offset) {
        const float inner = kept_finite(__fmul_rn(level, scale), level, scale);
        return kept_finite(__fadd_rn(inner, offset), inner, offset);
    }

    // Group `ahead` of a cursor; it must exist. Of ggml's there is none: see ChunkGroups.
    __device__ void load(const Prepacked& w, const Cursor& from, int ahead, int g) {
        static_assert(!blocks, "groups go through shared memory");
        if constexpr (zeros && kLie == kInStrips) zero = *reinterpret_cast<const u16*>(from.zero + ahead * kStrip);
        if constexpr (zeros && kLie == kInRows) zero = from.zero[ahead] | from.zero[from.apart + ahead] << 8;
        if constexpr (kLie == kInRows) {
            by_rows(scale, from.scale, ahead, from.apart + ahead);
            if constexpr (minimums) by_rows(minimum, from.minimum, ahead, from.apart + ahead);
        } else if constexpr (kLie == kInBlocks) {
            const i64 row = from.strip * kStrip + g, group = from.group + ahead;
            const i64 first = min(row / w.tall, w.scale_rows - 1) * w.groups + group, second = min((row + 8) / w.tall, w.scale_rows - 1) * w.groups + group;
            by_rows(scale, static_cast<const u8*>(w.scale), first, second);
            if constexpr (minimums) by_rows(minimum, static_cast<const u8*>(w.minimum), first, second);
            if constexpr (zeros) zero = w.zero_point[first] | w.zero_point[second] << 8;
        } else {
            side_by_side(scale, from.scale + ahead * kStrip * bytes);
            if constexpr (minimums) side_by_side(minimum, from.minimum + ahead * kStrip * bytes);
        }
        if constexpr (stored == Stored::Double) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                // Padding has no nested scale of its own.
                i64 row = min(from.strip * kStrip + g + 8 * h, w.rows - 1);
                if constexpr (kLie == kInBlocks) row = min(row / w.tall, w.scale_rows - 1);
                const i64 block = w.nested_first + row * w.groups + from.group + ahead;
                nested[h] = unnested(w.nested_map[scale[0] >> 8 * h & 0xFFu], w.nested_scale[block / 256], *w.nested_offset);
            }
        }
    }
    // The kFine groups of a unit by rows, of which a row's begin on as many bytes as they are.
    template <int kFine>
    __device__ static void load_fine(Group* to, const Prepacked& w, const Cursor& from, int unit, int g) {
        static_assert(kLie == kInRows && !blocks, "several groups in a unit, by rows");
        if constexpr (stored == Stored::Double) {
#pragma unroll
            for (int f = 0; f < kFine; ++f) to[f].load(w, from, unit * kFine + f, g);
            return;
        }
        const auto fine = [&](const u8* numbers, Both Group::* part) {
            u32 first[bytes], second[bytes];  // of 4 groups, or of 2
            several<kFine * bytes>(numbers + unit * kFine * bytes, first);
            several<kFine * bytes>(numbers + (from.apart + unit * kFine) * bytes, second);
#pragma unroll
            for (int f = 0; f < kFine; ++f) {
                Both& own = to[f].*part;
                if constexpr (bytes == 4) { own[0] = first[f]; own[1] = second[f]; }
                else if constexpr (bytes == 2) own[0] = __byte_perm(first[f / 2], second[f / 2], f % 2 ? 0x7632 : 0x5410);
                else own[0] = __byte_perm(first[0], second[0], 0x40 + 0x11 * f) & 0xFFFFu;
            }
        };
        fine(from.scale, &Group::scale);
        if constexpr (minimums) fine(from.minimum, &Group::minimum);
        if constexpr (zeros) {
            u32 own[1], other[1];
            several<kFine>(from.zero + unit * kFine, own);
            several<kFine>(from.zero + from.apart + unit * kFine, other);
#pragma unroll
            for (int f = 0; f < kFine; ++f) to[f].zero = __byte_perm(own[0], other[0], 0x40 + 0x11 * f) & 0xFFFFu;
        }
    }
    // Those that another lane has loaded.
    __device__ Group of_lane(int lane) const {
        static_assert(kLie == kInRows && !blocks, "groups by rows, which lanes share out");
        Group got;
        if constexpr (stored == Stored::Double) {
#pragma unroll
            for (int h = 0; h < 2; ++h) got.nested[h] = __shfl_sync(~0u, nested[h], lane);
        } else {
#pragma unroll
            for (int i = 0; i < static_cast<int>(sizeof scale / sizeof scale[0]); ++i) got.scale[i] = __shfl_sync(~0u, scale[i], lane);
        }
        if constexpr (minimums) {
#pragma unroll
            for (int i = 0; i < static_cast<int>(sizeof minimum / sizeof minimum[0]); ++i)
                got.minimum[i] = __shfl_sync(~0u, minimum[i], lane);
        }
        if constexpr (zeros) got.zero = __shfl_sync(~0u, zero, lane);
        return got;
    }
    template <int kBytes, int kWords>
    __device__ static void several(const u8* from, u32 (&to)[kWords]) {
        if constexpr (kBytes == 1) to[0] = *from;
        else if constexpr (kBytes == 2) to[0] = *reinterpret_cast<const u16*>(from);
        else if constexpr (kBytes == 4) to[0] = *reinterpret_cast<const u32*>(from);
        else if constexpr (kBytes == 8) { const uint2 v = *reinterpret_cast<const uint2*>(from); to[0] = v.x; to[1] = v.y; }
        else { const uint4 v = *reinterpret_cast<const uint4*>(from); to[0] = v.x; to[1] = v.y; to[2] = v.z; to[3] = v.w; }
    }
    // Numbers of both rows, as strips have them.
    __device__ static void side_by_side(Both& to, const u8* from) {
        if constexpr (bytes == 4) {
            const uint2 v = *reinterpret_cast<const uint2*>(from);
            to[0] = v.x; to[1] = v.y;
        } else if constexpr (bytes == 2) {
            to[0] = *reinterpret_cast<const u32*>(from);
        } else {
            to[0] = *reinterpret_cast<const u16*>(from);
        }
    }
    __device__ static void by_rows(Both& to, const u8* from, i64 first, i64 second) {
        if constexpr (bytes == 4) {
            to[0] = reinterpret_cast<const u32*>(from)[first]; to[1] = reinterpret_cast<const u32*>(from)[second];
        } else if constexpr (bytes == 2) {
            to[0] = reinterpret_cast<const u16*>(from)[first] | static_cast<u32>(reinterpret_cast<const u16*>(from)[second]) << 16;
        } else {
            to[0] = from[first] | static_cast<u32>(from[second]) << 8;
        }
    }

    // Of float32, float16 or bfloat16, as they are stored.
    __device__ static float number_of(const Both& numbers, int h) {
        if constexpr (stored == Stored::Float32) return float_of(numbers[h]);
        else if constexpr (stored == Stored::Float16) return half_of(numbers[0], h);
        else return float_of(h ? numbers[0] & 0xFFFF0000u : numbers[0] << 16);
    }
    __device__ static float half_of(u32 pair, int h) { return h ? float_of_high_half(pair) : float_of_half(pair); }
    // Of row g + 8 h. Without nvfp4's global scale, which the end multiplies by.
    __device__ float value(int h) const {
        if constexpr (blocks) {
            const float d = half_of(scale[0], h);
            if constexpr (!Parts::sub_scales) return d;
            return d * static_cast<float>(static_cast<signed char>(static_cast<int>(sub_scale >> 8 * h & 0xFFu) - Parts::zero));
        }
        else if constexpr (bytes > 1) return number_of(scale, h);
        else if constexpr (stored == Stored::E8M0) {
            const u32 exponent = scale[0] << (h ? 15 : 23) & 0x7F800000u;
            return float_of(exponent == 0x7F800000u ? 0x7FC00000u : max(exponent, 0x00400000u));
        }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
        else if constexpr (stored == Stored::E4M3) return half_of(halves_of_e4m3_pair(scale[0]), h);
#endif
        else if constexpr (stored == Stored::E4M3) return Minifloat<4, 3, Specials::OneNan>::decode(scale[0] >> 8 * h & 0xFFu);
        else if constexpr (stored == Stored::Double) return nested[h];
        else return 1.0f;
    }
    __device__ float minimum_of(int h) const {
        if constexpr (!Parts::minimums) return 0.0f;
        else if constexpr (!Parts::sub_scales) return number_of(minimum, h);
        else return -(half_of(minimum[0], h) * static_cast<float>(sub_minimum >> 8 * h & 0xFFu));
    }
    template <class T> __device__ u32 offset(int h) const {
        if constexpr (!zeros) return 0;
        else return minus_zero<T>(zero, h);
    }
};

// The weight of an expert. In strips it goes on where that of the expert before ends, and strips are counted
// through; what lies by rows begins anew.
template <class Format, int kLie>
__device__ Prepacked of_expert(const Prepacked& w, i64 expert) {
    using Own = Group<Format, kLie>;
    static_assert(kLie != kInRows, "experts are laid out in strips");
    Prepacked own = w;
    if constexpr (kLie == kInBlocks) {
        const i64 before = w.tall == kAllRows ? 0 : expert * w.scale_rows * w.groups;
        own.scale = static_cast<const u8*>(w.scale) + before * Own::bytes;
        if constexpr (Own::zeros) own.zero_point += before;
        if constexpr (Own::minimums) own.minimum = static_cast<const u8*>(w.minimum) + before * Own::bytes;
        if constexpr (Own::stored == Stored::Double) own.nested_first = before;
    } else if constexpr (Own::stored == Stored::Double) {
        const i64 padded = expert * w.strips * kStrip;
        own.rows += padded;
        own.nested_first = (expert * w.rows - padded) * w.groups;
    }
    return own;
}

}  // namespace cuquant
