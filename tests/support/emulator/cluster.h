// Blocks and their shared memory, poisoned for each. Two neighbours may form a cluster: where the first
// cannot go on alone it is put aside, and they take turns.
#pragma once
#include "fibers.h"

#include <link.h>

namespace emulator {

// ---- shared memory ------------------------------------------------------------------------------

struct Bytes { unsigned char* begin; std::size_t count; };

// This library's thread_local bytes: the shared arrays of all its kernels.
Bytes shared_memory();

void poison(const Bytes& all, int dynamic);

void check_dynamic(int dynamic);

// ---- blocks of a cluster ------------------------------------------------------------------------

constexpr int kCluster = 2;

// A block that does not run now.
struct Aside {
    std::vector<Fiber> fibers;
    Warp warps[32];
    int alive, arrived, votes, outcome, first_at_barrier;
    std::vector<unsigned char> shared;
};

struct Cluster {
    enum State { Unborn, Alive, Gone } states[kCluster];
    Aside aside[kCluster];
    int blocks, arrived;
    std::uint64_t times;  // that all threads have met
};
extern Cluster cluster;

// The running block becomes `other`, and `other` what ran.
void exchange(Aside& other, const Bytes& all);

// From the block that ran last to another one, which begins where it has not.
void enter(int rank, Dim3 first, const Bytes& all);

void run_cluster(Order order, Dim3 first);

int alive_in(int rank);

}  // namespace emulator

// ---- what kernels/cluster.cuh writes in asm -----------------------------------------------------

namespace cuquant {

inline unsigned cluster_rank() { return emulator::machine.rank; }

void cluster_arrive();
void cluster_wait(emulator::Place place = emulator::Place::here());
inline void cluster_sync(emulator::Place place = emulator::Place::here()) {
    cluster_arrive();
    cluster_wait(place);
}
// Where `bytes` at a place of this block's shared memory lie in another's.
unsigned char* emulator_remote(const void* p, std::size_t bytes, unsigned rank, const char* what);
struct InBlock {
    unsigned rank;
    float* at;

    InBlock(unsigned rank, float* p) : rank(rank), at(p) {}
    template <class Value>
    void store(int behind, const Value& v) const {
        if (reinterpret_cast<std::uintptr_t>(at + behind) % sizeof v) emulator::fail("misaligned InBlock::store");
        std::memcpy(rank == cluster_rank() ? reinterpret_cast<unsigned char*>(at + behind) : emulator_remote(at + behind, sizeof v, rank, "InBlock::store"), &v, sizeof v);
    }
};

}  // namespace cuquant
