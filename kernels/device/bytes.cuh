// Element types of a byte: those of operands that tensor cores multiply.
#pragma once
#include "device/vector.cuh"

namespace cuquant {

struct E4m3 { u8 bits; };  // 4 bits of exponent, 3 of mantissa, no infinity
struct Int8 { signed char bits; };

}  // namespace cuquant
