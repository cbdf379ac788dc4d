// Packings: where the bits of code i of a row are. As cuquant/formats/packing.py.
#pragma once
#include "device/vector.cuh"

namespace cuquant {

enum class Order { Low, High, Dense, Word, Planes };

template <int kBits, Order kOrder, bool kSigned = false>
struct Packing {
    static constexpr int bits = kBits;
    static constexpr Order order = kOrder;
    static constexpr u32 mask = (1u << kBits) - 1;
    // A chunk takes kBits whole bytes of its own in these orders.
    static constexpr bool by_chunk = kOrder == Order::Low || kOrder == Order::High || kOrder == Order::Dense;
    // Whether these bytes are whole words; else four chunks make kBits words together.
    static constexpr bool whole_words = kBits % 4 == 0;
    // int8 is stored as two's complement: code ^ 128.
    static constexpr u32 flip = kSigned ? 0x80808080u : 0u;

    // Which place from the low end code i of a chunk has.
    __device__ static constexpr int place(int i) {
        constexpr int per_byte = kBits < 8 ? 8 / kBits : 1;
        return kOrder == Order::High ? i / per_byte * per_byte + (per_byte - 1 - i % per_byte) : i;
    }

    // The code at `i` of a row of bytes (Low, High) or of uint32 words (the others).
    template <typename Word>
    __device__ static u32 get(const Word* row, i64 i) {
        if constexpr (kBits == 16) {
            return row[i];
        } else if constexpr (kOrder == Order::Low || kOrder == Order::High) {
            constexpr int per_byte = 8 / kBits;
            const int lane = static_cast<int>(i % per_byte);
            const int shift = (kOrder == Order::Low ? lane : per_byte - 1 - lane) * kBits;
            return ((row[i / per_byte] ^ (kSigned ? 0x80u : 0u)) >> shift) & mask;
        } else if constexpr (kOrder == Order::Word) {
            constexpr int per_word = 32 / kBits;
            return row[i / per_word] >> static_cast<int>(i % per_word) * kBits & mask;
        } else if constexpr (kOrder == Order::Planes) {
            u32 code = 0;
            for (int b = 0; b < kBits; ++b) code |= (row[i / 32 * kBits + b] >> (i % 32) & 1u) << b;
            return code;
        } else {  // a stream: the code may run on in the next word
            const i64 bit = i * kBits;
            const int shift = static_cast<int>(bit % 32);
            u64 window = row[bit / 32];
            if (shift + kBits > 32) window |= static_cast<u64>(row[bit / 32 + 1]) << 32;
            return static_cast<u32>(window >> shift) & mask;
        }
    }

    // Word `w` of a row, from its codes: code(i) gives the one at i, also beyond the row's end.
    template <class Code>
    __device__ static u32 word(i64 w, Code code) {
        u32 bits = 0;
        if constexpr (kBits == 16) {
            bits = code(w);
        } else if constexpr (kOrder == Order::Low || kOrder == Order::High) {
            constexpr int per_byte = 8 / kBits;
            for (int j = 0; j < per_byte; ++j)
                bits |= code(w * per_byte + j) << (kOrder == Order::Low ? j : per_byte - 1 - j) * kBits;
            bits ^= kSigned ? 0x80u : 0u;
        } else if constexpr (kOrder == Order::Word) {
            constexpr int per_word = 32 / kBits;
            for (int j = 0; j < per_word; ++j) bits |= code(w * per_word + j) << j * kBits;
        } else if constexpr (kOrder == Order::Planes) {
            const int b = static_cast<int>(w % kBits);
            for (int j = 0; j < 32; ++j) bits |= (code(w / kBits * 32 + j) >> b & 1u) << j;
        } else {
            const i64 first = w * 32 / kBits;  // the code that holds the word's lowest bit
            for (i64 i = first; i * kBits < (w + 1) * 32; ++i) {
                const int shift = static_cast<int>(i * kBits - w * 32);
                bits |= shift < 0 ? code(i) >> -shift : code(i) << shift;
            }
        }
        return bits;
    }
};

}  // namespace cuquant
