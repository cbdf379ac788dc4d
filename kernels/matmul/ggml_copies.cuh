// Groups of 256 columns of rows of bytes on their way to shared memory: asynchronous copies of whole vectors, wherever
// a row begins, or boxes of 16 rows by the copy engine.
#pragma once
#include "matmul/ggml_groups.cuh"
#include "device/tma.cuh"
#include "device/dot.cuh"
#include "device/overlap.cuh"

namespace cuquant {

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

// The scales of a row's group, and behind them its minimums if Numbers has these too, to tables of rows of what it makes of
// them: two lanes for each row.
template <class Block, class Numbers, class R>
__device__ void put_scales_of(const R& row, int table, int lane) {
    using Place = Geometry<typename Block::Layout>;
    constexpr int half = Place::subs / 2;
    const bool upper = lane >= kRows;
    const int to = table + 4 * (lane % kRows * Place::stride + (upper ? half : 0));
    float numbers[half];
    Numbers::template numbers<false, half>(row, upper, numbers);
    put(to, numbers);
    if constexpr (Place::tables == 2 && Numbers::minimums) {
        Numbers::template numbers<true, half>(row, upper, numbers);
        put(to + Place::table_bytes, numbers);
    }
}

// A warp's 16 rows of weights: groups of them on their way to shared memory. Bytes: of a number that a row's bytes fit into.
template <class Block, class Bytes = i64>
struct Weights {
    using Layout = typename Block::Layout;
    using Place = Geometry<Layout>;
    const u8* first;  // of the first row
    Bytes row_bytes;
    int rows;    // that are there
    int easy;    // groups
    bool level;  // whether all rows are there and start on 16 bytes, and all groups are easy

    __device__ bool by_bytes() const { return Place::in_place && Layout::bytes % 4 != 0 && row_bytes % 4 != 0; }
    // `row`: the first one, of m; a multiple of 16.
    __device__ void begin(const u8* weights, i64 row, i64 m, i64 columns) {
        row_bytes = static_cast<Bytes>(columns / Layout::elements * Layout::bytes);
        first = weights + row * row_bytes;
        rows = static_cast<int>(max(static_cast<i64>(0), min(static_cast<i64>(kRows), m - row)));
        easy = by_bytes() ? 0 : easy_groups(columns, row_bytes);
        level = rows == kRows && columns % kGroup == 0 && row_bytes % 16 == 0 && row_bytes < 1 << 27;
    }
    __device__ void copy(int stage, int group, int lane) const {
        const i64 at = static_cast<i64>(group) * Place::bytes;
        if (level) copy_level(stage, first + at, lane);
        else if (group < easy) copy_easy<Place::bytes, Place::vectors, Place::pitch>(stage, first + at, row_bytes, rows, lane);
        else if (by_bytes()) copy_bytes<Place::pitch, Place::bytes>(stage, first + at, row_bytes, row_bytes - at, rows, lane);
        else copy_last<32, Place::vectors, Place::pitch>(stage, first + at, row_bytes, row_bytes - at, rows, lane);
    }
    // Of level rows. As many lanes as a row has vectors copy it at once, so that each sector of 32 bytes is asked
    // for once; what is beyond 16 vectors comes in the end.
    __device__ void copy_level(int stage, const u8* start, int lane) const {
        constexpr int vectors = Geometry<Layout, true>::vectors;  // rows start on 16 bytes
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
        const int phase = by_bytes() ? 0 : (row * static_cast<int>(row_bytes % 16) + start) & 15;
        return {stage + row * Place::pitch + (phase & ~3), Place::in_place ? 0 : phase & 3};
    }
    template <class Numbers = FloatNumbers<Block>>
    __device__ void put_scales(int table, int stage, int group, int lane) const {
        put_scales_of<Block, Numbers>(at(stage, lane % kRows, group), table, lane);
    }
};

// The same by the copy engine, a box at a time, which one lane asks for and a barrier counts. What lies outside is 0.
template <class Block>
struct Boxes {
    using Place = Geometry<typename Block::Layout, true>;
    const TensorMap* map;  // of 16-bit words
    int first;             // row

    __device__ void begin(const TensorMap& of, i64 row, i64, i64) { map = &of, first = static_cast<int>(row); }
    __device__ void copy(int stage, int group, int lane, u64* arrived) const {
        if (lane) return;
        barrier_expect(arrived, Place::group_bytes);
        copy_box(dynamic_shared + stage, map, arrived, group * Place::bytes / 16 * 8, first);  // a box starts on 16 bytes
    }
    __device__ Row<Place::in_place> at(int stage, int row, int group) const {
        const int phase = group % 16 * (Place::bytes % 16) & 15;
        return {stage + row * Place::pitch + (phase & ~3), Place::in_place ? 0 : phase & 3};
    }
    template <class Numbers = FloatNumbers<Block>>
    __device__ void put_scales(int table, int stage, int group, int lane) const {
        put_scales_of<Block, Numbers>(at(stage, lane % kRows, group), table, lane);
    }
};

}  // namespace cuquant
