// What dot.h declares: a part of runtime.cpp.
#include "launch.h"

namespace cuquant {

EmulatorOperands emulator_operands[2][32][32];

void dot_32(int (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1,
            int start, Place place) {
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

void emulator_mma_bytes(int (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, bool signed_a, bool signed_b, Place place) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, column = lane % 4 * 2;
    EmulatorOperands* const lanes = emulator_operands[emulator::machine.rank][warp];
    lanes[lane] = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
    __syncwarp(~0u, place);
    const auto byte = [](unsigned word, int i, bool is_signed) {
        const unsigned own = word >> 8 * i & 0xFFu;
        return is_signed ? static_cast<int>(static_cast<signed char>(own)) : static_cast<int>(own);
    };
    for (int i = 0; i < 4; ++i)
        for (int t = 0; t < 4; ++t)
            for (int half = 0; half < 2; ++half)
                for (int j = 0; j < 4; ++j) {
                    const unsigned left = lanes[4 * row + t].a[2 * half + i / 2], right = lanes[4 * (column + i % 2) + t].b[half];
                    d[i] = static_cast<int>(static_cast<unsigned>(d[i]) + static_cast<unsigned>(byte(left, j, signed_a) * byte(right, j, signed_b)));
                }
    __syncwarp(~0u, place);
}

void mma_bits(int (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, Place place) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, column = lane % 4 * 2;
    EmulatorOperands* const lanes = emulator_operands[emulator::machine.rank][warp];
    lanes[lane] = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
    __syncwarp(~0u, place);
    for (int i = 0; i < 4; ++i)
        for (int t = 0; t < 4; ++t)
            for (int half = 0; half < 2; ++half)
                d[i] += __popc(lanes[4 * row + t].a[2 * half + i / 2] & lanes[4 * (column + i % 2) + t].b[half]);
    __syncwarp(~0u, place);
}

std::vector<std::vector<EmulatorCopy>> emulator_copies[2][1024];

const bool emulator_copies_dropped = emulator::at_block_start([] {
    for (auto& groups : emulator_copies[emulator::machine.rank]) groups.clear();
});

void copy_ahead(void* to, const void* from, int count) {
    const EmulatorCopy copy{to, from, count};
    if (count < 0 || count > 16) emulator::fail("copy_ahead of %d bytes", count);
    for (const void* end : {static_cast<const void*>(to), from})
        if (reinterpret_cast<std::uintptr_t>(end) % 16) emulator::fail("misaligned copy of 16 bytes");
    if (blockIdx.x % 2) return copy.run();
    auto& groups = emulator_copies[emulator::machine.rank][threadIdx.x];
    if (groups.empty()) groups.emplace_back();
    groups.back().push_back(copy);
}

void close_copies() {
    auto& groups = emulator_copies[emulator::machine.rank][threadIdx.x];
    if (groups.empty()) groups.emplace_back();
    groups.emplace_back();
}

void emulator_wait_copies(int pending) {
    auto& groups = emulator_copies[emulator::machine.rank][threadIdx.x];
    while (static_cast<int>(groups.size()) > pending + 1) {
        for (const EmulatorCopy& copy : groups.front()) copy.run();
        groups.erase(groups.begin());
    }
}

}  // namespace cuquant
