// Which tiles a block multiplies, and which units of K of each. The first tiles are taken whole, one by each block in
// turn. The units of the last ones lie one behind the other, and each block has an even part of them ("stream-K").
#pragma once

namespace cuquant {

// kPortion: units that are never divided, those that the warpgroups of a block take together. kStreamed: whether there
// are tiles behind the `whole` ones. The blocks of a cluster have one schedule, or each of `parts` its part of units.
template <int kPortion, bool kStreamed>
struct Schedule {
    // A part of fewer portions takes less time than its sums take to the block that wants them.
    static constexpr int kLeast = 2;
    int whole, tiles, all_units;  // tiles that are taken whole, and all of them; units of a tile
    int block, blocks;
    int tile, first, stop;        // what the block has now: units from `first` on, those below `stop`
    int left = -1;                // the end of the portions that are to come, once the last tiles have begun

    __device__ Schedule(int whole, int tiles, int all_units, int block, int blocks, int part, int parts)
        : whole(whole), tiles(tiles), all_units(all_units), block(block), blocks(blocks), tile(block - blocks),
          first(all_units * part / parts), stop(all_units * (part + 1) / parts) {}
    __device__ int portions() const { return (all_units + kPortion - 1) / kPortion; }  // of a tile

    // Where the part of a block begins, in portions from tile `whole` on: behind that of the block before.
    __device__ int begin_of(int number) const {
        const int each = portions(), all = (tiles - whole) * each;
        const int at = all / blocks * number + min(number, all % blocks), in_tile = at % each;
        return in_tile < kLeast ? at - in_tile : each - in_tile < kLeast ? at - in_tile + each : at;
    }
    // The next tile; false where there is none. Of its part a block takes the end first, which is the beginning of a
    // tile: its sums are there when the block with the tile's last unit, which takes that last, wants them. A block
    // waits for blocks of lower numbers only, which have begun before it: all of them need not run at a time.
    __device__ bool next() {
        if (!kStreamed || left < 0) {
            tile += blocks;
            if (tile < whole || !kStreamed) return tile < whole;
            left = begin_of(block + 1);
        }
        const int begin = begin_of(block), number = (left - 1) / portions(), start = number * portions();
        if (left <= begin) return false;
        tile = whole + number;
        first = max(begin - start, 0) * kPortion;
        stop = min((left - start) * kPortion, all_units);
        left = max(begin, start);
        return true;
    }
    // Whether blocks of lower numbers have the first units of the tile.
    __device__ bool begins_within() const { return tile >= whole && left > (tile - whole) * portions(); }
    // Whether a block of a lower number has units of this tile too.
    __device__ bool is_shared_with(int number) const { return begin_of(number + 1) > (tile - whole) * portions(); }
};

}  // namespace cuquant
