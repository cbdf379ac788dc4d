// The patches of images under a filter as rows of x, which nobody writes: a convolution is a product of codes.
#pragma once
#include "matmul/coded.cuh"

namespace cuquant {

// n / divisor by a multiplication, for 32 bits: Granlund and Montgomery, PLDI 1994, figure 4.1.
struct Divisor {
    u32 divisor, factor, shift;  // factor = 2^32 (2^shift - divisor) / divisor + 1
    __device__ u32 quotient(u32 n) const {
        return static_cast<u32>(((static_cast<u64>(n) * factor >> 32) + n) >> shift);
    }
};

// Pixels [images, height, width] are the rows of codes. A row of this is a place of the output, column k is tap
// k / channels of the filter and channel k % channels; outside the image there is 0.
struct Patches : Coded {
    int height, width;
    int step_down, step_across, above, before;  // from patch to patch; rows and columns of the first one that lie outside
    Divisor places, across;                     // of an output image; in one of its rows
    Divisor channels, taps;                     // of a pixel, a multiple of 16; taps in a row of the filter

    static constexpr bool is_patches = true;  // gathered; and neighbouring rows are neighbours in the output, not columns

    // The corner of a patch, which may lie outside; and a place in a filter.
    struct Start { const u8* image; int y, x; };
    struct Tap { int y, x, channel; };

    __device__ Start start(i64 row) const {
        const u32 own = static_cast<u32>(row), image = places.quotient(own), place = own - image * places.divisor;
        const u32 down = across.quotient(place), right = place - down * across.divisor;
        const u8* const from = codes + static_cast<i64>(image) * height * width * stride;
        return {from, static_cast<int>(down) * step_down - above, static_cast<int>(right) * step_across - before};
    }
    __device__ Tap tap(i64 k) const {
        const u32 column = static_cast<u32>(k), tap = channels.quotient(column), down = taps.quotient(tap);
        return {static_cast<int>(down), static_cast<int>(tap - down * taps.divisor), static_cast<int>(column - tap * channels.divisor)};
    }
    // 16 bytes of a pixel; null outside the image.
    __device__ const u8* source(const Start& start, const Tap& tap) const {
        const int row = start.y + tap.y, column = start.x + tap.x;
        if (row < 0 || row >= height || column < 0 || column >= width) return nullptr;
        return start.image + (static_cast<i64>(row) * width + column) * stride + tap.channel;
    }
    // The output is [images, N, places]: `image_step` elements from image to image.
    __device__ i64 out_row(i64 row, i64 image_step) const {
        const u32 own = static_cast<u32>(row), image = places.quotient(own);
        return image * image_step + (own - image * places.divisor);
    }
};

}  // namespace cuquant
