// What launch.h declares: a part of runtime.cpp.
#include "launch.h"

namespace emulator {

void on_signal(int number, siginfo_t* info, void*) {
    machine.fault = info->si_addr;
    const char* what = number == SIGFPE ? "integer division by zero" : "invalid access";
    fail("%s at address %p", what, info->si_addr);
}

void run_grid(const Launch& launch) {
    machine.threads = launch.threads;
    machine.shared = launch.shared;
    gridDim = launch.grid;
    blockDim = {static_cast<unsigned>(launch.threads), 1, 1};
    for (unsigned z = 0; z < launch.grid.z; ++z)
        for (unsigned y = 0; y < launch.grid.y; ++y)
            for (unsigned x = 0; x < launch.grid.x; x += kCluster)
                run_cluster(static_cast<Order>(launch.order), {x, y, z});
}

const char* run(void (*begin)(const Launch&, const void* about), const Launch& launch, const void* about,
                void** fault) {
    const auto guarded = [&]() -> const char* {
        machine.fault = nullptr;
        machine.current = 0;
        const Signals signals;
        if (sigsetjmp(machine.failed, 1)) return machine.message;
        begin(launch, about);
        return nullptr;
    };
    const char* const failure = guarded();
    drop_stacks(machine.fibers);
    for (Aside& aside : cluster.aside) drop_stacks(aside.fibers);
    *fault = machine.fault;
    return failure;
}

}  // namespace emulator
