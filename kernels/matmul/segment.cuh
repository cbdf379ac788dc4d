// Rows of x that go through the same expert, as matmul/route.cu sorts them.
#pragma once
#include "format.cuh"

namespace cuquant {

// `count` rows from order[first] on; expert -1 does not exist, and results of kNoExpert are 0.
constexpr i64 kNoExpert = -2;
struct Segment { i64 expert, first, count; };

}  // namespace cuquant
