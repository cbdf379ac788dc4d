// What fibers.h declares: a part of runtime.cpp.
#include "launch.h"
#include "switch.h"

namespace emulator {

Machine machine;

}  // namespace emulator

emulator::Dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace cuquant {

thread_local __attribute__((aligned(1024))) unsigned char
    dynamic_shared[emulator::kDynamicMost + emulator::kGuard];

extern thread_local unsigned char shared[] __attribute__((alias("_ZN7cuquant14dynamic_sharedE")));

}  // namespace cuquant

namespace emulator {

[[noreturn]] void fail(const char* format, ...) {
    const int used = std::snprintf(
        machine.message, sizeof machine.message, "block (%u, %u, %u), thread %d: ", blockIdx.x,
        blockIdx.y, blockIdx.z, machine.current);
    va_list rest;
    va_start(rest, format);
    std::vsnprintf(machine.message + used, sizeof machine.message - used, format, rest);
    va_end(rest);
    siglongjmp(machine.failed, 1);
}

void wait() {
    emulator_switch(&running().stack_pointer, machine.scheduler);
}

void release_barrier() {
    if (machine.arrived == 0 || machine.arrived < machine.alive) return;
    machine.outcome = machine.votes;
    machine.arrived = machine.votes = 0;
    for (int i = 0; i < machine.threads; ++i)
        if (machine.fibers[i].state == State::AtBarrier) machine.fibers[i].state = State::Ready;
}

int barrier(bool predicate, Place place) {
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

void wait_until(const Condition& condition) {
    if (condition.holds(condition.about, condition.argument)) return;
    running().state = State::AtCondition;
    running().condition = condition;
    wait();
}

int source_lane(const WarpOperation& wanted, int lane) {
    const int first = lane & ~(wanted.width - 1), last = lane | (wanted.width - 1);
    switch (wanted.kind) {
        case WarpOperation::Index: return first | (wanted.argument & (wanted.width - 1));
        case WarpOperation::Up: return lane - wanted.argument < first ? lane : lane - wanted.argument;
        case WarpOperation::Down: return lane + wanted.argument > last ? lane : lane + wanted.argument;
        default: return (lane ^ wanted.argument) > last ? lane : lane ^ wanted.argument;
    }
}

void complete(int warp, unsigned mask) {
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

std::uint64_t warp_operation(const WarpOperation& wanted) {
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

void exit_thread() {
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

void begin() {
    machine.kernel(machine.values);
    exit_thread();
}

void prepare(Fiber& fiber) {
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

void drop_stacks(std::vector<Fiber>& fibers) {
    if (fibers.size() <= kKept) return;
    for (const Fiber& fiber : fibers)
        if (fiber.stack_top) munmap(fiber.stack_top - kStack - kPage, kStack + kPage);
    fibers.clear();
}

std::string waiting() {
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

std::vector<int> turns(Order order, unsigned block) {
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

std::vector<void (*)()> block_starts;

bool at_block_start(void (*function)()) {
    block_starts.push_back(function);
    return true;
}

bool (*beside)();

void start_block() {
    for (const auto function : block_starts) function();
    for (int i = 0; i < machine.threads; ++i) prepare(machine.fibers[i]);
    for (int warp = 0; warp < 32; ++warp) {
        const int lanes = machine.threads - warp * kWarp;
        machine.warps[warp] = {0, lanes >= kWarp ? 0u : lanes > 0 ? ~0u << lanes : ~0u};
    }
    machine.alive = machine.threads;
    machine.arrived = machine.votes = 0;
}

bool run_block(const std::vector<int>& turn) {
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
