// What cluster.h declares: a part of runtime.cpp.
#include "launch.h"

namespace emulator {

static Bytes find_shared_memory() {
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

// Where a thread's copy lies, as seen from dynamic_shared, is the same for all threads.
Bytes shared_memory() {
    static const Bytes first = find_shared_memory();
    static const std::ptrdiff_t before = cuquant::dynamic_shared - first.begin;
    return {cuquant::dynamic_shared - before, first.count};
}

void poison(const Bytes& all, int dynamic) {
    unsigned char* const start = cuquant::dynamic_shared;
    unsigned char* const end = start + sizeof cuquant::dynamic_shared;
    std::memset(all.begin, kPoison, start - all.begin);
    std::memset(start, kPoison, dynamic + kGuard);
    std::memset(end, kPoison, all.begin + all.count - end);
}

void check_dynamic(int dynamic) {
    for (int i = dynamic; i < dynamic + kGuard; ++i)
        if (cuquant::dynamic_shared[i] != kPoison)
            fail("a write to byte %d of %d bytes of dynamic shared memory", i, dynamic);
}

Cluster cluster;

void exchange(Aside& other, const Bytes& all) {
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

void enter(int rank, Dim3 first, const Bytes& all) {
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

void run_cluster(Order order, Dim3 first) {
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

int alive_in(int rank) {
    if (rank == machine.rank) return machine.alive;
    if (cluster.states[rank] == Cluster::Alive) return cluster.aside[rank].alive;
    return cluster.states[rank] == Cluster::Unborn ? machine.threads : 0;
}

}  // namespace emulator

namespace cuquant {

void cluster_arrive() {
    ++emulator::cluster.arrived;
    emulator::running().met = emulator::cluster.times;
}

void cluster_wait(emulator::Place place) {
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

unsigned char* emulator_remote(const void* p, std::size_t bytes, unsigned rank, const char* what) {
    if (rank >= emulator::cluster.blocks || emulator::cluster.states[rank] != emulator::Cluster::Alive)
        emulator::fail("%s: block %u of the cluster has no shared memory now", what, rank);
    std::vector<unsigned char>& shared = emulator::cluster.aside[rank].shared;
    const std::size_t at = static_cast<const unsigned char*>(p) - emulator::shared_memory().begin;
    if (at + bytes > shared.size()) emulator::fail("%s: byte %zu is beyond shared memory", what, at);
    return &shared[at];
}

}  // namespace cuquant
