// Codecs, scale rules and packings: what a Format struct is made of. The same words, with the same
// meaning, as cuquant/formats. A thread's unit is a chunk: 8 consecutive elements of a row.
#pragma once
#include "format/codecs.cuh"
#include "format/packing.cuh"
#include "format/rules.cuh"

namespace cuquant {

// Whether 1 / scale is a finite number but 0. Where it is not, every code is that of zero: one rule for
// zero, vanishing and non-finite blocks.
__device__ inline bool usable(float inverse) { return (bits_of(inverse) << 1) - 1u < 0xFEFFFFFFu; }

// How a scale is held. Those of a byte of ggml's are halves of what OCP's are, since its levels are e2m1's twice.
enum class Stored { None, Float32, Float16, BFloat16, E8M0, E4M3, Double, HalfE8M0, HalfE4M3 };
enum class Offset { None, ZeroPoint, Minimum };

// Where the bits of ggml's blocks lie; defined in format/blocks.cuh.
template <int kByte, int kBits, int kSpan, int kShift> struct Field;
template <int kByte, int kCount, int kFirst, int kLow, int kBits, int kShift, int kStep> struct Run;
template <class... Parts> struct Fields;
template <class... Parts> struct Runs;

}  // namespace cuquant
