// Blocks and their shared memory, poisoned for each. Two neighbours may form a cluster: where the first
// cannot go on alone it is put aside, and they take turns.
#pragma once
#include "fibers.h"

#include <link.h>

namespace emulator {

// ---- shared memory ------------------------------------------------------------------------------

struct Bytes { unsigned char* begin; std::size_t count; };

// This library's thread_local bytes: the shared arrays of all its kernels.
inline Bytes shared_memory() {
    Bytes found{cuquant::dynamic_shared, 0};  // touched, so it exists
    dl_iterate_phdr(
        [](dl_phdr_info* info, std::size_t, void* data) {
            auto& bytes = *static_cast<Bytes*>(data);
            auto* tls = static_cast<unsigned char*>(info->dlpi_tls_data);
            for (int i = 0; i < info->dlpi_phnum; ++i) {
                const auto& header = info->dlpi_phdr[i];
                if (header.p_type != PT_TLS || !tls) continue;
                if (bytes.begin < tls || bytes.begin >= tls + header.p_memsz) continue;
                bytes = {tls, header.p_memsz};
                return 1;
            }
            return 0;
        },
        &found);
    return found;
}

inline void poison(const Bytes& all, int dynamic) {
    unsigned char* const start = cuquant::dynamic_shared;
    unsigned char* const end = start + sizeof cuquant::dynamic_shared;
    std::memset(all.begin, kPoison, start - all.begin);
    std::memset(start, kPoison, dynamic + kGuard);
    std::memset(end, kPoison, all.begin + all.count - end);
}

inline void check_dynamic(int dynamic) {
    for (int i = dynamic; i < dynamic + kGuard; ++i)
        if (cuquant::dynamic_shared[i] != kPoison)
            fail("a write to byte %d of %d bytes of dynamic shared memory", i, dynamic);
}

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
inline Cluster cluster;

// The running block becomes `other`, and `other` what ran.
inline void exchange(Aside& other, const Bytes& all) {
    std::swap(machine.fibers, other.fibers);
    std::swap(machine.warps, other.warps);
    std::swap(machine.alive, other.alive);
    std::swap(machine.arrived, other.arrived);
    std::swap(machine.votes, other.votes);
    std::swap(machine.outcome, other.outcome);
    std::swap(machine.first_at_barrier, other.first_at_barrier);
    std::vector<unsigned char> shared(all.begin, all.begin + all.count);
    other.shared.resize(all.count);
    std::memcpy(all.begin, other.shared.data(), all.count);
    other.shared.swap(shared);
}

// From the block that ran last to another one, which begins where it has not.
inline void enter(int rank, Dim3 first, const Bytes& all) {
    const int last = machine.rank;
    blockIdx = {first.x + rank, first.y, first.z};
    machine.rank = rank;
    if (last != rank && cluster.states[last] == Cluster::Alive) exchange(cluster.aside[last], all);
    if (cluster.states[rank] == Cluster::Unborn) {
        if (static_cast<int>(machine.fibers.size()) < machine.threads) machine.fibers.resize(machine.threads);
        poison(all, machine.shared);
        start_block();
        cluster.states[rank] = Cluster::Alive;
    } else if (last != rank) {
        exchange(cluster.aside[rank], all);
    }
}

inline void run_cluster(Order order, Dim3 first) {
    const Bytes all = shared_memory();
    const unsigned number = first.x + gridDim.x * (first.y + gridDim.y * first.z);
    cluster.blocks = gridDim.x - first.x < kCluster ? gridDim.x - first.x : kCluster;
    cluster.arrived = 0;
    machine.rank = 0;
    for (auto& state : cluster.states) state = Cluster::Unborn;
    std::vector<int> turn[kCluster];
    for (int rank = 0; rank < cluster.blocks; ++rank) turn[rank] = turns(order, number + rank);
    for (int gone = 0; gone < cluster.blocks;) {
        bool progress = false;
        for (int rank = 0; rank < cluster.blocks; ++rank) {
            if (cluster.states[rank] == Cluster::Gone) continue;
            enter(rank, first, all);
            progress |= run_block(turn[rank]);
            if (machine.alive) continue;
            check_dynamic(machine.shared);
            cluster.states[rank] = Cluster::Gone;
            ++gone;
        }
        if (!progress) fail("deadlock: nobody can go on%s", waiting().c_str());
    }
}

inline int alive_in(int rank) {
    if (rank == machine.rank) return machine.alive;
    if (cluster.states[rank] == Cluster::Alive) return cluster.aside[rank].alive;
    return cluster.states[rank] == Cluster::Unborn ? machine.threads : 0;
}

}  // namespace emulator

// ---- what kernels/cluster.cuh writes in asm -----------------------------------------------------

namespace cuquant {

inline unsigned cluster_rank() { return emulator::machine.rank; }

inline void cluster_arrive() {
    ++emulator::cluster.arrived;
    emulator::running().met = emulator::cluster.times;
}
inline void cluster_wait(emulator::Place place = emulator::Place::here()) {
    const auto met = [](const void*, std::uint64_t before) {
        int threads = 0;
        for (int rank = 0; rank < emulator::cluster.blocks; ++rank) threads += emulator::alive_in(rank);
        if (emulator::cluster.arrived >= threads) {
            emulator::cluster.arrived = 0;
            ++emulator::cluster.times;
        }
        return emulator::cluster.times != before;
    };
    emulator::wait_until({"cluster_sync", met, nullptr, emulator::running().met, place});
}
inline void cluster_sync(emulator::Place place = emulator::Place::here()) {
    cluster_arrive();
    cluster_wait(place);
}
// Where `bytes` at a place of this block's shared memory lie in another's.
inline unsigned char* emulator_remote(const void* p, std::size_t bytes, unsigned rank, const char* what) {
    if (rank >= emulator::cluster.blocks || emulator::cluster.states[rank] != emulator::Cluster::Alive)
        emulator::fail("%s: block %u of the cluster has no shared memory now", what, rank);
    std::vector<unsigned char>& shared = emulator::cluster.aside[rank].shared;
    const std::size_t at = static_cast<const unsigned char*>(p) - emulator::shared_memory().begin;
    if (at + bytes > shared.size()) emulator::fail("%s: byte %zu is beyond shared memory", what, at);
    return &shared[at];
}
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
