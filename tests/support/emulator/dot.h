// What kernels/dot.cuh writes in asm, for the emulator: cuda.h includes it.
#pragma once

namespace cuquant {

// The operands of a warp's lanes, which each of them puts there and all of them read.
struct EmulatorOperands { unsigned a[4], b[2]; };
extern EmulatorOperands emulator_operands[2][32][32];  // [block of the cluster][warp][lane]

inline int emulator_dot_4(unsigned a, unsigned b) { return __dp4a(static_cast<int>(a), static_cast<int>(b), 0); }

void dot_32(int (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1,
                   int start, Place place = Place::here());

inline void dot_16(int (&d)[4], unsigned a0, unsigned a1, unsigned b, int start, Place place = Place::here()) {
    dot_32(d, a0, a1, 0, 0, b, 0, start, place);
}

// kernels/device/codes_mma.cuh's; sums wrap.
void emulator_mma_bytes(int (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, bool signed_a, bool signed_b, Place place);
template <bool kSignedA, bool kSignedB>
inline void mma_bytes(int (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, Place place = Place::here()) {
    emulator_mma_bytes(d, a, b0, b1, kSignedA, kSignedB, place);
}

void mma_bits(int (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, Place place = Place::here());

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
extern std::vector<std::vector<EmulatorCopy>> emulator_copies[2][1024];  // [block][thread][group][copy]

void copy_ahead(void* to, const void* from, int count = 16);
void close_copies();
void emulator_wait_copies(int pending);
template <int kPending>
inline void wait_copies() {
    emulator_wait_copies(kPending);
}

}  // namespace cuquant
