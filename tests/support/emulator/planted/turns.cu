// Which four results a thread stores, by cuquant's Turn.
#include "matmul/sums.cuh"

namespace cuquant {

// places[thread] = line and four of its first turn, and of its second.
__global__ void turns(int rows, int* __restrict__ places) {
    Turn turn(rows, threadIdx.x, blockDim.x, Turn::reciprocal(rows));
    for (int i = 0; i < 2; ++i, turn.step()) {
        places[4 * threadIdx.x + 2 * i] = turn.line;
        places[4 * threadIdx.x + 2 * i + 1] = turn.four;
    }
}

}  // namespace cuquant
