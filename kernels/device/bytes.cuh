// Element types of a byte: those of operands that tensor cores multiply.
#pragma once
#include "device/vector.cuh"

namespace cuquant {

struct E4m3 { u8 bits; };  // 4 bits of exponent, 3 of mantissa, no infinity
struct Int8 { signed char bits; };

#ifndef CUQUANT_EMULATOR
// Bytes of two words, which four bits of `selectors` each choose: by three of them, and the fourth one makes it its sign
// eight times. __byte_perm has no signs, and takes an instruction more for selectors that are not constants.
__device__ inline u32 permuted(u32 low, u32 high, u32 selectors) {
    u32 bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selectors));
    return bytes;
}
#endif

}  // namespace cuquant
