// Philox4x32-10 (Salmon et al., SC 2011): random bits as a pure function of a seed and an index.
#pragma once
#include "device/vector.cuh"

namespace cuquant {

// In [0, 1): the upper 24 bits of the first word for counter `index` and key `seed`.
__device__ inline float uniform_draw(u64 seed, u64 index) {
    u32 a = static_cast<u32>(index), b = static_cast<u32>(index >> 32), c = 0, d = 0;
    u32 low_key = static_cast<u32>(seed), high_key = static_cast<u32>(seed >> 32);
    for (int round = 0; round < 10; ++round) {
        const u64 first = static_cast<u64>(a) * 0xD2511F53u, second = static_cast<u64>(c) * 0xCD9E8D57u;
        a = static_cast<u32>(second >> 32) ^ b ^ low_key;
        b = static_cast<u32>(second);
        c = static_cast<u32>(first >> 32) ^ d ^ high_key;
        d = static_cast<u32>(first);
        low_key += 0x9E3779B9u;
        high_key += 0xBB67AE85u;
    }
    return __fmul_rn(static_cast<float>(a >> 8), 5.9604644775390625e-8f);  // 2^-24
}

}  // namespace cuquant
