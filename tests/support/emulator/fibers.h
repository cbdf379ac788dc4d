// One block of CUDA threads on one CPU thread: every thread is a fiber that runs until it waits for
// others. Barriers and warp operations complete when everybody they name has arrived; where nobody
// can go on, or a kernel does what a GPU would leave undefined, the launch ends with a message.
#pragma once
#include <algorithm>
#include <csetjmp>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
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
    void (*kernel)(const void* values) = nullptr;
    const void* values = nullptr;  // of its parameters
    int first_at_barrier = 0;
    int arrived = 0, votes = 0;  // at the barrier: threads, and those whose predicate was true
    int outcome = 0;             // votes of the last barrier
    sigjmp_buf failed;
    char message[2048];
    void* fault = nullptr;
};

extern Machine machine;

}  // namespace emulator

extern emulator::Dim3 threadIdx, blockIdx, blockDim, gridDim;
constexpr int warpSize = emulator::kWarp;

// `extern __shared__ u8 dynamic_shared[];` in namespace cuquant is this array, and so is `shared`. All
// shared arrays are thread_local: one copy for the one thread that runs all fibers, in one piece that
// can be poisoned.
namespace cuquant {
extern thread_local __attribute__((aligned(1024))) unsigned char
    dynamic_shared[emulator::kDynamicMost + emulator::kGuard];
}

namespace emulator {

// Ends the launch; what its fibers hold is dropped.
[[noreturn]] __attribute__((format(printf, 1, 2))) void fail(const char* format, ...);

inline Fiber& running() { return machine.fibers[machine.current]; }

// Leaves the fiber until somebody has made it Ready again.
void wait();

// ---- barriers: threads that have exited are not waited for --------------------------------------

void release_barrier();

// How many threads came with a true predicate.
int barrier(bool predicate, Place place);

// ---- conditions: looked at whenever it is the thread's turn -------------------------------------

void wait_until(const Condition& condition);

// ---- warp operations: complete when every lane of the mask asks for the same --------------------

int source_lane(const WarpOperation& wanted, int lane);

void complete(int warp, unsigned mask);

std::uint64_t warp_operation(const WarpOperation& wanted);

// ---- scheduling ---------------------------------------------------------------------------------

void exit_thread();

// Where every fiber begins; nothing returns from here.
void begin();

// A stack on which emulator_switch finds registers to load and `begin` to return to.
void prepare(Fiber& fiber);

// The kernel allows a process so many mappings, two of each stack, and a test run loads many libraries
// with stacks of their own (256 threads of each of 120 libraries were all of them): those of blocks of
// more than two warps are not kept.
constexpr std::size_t kKept = 64;
void drop_stacks(std::vector<Fiber>& fibers);

// Who waits for what, threads with equal wishes together.
std::string waiting();

enum class Order { Ascending, Descending, Shuffled, Mixed };

// The order in which the fibers of a block take turns. Mixed: a different one from block to block.
std::vector<int> turns(Order order, unsigned block);

// What is called before each block: it drops what the last one, which may have failed, left behind.
extern std::vector<void (*)()> block_starts;
bool at_block_start(void (*function)());
// What goes on beside the threads, one step at a time, when none of them can; false where nothing does.
extern bool (*beside)();

void start_block();

// Runs the block until all threads have exited or none can go on; whether any could.
bool run_block(const std::vector<int>& turn);

}  // namespace emulator
