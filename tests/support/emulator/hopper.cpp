// What hopper.h declares: a part of runtime.cpp.
#include "launch.h"

namespace cuquant {

EmulatorBarrier& emulator_barrier(unsigned long long* barrier) {
    const auto address = static_cast<unsigned>(__cvta_generic_to_shared(barrier));
    auto& found = *reinterpret_cast<EmulatorBarrier*>(emulator_shared(address, 8, "barrier"));
    if (found.wanted == 0xFFFF) emulator::fail("a barrier that was not initialised");
    return found;
}

void emulator_arrived(EmulatorBarrier& barrier, int arrivals, int bytes) {
    if (barrier.missing < arrivals) emulator::fail("more threads arrive at a barrier than it waits for");
    barrier.missing -= arrivals;
    barrier.bytes += bytes;
    if (barrier.missing || barrier.bytes) return;
    barrier.missing = barrier.wanted;
    barrier.phase ^= 1;
}

void barrier_init(unsigned long long* barrier, int arrivals) {
    const auto address = static_cast<unsigned>(__cvta_generic_to_shared(barrier));
    const EmulatorBarrier made{static_cast<std::uint16_t>(arrivals), static_cast<std::uint16_t>(arrivals), 0, 0};
    std::memcpy(emulator_shared(address, 8, "barrier"), &made, 8);
}

void barrier_expect(unsigned long long* barrier, int bytes) {
    EmulatorBarrier& found = emulator_barrier(barrier);
    found.bytes += bytes;
    emulator_arrived(found, 1, 0);
}

EmulatorBarrier& emulator_barrier_of(const unsigned long long* barrier, unsigned rank) {
    auto& found = *reinterpret_cast<EmulatorBarrier*>(emulator_remote(barrier, 8, rank, "barrier"));
    if (found.wanted == 0xFFFF) emulator::fail("another block's barrier that was not initialised");
    return found;
}

void barrier_wait(unsigned long long* barrier, unsigned parity, Place place) {
    const auto over = [](const void* about, std::uint64_t phase) {
        return static_cast<const EmulatorBarrier*>(about)->phase != phase;
    };
    emulator::wait_until({"barrier_wait", over, &emulator_barrier(barrier), parity, place});
}

std::vector<EmulatorBox> emulator_boxes[2];

bool emulator_next_box() {
    auto& boxes = emulator_boxes[emulator::machine.rank];
    if (boxes.empty()) return false;
    const EmulatorBox box = boxes.front();
    boxes.erase(boxes.begin());
    box.run();
    return true;
}

const bool emulator_boxes_dropped = emulator::at_block_start([] {
    emulator_boxes[emulator::machine.rank].clear();
    emulator::beside = emulator_next_box;
});

void emulator_copy_box(void* to, const TensorMap* map, unsigned long long* barrier, int column, int row, bool both) {
    EmulatorBox box{static_cast<unsigned>(__cvta_generic_to_shared(to)), {}, barrier, column, row, nullptr, 0, both};
    std::memcpy(&box.map, map, sizeof box.map);
    if (box.map.mark != kEmulatorMap) emulator::fail("copy_box: this is no tensor map");
    if (box.to % 128) emulator::fail("misaligned copy_box: %u is no multiple of 128", box.to);
    if (const auto vector = static_cast<int>(16 / box.map.size); column % vector)
        emulator::fail("misaligned copy_box: column %d is no multiple of %d", column, vector);
    if (blockIdx.x % 2) box.run();
    else emulator_boxes[emulator::machine.rank].push_back(box);
}

std::vector<EmulatorSend> emulator_sends[2];

const bool emulator_sends_dropped = emulator::at_block_start([] { emulator_sends[emulator::machine.rank].clear(); });

void send_box(const TensorMap* map, const void* from, int column, int row) {
    EmulatorSend send{threadIdx.x, static_cast<unsigned>(__cvta_generic_to_shared(from)), {}, column, row};
    std::memcpy(&send.map, map, sizeof send.map);
    if (send.map.mark != kEmulatorMap || send.map.width != 64) emulator::fail("send_box: this is no tensor map of swizzled boxes");
    if (send.from % 1024) emulator::fail("misaligned send_box: %u is no multiple of 1024", send.from);
    emulator_sends[emulator::machine.rank].push_back(send);
}

void wait_sent() {
    auto& sends = emulator_sends[emulator::machine.rank];
    for (const EmulatorSend& send : sends)
        if (send.thread == threadIdx.x) send.run();
    sends.erase(std::remove_if(sends.begin(), sends.end(), [](const EmulatorSend& send) { return send.thread == threadIdx.x; }), sends.end());
}

void copy_run(void* to, const void* from, int bytes, unsigned long long* barrier) {
    const auto* source = static_cast<const unsigned char*>(from);
    if (bytes <= 0 || bytes % 16 || reinterpret_cast<std::uintptr_t>(from) % 16)
        emulator::fail("misaligned copy_run of %d bytes from %p", bytes, from);
    const EmulatorBox box{static_cast<unsigned>(__cvta_generic_to_shared(to)), {}, barrier, 0, 0, source, bytes};
    emulator_shared(box.to, 16, "copy_run");
    emulator_shared(box.to + bytes - 16, 16, "copy_run");
    if (blockIdx.x % 2) box.run();
    else emulator_boxes[emulator::machine.rank].push_back(box);
}

void prefetch_run(const void* from, int bytes) {
    if (bytes <= 0 || bytes % 16 || reinterpret_cast<std::uintptr_t>(from) % 16)
        emulator::fail("misaligned prefetch_run of %d bytes from %p", bytes, from);
    static_cast<void>(*static_cast<const volatile unsigned char*>(from));
    static_cast<void>(static_cast<const volatile unsigned char*>(from)[bytes - 1]);
}

void wait_for_flag(const unsigned long long* flag, unsigned long long value, Place place) {
    const auto raised = [](const void* about, std::uint64_t value) { return *static_cast<const unsigned long long*>(about) == value; };
    emulator::wait_until({"wait_for_flag", raised, flag, value, place});
}

EmulatorNamed emulator_named[2][16];

const bool emulator_named_reset =
    emulator::at_block_start([] { std::memset(emulator_named[emulator::machine.rank], 0, sizeof emulator_named[0]); });

void named_barrier(int number, int threads, Place place) {
    if (number < 0 || number > 15 || threads % 32) emulator::fail("named barrier %d of %d threads", number, threads);
    EmulatorNamed& own = emulator_named[emulator::machine.rank][number];
    if (own.arrived && own.threads != threads)
        emulator::fail("named barrier %d of %d threads, where others say %d", number, threads, own.threads);
    own.threads = threads;
    const std::uint64_t before = own.times;
    if (++own.arrived == threads) {
        own.arrived = 0;
        ++own.times;
    }
    const auto over = [](const void* about, std::uint64_t times) { return static_cast<const EmulatorNamed*>(about)->times != times; };
    emulator::wait_until({"named_barrier", over, &own, before, place});
}

void store_matrices_transposed(unsigned shared_address, const unsigned (&r)[2], Place place) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    EmulatorOperands* const lanes = emulator_operands[emulator::machine.rank][warp];
    lanes[lane].a[0] = shared_address;
    __syncwarp(~0u, place);
    for (int i = 0; i < 2; ++i)
        for (int half = 0; half < 2; ++half) {
            const unsigned to = lanes[8 * i + lane % 4 * 2 + half].a[0];
            const std::uint16_t value = static_cast<std::uint16_t>(r[i] >> 16 * half);
            std::memcpy(emulator_shared(to, 16, "store_matrices_transposed") + lane / 4 * 2, &value, 2);
        }
    __syncwarp(~0u, place);
}

std::vector<std::vector<EmulatorProduct>> emulator_products[2][1024];

const bool emulator_products_dropped = emulator::at_block_start([] {
    for (auto& groups : emulator_products[emulator::machine.rank]) groups.assign(1, {});
});

void wgmma_commit() { emulator_products[emulator::machine.rank][threadIdx.x].emplace_back(); }

void emulator_wgmma_wait(int pending, Place place) {
    auto& groups = emulator_products[emulator::machine.rank][threadIdx.x];
    while (static_cast<int>(groups.size()) > pending + 1) {
        for (const EmulatorProduct& product : groups.front()) product.run(place);
        groups.erase(groups.begin());
    }
}

void emulator_wgmma(const EmulatorProduct& product, Place place) {
    const unsigned within = product.is_byte() ? 0x1F : 0x3F;  // rows that are swizzled alike
    if (product.b >> 14 != 4 || (product.b & within) % 2 || (product.b & within) >= (product.is_byte() ? 4 : 8)) emulator::fail("wgmma: b is not that of swizzled rows");
    if (blockIdx.x % 2) product.run(place);
    else emulator_products[emulator::machine.rank][threadIdx.x].back().push_back(product);
}

}  // namespace cuquant
