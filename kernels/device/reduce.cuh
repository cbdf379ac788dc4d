// Reductions over the threads of a block, by CUB; over the lanes of a warp, by shuffles.
#pragma once
#include <cub/block/block_reduce.cuh>

namespace cuquant {

// `state` merged over all threads, for all threads. Rule::merge takes states in any order.
template <class Rule, int kThreads>
__device__ typename Rule::State block_reduce(typename Rule::State state) {
    using State = typename Rule::State;
    using Reduce = cub::BlockReduce<State, kThreads>;
    __shared__ typename Reduce::TempStorage storage;
    __shared__ State whole;
    const State merged = Reduce(storage).Reduce(state, [](State a, State b) { return Rule::merge(a, b); });
    if (threadIdx.x == 0) whole = merged;
    __syncthreads();
    return whole;
}

}  // namespace cuquant
