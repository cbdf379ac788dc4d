// What kernels/hopper.cuh writes in asm, for the emulator: cuda.h includes it.
#pragma once

namespace cuquant {

struct TensorMap;
unsigned char* emulator_remote(const void* p, std::size_t bytes, unsigned rank, const char* what);  // cluster.h

// ---- barriers in shared memory ------------------------------------------------------------------

// Its 8 bytes: arrivals that are missing and that each phase wants, bytes that are still to come, and
// the parity of the phase that goes on.
struct EmulatorBarrier {
    std::uint16_t missing, wanted;
    std::uint32_t phase : 1;
    std::int32_t bytes : 31;
};
static_assert(sizeof(EmulatorBarrier) == 8);

inline EmulatorBarrier& emulator_barrier(unsigned long long* barrier) {
    const auto address = static_cast<unsigned>(__cvta_generic_to_shared(barrier));
    auto& found = *reinterpret_cast<EmulatorBarrier*>(emulator_shared(address, 8, "barrier"));
    if (found.wanted == 0xFFFF) emulator::fail("a barrier that was not initialised");
    return found;
}
inline void emulator_arrived(EmulatorBarrier& barrier, int arrivals, int bytes) {
    if (barrier.missing < arrivals) emulator::fail("more threads arrive at a barrier than it waits for");
    barrier.missing -= arrivals;
    barrier.bytes += bytes;
    if (barrier.missing || barrier.bytes) return;
    barrier.missing = barrier.wanted;
    barrier.phase ^= 1;
}

inline void barrier_init(unsigned long long* barrier, int arrivals) {
    const auto address = static_cast<unsigned>(__cvta_generic_to_shared(barrier));
    const EmulatorBarrier made{static_cast<std::uint16_t>(arrivals), static_cast<std::uint16_t>(arrivals), 0, 0};
    std::memcpy(emulator_shared(address, 8, "barrier"), &made, 8);
}
inline void barrier_fence() {}
inline void barrier_expect(unsigned long long* barrier, int bytes) {
    EmulatorBarrier& found = emulator_barrier(barrier);
    found.bytes += bytes;
    emulator_arrived(found, 1, 0);
}
inline void barrier_arrive(unsigned long long* barrier) { emulator_arrived(emulator_barrier(barrier), 1, 0); }
inline EmulatorBarrier& emulator_barrier_of(const unsigned long long* barrier, unsigned rank) {
    auto& found = *reinterpret_cast<EmulatorBarrier*>(emulator_remote(barrier, 8, rank, "barrier"));
    if (found.wanted == 0xFFFF) emulator::fail("another block's barrier that was not initialised");
    return found;
}
struct RemoteBarriers {
    const unsigned long long* first;
    unsigned rank;

    RemoteBarriers(const unsigned long long* own, unsigned rank) : first(own), rank(rank) {}
    void arrive(int i) const { emulator_arrived(emulator_barrier_of(first + i, rank), 1, 0); }
};
inline void barrier_wait(unsigned long long* barrier, unsigned parity, Place place = Place::here()) {
    const auto over = [](const void* about, std::uint64_t phase) {
        return static_cast<const EmulatorBarrier*>(about)->phase != phase;
    };
    emulator::wait_until({"barrier_wait", over, &emulator_barrier(barrier), parity, place});
}

inline void barrier_wait_remote(unsigned long long* barrier, unsigned parity, Place place = Place::here()) { barrier_wait(barrier, parity, place); }

struct Remote {
    const unsigned char* to;
    const unsigned long long* barrier;
    unsigned rank;

    Remote(const void* own, const unsigned long long* own_barrier, unsigned rank)
        : to(static_cast<const unsigned char*>(own)), barrier(own_barrier), rank(rank) {}
    void store(int offset, const float4& v) const {
        if (reinterpret_cast<std::uintptr_t>(to + offset) % 16) emulator::fail("misaligned Remote::store");
        std::memcpy(emulator_remote(to + offset, sizeof v, rank, "Remote::store"), &v, sizeof v);
        emulator_arrived(emulator_barrier_of(barrier, rank), 0, -static_cast<int>(sizeof v));
    }
};

// ---- copies: in every other block at once, else when no thread can go on -------------------------

// What Emulator.tensor_map packs.
struct EmulatorMap {
    const unsigned char* pointer;
    long long rows, columns, stride, height, width;  // stride in bytes; height and width of a box
    long long mark;
};
constexpr long long kEmulatorMap = 0x70616D20726F736E;

// Where the copy engine puts the byte that belongs to an address, in boxes whose rows have 128 bytes.
inline unsigned emulator_swizzled(unsigned address) { return address ^ (address >> 7 & 7) << 4; }

struct EmulatorBox {
    unsigned to;
    EmulatorMap map;
    unsigned long long* barrier;
    int column, row;
    const unsigned char* from;  // of a run, which has no map
    int bytes;
    bool both = false;  // whether the other block of the cluster gets it too
    void run() const {
        if (from) {
            std::memcpy(emulator_shared(to, 16, "copy_run"), from, bytes);
            emulator_arrived(emulator_barrier(barrier), 0, -bytes);
            return;
        }
        for (int i = 0; i < map.height; ++i)
            for (int j = 0; j < map.width; ++j) {
                const bool inside = row + i >= 0 && row + i < map.rows && column + j >= 0 && column + j < map.columns;
                const unsigned straight = static_cast<unsigned>(to + (i * map.width + j) * 2), at = map.width == 64 ? emulator_swizzled(straight) : straight;
                unsigned char* const element = emulator_shared(at, 2, "copy_box");
                if (inside) std::memcpy(element, map.pointer + (row + i) * map.stride + (column + j) * 2, 2);
                else std::memset(element, 0, 2);
                if (both) std::memcpy(emulator_remote(element, 2, other(), "copy_box_to_both"), element, 2);
            }
        const int came = static_cast<int>(map.height * map.width) * 2;
        emulator_arrived(emulator_barrier(barrier), 0, -came);
        if (both) emulator_arrived(emulator_barrier_of(barrier, other()), 0, -came);
    }
    static unsigned other() { return emulator::machine.rank ^ 1; }
};
inline std::vector<EmulatorBox> emulator_boxes[2];  // by block
inline bool emulator_next_box() {
    auto& boxes = emulator_boxes[emulator::machine.rank];
    if (boxes.empty()) return false;
    const EmulatorBox box = boxes.front();
    boxes.erase(boxes.begin());
    box.run();
    return true;
}
inline const bool emulator_boxes_dropped = emulator::at_block_start([] {
    emulator_boxes[emulator::machine.rank].clear();
    emulator::beside = emulator_next_box;
});

inline void prefetch_map(const TensorMap*) {}
inline void emulator_copy_box(void* to, const TensorMap* map, unsigned long long* barrier, int column, int row, bool both) {
    EmulatorBox box{static_cast<unsigned>(__cvta_generic_to_shared(to)), {}, barrier, column, row, nullptr, 0, both};
    std::memcpy(&box.map, map, sizeof box.map);
    if (box.map.mark != kEmulatorMap) emulator::fail("copy_box: this is no tensor map");
    if (box.to % 128) emulator::fail("misaligned copy_box: %u is no multiple of 128", box.to);
    if (column % 8) emulator::fail("misaligned copy_box: column %d is no multiple of 8", column);
    if (blockIdx.x % 2) box.run();
    else emulator_boxes[emulator::machine.rank].push_back(box);
}
inline void copy_box(void* to, const TensorMap* map, unsigned long long* barrier, int column, int row) { emulator_copy_box(to, map, barrier, column, row, false); }
inline void copy_box_to_both(void* to, const TensorMap* map, unsigned long long* barrier, int column, int row) {
    emulator_copy_box(to, map, barrier, column, row, true);
}

// Boxes that go to global memory when the thread that sends them waits.
struct EmulatorSend {
    unsigned thread, from;
    EmulatorMap map;
    int column, row;
    void run() const {
        for (int i = 0; i < map.height; ++i)
            for (int j = 0; j < map.width; ++j) {
                if (row + i < 0 || row + i >= map.rows || column + j < 0 || column + j >= map.columns) continue;
                const unsigned straight = static_cast<unsigned>(from + (i * map.width + j) * 2);
                std::memcpy(const_cast<unsigned char*>(map.pointer) + (row + i) * map.stride + (column + j) * 2, emulator_shared(emulator_swizzled(straight), 2, "send_box"), 2);
            }
    }
};
inline std::vector<EmulatorSend> emulator_sends[2];  // by block
inline const bool emulator_sends_dropped = emulator::at_block_start([] { emulator_sends[emulator::machine.rank].clear(); });
inline void send_box(const TensorMap* map, const void* from, int column, int row) {
    EmulatorSend send{threadIdx.x, static_cast<unsigned>(__cvta_generic_to_shared(from)), {}, column, row};
    std::memcpy(&send.map, map, sizeof send.map);
    if (send.map.mark != kEmulatorMap || send.map.width != 64) emulator::fail("send_box: this is no tensor map of swizzled boxes");
    if (send.from % 1024) emulator::fail("misaligned send_box: %u is no multiple of 1024", send.from);
    emulator_sends[emulator::machine.rank].push_back(send);
}
inline void wait_sent() {
    auto& sends = emulator_sends[emulator::machine.rank];
    for (const EmulatorSend& send : sends)
        if (send.thread == threadIdx.x) send.run();
    sends.erase(std::remove_if(sends.begin(), sends.end(), [](const EmulatorSend& send) { return send.thread == threadIdx.x; }), sends.end());
}
inline void show_copies() {}

inline void copy_run(void* to, const void* from, int bytes, unsigned long long* barrier) {
    const auto* source = static_cast<const unsigned char*>(from);
    if (bytes <= 0 || bytes % 16 || reinterpret_cast<std::uintptr_t>(from) % 16)
        emulator::fail("misaligned copy_run of %d bytes from %p", bytes, from);
    const EmulatorBox box{static_cast<unsigned>(__cvta_generic_to_shared(to)), {}, barrier, 0, 0, source, bytes};
    emulator_shared(box.to, 16, "copy_run");
    emulator_shared(box.to + bytes - 16, 16, "copy_run");
    if (blockIdx.x % 2) box.run();
    else emulator_boxes[emulator::machine.rank].push_back(box);
}

inline void prefetch_line(const void* from) { static_cast<void>(*static_cast<const volatile unsigned char*>(from)); }

inline void prefetch_run(const void* from, int bytes) {
    if (bytes <= 0 || bytes % 16 || reinterpret_cast<std::uintptr_t>(from) % 16)
        emulator::fail("misaligned prefetch_run of %d bytes from %p", bytes, from);
    static_cast<void>(*static_cast<const volatile unsigned char*>(from));
    static_cast<void>(static_cast<const volatile unsigned char*>(from)[bytes - 1]);
}

// ---- numbers in global memory that other blocks wait for ----------------------------------------

inline void raise_flag(unsigned long long* flag, unsigned long long value) { *flag = value; }
inline void wait_for_flag(const unsigned long long* flag, unsigned long long value, Place place = Place::here()) {
    const auto raised = [](const void* about, std::uint64_t value) { return *static_cast<const unsigned long long*>(about) == value; };
    emulator::wait_until({"wait_for_flag", raised, flag, value, place});
}

// ---- warps with different tasks -----------------------------------------------------------------

inline bool elect_one() { return threadIdx.x % 32 == 0; }
template <int kRegisters> inline void registers_up() { static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256); }
template <int kRegisters> inline void registers_down() { static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256); }

struct EmulatorNamed { int arrived, threads; std::uint64_t times; };
inline EmulatorNamed emulator_named[2][16];
inline const bool emulator_named_reset =
    emulator::at_block_start([] { std::memset(emulator_named[emulator::machine.rank], 0, sizeof emulator_named[0]); });

inline void named_barrier(int number, int threads, Place place = Place::here()) {
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

inline void store_matrices_transposed(unsigned shared_address, const unsigned (&r)[2], Place place = Place::here()) {
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

// ---- products of a warpgroup: in every other block at once, else when they are waited for ---------

struct EmulatorProduct {
    float* d;
    const unsigned (*a)[4];
    unsigned long long b;
    int columns;
    bool add;
    float (*value)(unsigned);  // of 16 bits

    void run(Place place) const {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        EmulatorOperands* const lanes = emulator_operands[emulator::machine.rank][warp];
        for (int i = 0; i < 4; ++i) lanes[lane].a[i] = (*a)[i];
        __syncwarp(~0u, place);
        float left[2][16];
        for (int h = 0; h < 2; ++h)
            for (int k = 0; k < 16; ++k)
                left[h][k] = value(lanes[lane / 4 * 4 + k % 8 / 2].a[2 * (k / 8) + h] >> 16 * (k % 2) & 0xFFFFu);
        const unsigned start = kEmulatorShared + static_cast<unsigned>(b & 0x3FFF) * 16;
        for (int column = lane % 4 * 2; column < columns; column += column % 2 ? 7 : 1) {
            float right[16];
            for (int k = 0; k < 16; ++k) {
                const unsigned at = emulator_swizzled(start + column / 8 * 1024 + column % 8 * 128 + 2 * k);
                std::uint16_t bits;
                std::memcpy(&bits, emulator_shared(at, 2, "wgmma"), 2);
                right[k] = value(bits);
            }
            for (int h = 0; h < 2; ++h) {
                float& sum = d[column / 8 * 4 + 2 * h + column % 2];
                if (!add) sum = 0.0f;
                for (int k = 0; k < 16; ++k) sum += left[h][k] * right[k];
            }
        }
        __syncwarp(~0u, place);  // no lane goes on before all have read
    }
};
inline std::vector<std::vector<EmulatorProduct>> emulator_products[2][1024];  // [block][thread][group][product]
inline const bool emulator_products_dropped = emulator::at_block_start([] {
    for (auto& groups : emulator_products[emulator::machine.rank]) groups.assign(1, {});
});

inline void wgmma_fence() {}
inline void wgmma_commit() { emulator_products[emulator::machine.rank][threadIdx.x].emplace_back(); }
template <int kPending>
inline void wgmma_wait(Place place = Place::here()) {
    auto& groups = emulator_products[emulator::machine.rank][threadIdx.x];
    while (static_cast<int>(groups.size()) > kPending + 1) {
        for (const EmulatorProduct& product : groups.front()) product.run(place);
        groups.erase(groups.begin());
    }
}
template <class T, int kColumns, bool kAdd>
inline void wgmma(float (&d)[kColumns / 2], const unsigned (&a)[4], unsigned b, Place place = Place::here()) {
    static_assert(kColumns % 8 == 0 && kColumns <= 256);
    if (b >> 14 != 4 || (b & 0x3F) % 2) emulator::fail("wgmma: b is not that of swizzled rows");
    const EmulatorProduct product{d, &a, b, kColumns, kAdd, [](unsigned bits) { return emulator_float<T>(bits); }};
    if (blockIdx.x % 2) product.run(place);
    else emulator_products[emulator::machine.rank][threadIdx.x].back().push_back(product);
}

}  // namespace cuquant
