// What kernels/dot.cuh writes in asm, for the emulator: cuda.h includes it.
#pragma once

namespace cuquant {

// The operands of a warp's lanes, which each of them puts there and all of them read.
struct EmulatorOperands { unsigned a[4], b[2]; };
inline EmulatorOperands emulator_operands[2][32][32];  // [block of the cluster][warp][lane]

inline int emulator_dot_4(unsigned a, unsigned b) { return __dp4a(static_cast<int>(a), static_cast<int>(b), 0); }

inline void dot_32(int (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1,
                   int start, Place place = Place::here()) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, column = lane % 4 * 2;
    EmulatorOperands* const lanes = emulator_operands[emulator::machine.rank][warp];
    lanes[lane] = {{a0, a1, a2, a3}, {b0, b1}};
    __syncwarp(~0u, place);
    for (int i = 0; i < 4; ++i) {
        d[i] = start;
        for (int t = 0; t < 4; ++t) {
            const EmulatorOperands& a = lanes[4 * row + t];
            const EmulatorOperands& b = lanes[4 * (column + i % 2) + t];
            d[i] += emulator_dot_4(a.a[i / 2], b.b[0]) + emulator_dot_4(a.a[2 + i / 2], b.b[1]);
        }
    }
    __syncwarp(~0u, place);
}

inline void dot_16(int (&d)[4], unsigned a0, unsigned a1, unsigned b, int start, Place place = Place::here()) {
    dot_32(d, a0, a1, 0, 0, b, 0, start, place);
}

// Copies come when they are waited for, so that a read before that finds what was there; in every other
// block at once, so that they meet whoever still reads there. A thread has a queue of its own.
struct EmulatorCopy {
    void* to;
    const void* from;
    int count;
    void run() const {
        std::memset(to, 0, 16);
        std::memcpy(to, from, count);
    }
};
inline std::vector<std::vector<EmulatorCopy>> emulator_copies[2][1024];  // [block][thread][group][copy]
inline const bool emulator_copies_dropped = emulator::at_block_start([] {
    for (auto& groups : emulator_copies[emulator::machine.rank]) groups.clear();
});

inline void copy_ahead(void* to, const void* from, int count = 16) {
    const EmulatorCopy copy{to, from, count};
    if (count < 0 || count > 16) emulator::fail("copy_ahead of %d bytes", count);
    for (const void* end : {static_cast<const void*>(to), from})
        if (reinterpret_cast<std::uintptr_t>(end) % 16) emulator::fail("misaligned copy of 16 bytes");
    if (blockIdx.x % 2) return copy.run();
    auto& groups = emulator_copies[emulator::machine.rank][threadIdx.x];
    if (groups.empty()) groups.emplace_back();
    groups.back().push_back(copy);
}
inline void close_copies() {
    auto& groups = emulator_copies[emulator::machine.rank][threadIdx.x];
    if (groups.empty()) groups.emplace_back();
    groups.emplace_back();
}
template <int kPending>
inline void wait_copies() {
    auto& groups = emulator_copies[emulator::machine.rank][threadIdx.x];
    while (static_cast<int>(groups.size()) > kPending + 1) {
        for (const EmulatorCopy& copy : groups.front()) copy.run();
        groups.erase(groups.begin());
    }
}

}  // namespace cuquant
