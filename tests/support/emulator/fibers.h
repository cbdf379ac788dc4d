// One block of CUDA threads on one CPU thread: every thread is a fiber that runs until it waits for
// others. Barriers and warp operations complete when everybody they name has arrived; where nobody
// can go on, or a kernel does what a GPU would leave undefined, the launch ends with a message.
#pragma once
#include "switch.h"

#include <csetjmp>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <sys/mman.h>

namespace emulator {

struct Dim3 { unsigned x = 1, y = 1, z = 1; };

// Where in the kernel's source a call stands; made by the default argument of what is called.
struct Place {
    const char* file;
    int line;
    static Place here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
        return {file, line};
    }
    bool operator==(const Place& other) const {
        return line == other.line && (file == other.file || !std::strcmp(file, other.file));
    }
    std::string text() const {
        const char* slash = std::strrchr(file, '/');
        return std::string(slash ? slash + 1 : file) + ":" + std::to_string(line);
    }
};

// What a thread asks of the lanes in `mask`: they complete it together.
struct WarpOperation {
    enum Kind { Sync, Index, Up, Down, Xor, Ballot } kind;
    unsigned mask;
    std::uint64_t value;  // the lane's own
    int argument, width;  // of a shuffle
    Place place;
    bool joins(const WarpOperation& other) const {
        return kind == other.kind && mask == other.mask && place == other.place;
    }
    std::string text() const {
        static const char* const names[] = {"__syncwarp", "__shfl_sync", "__shfl_up_sync",
                                            "__shfl_down_sync", "__shfl_xor_sync", "a vote"};
        char hex[16];
        std::snprintf(hex, sizeof hex, "%08x", mask);
        return std::string(names[kind]) + " with mask " + hex + " in " + place.text();
    }
};

// What a thread waits for that others or a copy make true.
struct Condition {
    const char* name;
    bool (*holds)(const void* about, std::uint64_t argument);
    const void* about;
    std::uint64_t argument;
    Place place;
    std::string text() const { return std::string(name) + " in " + place.text(); }
};

enum class State { Ready, AtBarrier, AtWarpOperation, AtCondition, Done };

struct Fiber {
    void* stack_pointer = nullptr;
    char* stack_top = nullptr;
    State state = State::Done;
    Place barrier{};
    WarpOperation operation{};
    Condition condition{};
    std::uint64_t result = 0;  // of its last warp operation
    std::uint64_t met = 0;     // how often the cluster had met when it arrived there
};

constexpr int kWarp = 32, kDynamicMost = 232448, kGuard = 4096;
constexpr std::size_t kStack = 128 << 10, kPage = 4096;
constexpr unsigned char kPoison = 0xFF;  // NaN as float and half, the largest unsigned

// The lanes of a warp that wait in a warp operation, and those that are no more or never were.
struct Warp { unsigned waiting, exited; };

// What a launch has: shared by its fibers, of which one runs at a time.
struct Machine {
    std::vector<Fiber> fibers;  // as many as the largest launch had
    Warp warps[32];
    int rank = 0;  // of the block that runs, in its cluster
    int threads = 0, alive = 0;
    int shared = 0;  // bytes of dynamic shared memory
    int current = 0;
    void* scheduler = nullptr;  // its stack pointer, while a fiber runs
    std::function<void()> kernel;
    int first_at_barrier = 0;
    int arrived = 0, votes = 0;  // at the barrier: threads, and those whose predicate was true
    int outcome = 0;             // votes of the last barrier
    sigjmp_buf failed;
    char message[2048];
    void* fault = nullptr;
};

inline Machine machine;

}  // namespace emulator

inline emulator::Dim3 threadIdx, blockIdx, blockDim, gridDim;
constexpr int warpSize = emulator::kWarp;

// `extern __shared__ u8 dynamic_shared[];` in namespace cuquant is this array, and so is `shared`. All
// shared arrays are thread_local: one copy for the one thread that runs all fibers, in one piece that
// can be poisoned.
namespace cuquant {
thread_local __attribute__((aligned(1024))) unsigned char
    dynamic_shared[emulator::kDynamicMost + emulator::kGuard];
extern thread_local unsigned char shared[] __attribute__((alias("_ZN7cuquant14dynamic_sharedE")));
}

namespace emulator {

// Ends the launch; what its fibers hold is dropped.
[[noreturn]] __attribute__((format(printf, 1, 2))) inline void fail(const char* format, ...) {
    const int used = std::snprintf(
        machine.message, sizeof machine.message, "block (%u, %u, %u), thread %d: ", blockIdx.x,
        blockIdx.y, blockIdx.z, machine.current);
    va_list rest;
    va_start(rest, format);
    std::vsnprintf(machine.message + used, sizeof machine.message - used, format, rest);
    va_end(rest);
    siglongjmp(machine.failed, 1);
}

inline Fiber& running() { return machine.fibers[machine.current]; }

// Leaves the fiber until somebody has made it Ready again.
inline void wait() {
    emulator_switch(&running().stack_pointer, machine.scheduler);
}

// ---- barriers: threads that have exited are not waited for --------------------------------------

inline void release_barrier() {
    if (machine.arrived == 0 || machine.arrived < machine.alive) return;
    machine.outcome = machine.votes;
    machine.arrived = machine.votes = 0;
    for (int i = 0; i < machine.threads; ++i)
        if (machine.fibers[i].state == State::AtBarrier) machine.fibers[i].state = State::Ready;
}

// How many threads came with a true predicate.
inline int barrier(bool predicate, Place place) {
    if (machine.arrived == 0) machine.first_at_barrier = machine.current;
    const Place& agreed = machine.fibers[machine.first_at_barrier].barrier;
    running().state = State::AtBarrier;
    running().barrier = place;
    if (!(agreed == place))
        fail("divergent barrier: it waits in %s, thread %d in %s", place.text().c_str(),
             machine.first_at_barrier, agreed.text().c_str());
    machine.votes += predicate;
    ++machine.arrived;
    release_barrier();
    if (running().state != State::Ready) wait();
    return machine.outcome;
}

// ---- conditions: looked at whenever it is the thread's turn -------------------------------------

inline void wait_until(const Condition& condition) {
    if (condition.holds(condition.about, condition.argument)) return;
    running().state = State::AtCondition;
    running().condition = condition;
    wait();
}

// ---- warp operations: complete when every lane of the mask asks for the same --------------------

inline int source_lane(const WarpOperation& wanted, int lane) {
    const int first = lane & ~(wanted.width - 1), last = lane | (wanted.width - 1);
    switch (wanted.kind) {
        case WarpOperation::Index: return first | (wanted.argument & (wanted.width - 1));
        case WarpOperation::Up: return lane - wanted.argument < first ? lane : lane - wanted.argument;
        case WarpOperation::Down: return lane + wanted.argument > last ? lane : lane + wanted.argument;
        default: return (lane ^ wanted.argument) > last ? lane : lane ^ wanted.argument;
    }
}

inline void complete(int warp, unsigned mask) {
    Fiber* const lanes = &machine.fibers[warp * kWarp];
    std::uint64_t ballot = 0;
    for (int lane = 0; lane < kWarp; ++lane)
        if (mask >> lane & 1 && lanes[lane].operation.value) ballot |= 1ull << lane;
    for (int lane = 0; lane < kWarp; ++lane) {
        if (!(mask >> lane & 1)) continue;
        const WarpOperation& wanted = lanes[lane].operation;
        lanes[lane].result = ballot;
        if (wanted.kind == WarpOperation::Sync || wanted.kind == WarpOperation::Ballot) continue;
        const int source = source_lane(wanted, lane) & (kWarp - 1);
        if (!(mask >> source & 1))
            fail("%s: lane %d reads lane %d, which is not in the mask", wanted.text().c_str(), lane,
                 source);
        lanes[lane].result = lanes[source].operation.value;
    }
    for (int lane = 0; lane < kWarp; ++lane)
        if (mask >> lane & 1) lanes[lane].state = State::Ready;
    machine.warps[warp].waiting &= ~mask;
}

inline std::uint64_t warp_operation(const WarpOperation& wanted) {
    const int warp = machine.current / kWarp, self = machine.current % kWarp;
    if (!(wanted.mask >> self & 1))
        fail("%s: the mask lacks the calling lane %d", wanted.text().c_str(), self);
    if (wanted.width < 1 || wanted.width > kWarp || (wanted.width & (wanted.width - 1)))
        fail("%s: width %d is no power of two up to 32", wanted.text().c_str(), wanted.width);
    Warp& lanes = machine.warps[warp];
    if (wanted.mask & lanes.exited)
        fail("%s: lane %d has exited", wanted.text().c_str(), __builtin_ctz(wanted.mask & lanes.exited));
    running().operation = wanted;
    running().state = State::AtWarpOperation;
    lanes.waiting |= 1u << self;
    bool everybody = (lanes.waiting & wanted.mask) == wanted.mask;
    for (int lane = 0; everybody && lane < kWarp; ++lane)
        if (wanted.mask >> lane & 1)
            everybody = machine.fibers[warp * kWarp + lane].operation.joins(wanted);
    if (everybody) complete(warp, wanted.mask);
    else wait();
    return running().result;
}

// ---- scheduling ---------------------------------------------------------------------------------

inline void exit_thread() {
    const int lane = machine.current % kWarp, first = machine.current - lane;
    for (int i = first; i < first + kWarp && i < machine.threads; ++i) {
        const Fiber& other = machine.fibers[i];
        if (other.state == State::AtWarpOperation && other.operation.mask >> lane & 1)
            fail("it exits while thread %d waits for it: %s", i, other.operation.text().c_str());
    }
    running().state = State::Done;
    machine.warps[machine.current / kWarp].exited |= 1u << lane;
    --machine.alive;
    release_barrier();
    wait();
}

// Where every fiber begins; nothing returns from here.
inline void begin() {
    machine.kernel();
    exit_thread();
}

// A stack on which emulator_switch finds registers to load and `begin` to return to.
inline void prepare(Fiber& fiber) {
    if (!fiber.stack_top) {
        void* memory = mmap(nullptr, kStack + kPage, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) fail("no memory for the stack of a thread");
        mprotect(memory, kPage, PROT_NONE);  // a stack that grows beyond its end faults
        fiber.stack_top = static_cast<char*>(memory) + kStack + kPage;
    }
#if defined(__x86_64__)
    void** top = reinterpret_cast<void**>(fiber.stack_top) - 2;  // entered like a called function
    *top = reinterpret_cast<void*>(&begin);
    fiber.stack_pointer = top - 6;
#else
    void** registers = reinterpret_cast<void**>(fiber.stack_top - 160);
    registers[11] = reinterpret_cast<void*>(&begin);  // x30
    fiber.stack_pointer = registers;
#endif
    fiber.state = State::Ready;
}

// The kernel allows a process so many mappings, two of each stack, and a test run loads many libraries
// with stacks of their own (256 threads of each of 120 libraries were all of them): those of blocks of
// more than two warps are not kept.
constexpr std::size_t kKept = 64;
inline void drop_stacks(std::vector<Fiber>& fibers) {
    if (fibers.size() <= kKept) return;
    for (const Fiber& fiber : fibers)
        if (fiber.stack_top) munmap(fiber.stack_top - kStack - kPage, kStack + kPage);
    fibers.clear();
}

// Who waits for what, threads with equal wishes together.
inline std::string waiting() {
    std::string text;
    std::string last;
    for (int i = 0; i <= machine.threads; ++i) {
        std::string wish;
        if (i < machine.threads) {
            const Fiber& fiber = machine.fibers[i];
            wish = fiber.state == State::Done ? "exited"
                   : fiber.state == State::AtBarrier ? "__syncthreads in " + fiber.barrier.text()
                   : fiber.state == State::AtCondition ? fiber.condition.text()
                                                       : fiber.operation.text();
        }
        if (wish == last) continue;
        if (!wish.empty()) text += "\n  from thread " + std::to_string(i) + ": " + wish;
        last = wish;
    }
    return text;
}

enum class Order { Ascending, Descending, Shuffled, Mixed };

// The order in which the fibers of a block take turns. Mixed: a different one from block to block.
inline std::vector<int> turns(Order order, unsigned block) {
    if (order == Order::Mixed) order = static_cast<Order>(block % 3);
    std::vector<int> turn(machine.threads);
    for (int i = 0; i < machine.threads; ++i)
        turn[i] = order == Order::Descending ? machine.threads - 1 - i : i;
    if (order != Order::Shuffled) return turn;
    std::uint32_t random = 0x9E3779B9u * (block + 1);
    for (int i = machine.threads - 1; i > 0; --i) {
        random = random * 1664525u + 1013904223u;
        std::swap(turn[i], turn[(random >> 8) % (i + 1)]);
    }
    return turn;
}

// What is called before each block: it drops what the last one, which may have failed, left behind.
inline std::vector<void (*)()> block_starts;
inline bool at_block_start(void (*function)()) {
    block_starts.push_back(function);
    return true;
}
// What goes on beside the threads, one step at a time, when none of them can; false where nothing does.
inline bool (*beside)() = nullptr;

inline void start_block() {
    for (const auto function : block_starts) function();
    for (int i = 0; i < machine.threads; ++i) prepare(machine.fibers[i]);
    for (int warp = 0; warp < 32; ++warp) {
        const int lanes = machine.threads - warp * kWarp;
        machine.warps[warp] = {0, lanes >= kWarp ? 0u : lanes > 0 ? ~0u << lanes : ~0u};
    }
    machine.alive = machine.threads;
    machine.arrived = machine.votes = 0;
}

// Runs the block until all threads have exited or none can go on; whether any could.
inline bool run_block(const std::vector<int>& turn) {
    for (bool any = false;; any = true) {
        bool progress = false;
        for (const int i : turn) {
            Fiber& fiber = machine.fibers[i];
            if (fiber.state == State::AtCondition && fiber.condition.holds(fiber.condition.about, fiber.condition.argument))
                fiber.state = State::Ready;
            if (fiber.state != State::Ready) continue;
            progress = true;
            machine.current = i;
            threadIdx = {static_cast<unsigned>(i), 0, 0};
            emulator_switch(&machine.scheduler, machine.fibers[i].stack_pointer);
        }
        if (!progress && machine.alive && beside) progress = beside();
        if (!progress) return any;
    }
}

}  // namespace emulator
