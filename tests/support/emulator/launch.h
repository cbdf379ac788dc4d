// A launch: all blocks, faults turned into messages, and the values that Python passes made the
// kernel's parameters, with the checks that a GPU does not make.
#pragma once
#include "cluster.h"

#include <csignal>
#include <tuple>
#include <type_traits>
#include <utility>

namespace emulator {

// ---- launching ----------------------------------------------------------------------------------

struct Launch { Dim3 grid; int threads, shared, order; };

void on_signal(int number, siginfo_t* info, void*);

// Turns faults of the kernel into messages while it lives; then the handlers are Python's again.
class Signals {
    static constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE};
    struct sigaction before_[3];
    stack_t stack_before_;

  public:
    Signals() {
        static char stack[1 << 16];
        stack_t own{};
        own.ss_sp = stack;
        own.ss_size = sizeof stack;
        sigaltstack(&own, &stack_before_);
        struct sigaction action{};
        action.sa_sigaction = on_signal;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK;
        for (int i = 0; i < 3; ++i) sigaction(kSignals[i], &action, &before_[i]);
    }
    ~Signals() {
        for (int i = 0; i < 3; ++i) sigaction(kSignals[i], &before_[i], nullptr);
        sigaltstack(&stack_before_, nullptr);
    }
};

void run_grid(const Launch& launch);

// Begins a launch, which may fail: what went wrong, or nullptr; *fault is the address of an invalid
// access.
const char* run(void (*begin)(const Launch&, const void* about), const Launch& launch, const void* about,
                void** fault);

// ---- parameters ---------------------------------------------------------------------------------

// One value: 'i' an integer or pointer, 'f' a float32, 'b' the bytes of a struct.
struct Argument { long long kind, count; const void* data; };

template <class T>
T parameter(const Argument& given, int index) {
    using Plain = std::remove_cv_t<T>;
    constexpr bool kWhole = std::is_integral_v<Plain> || std::is_pointer_v<Plain> || std::is_enum_v<Plain>;
    const char wanted = std::is_floating_point_v<Plain> ? 'f' : kWhole ? 'i' : 'b';
    if (given.kind != wanted)
        fail("parameter %d wants '%c' (i: int, f: float, b: bytes), got '%c'", index, wanted,
             static_cast<char>(given.kind));
    if (wanted == 'b' && given.count != (static_cast<long long>(sizeof(Plain)) + 7) / 8 * 8)
        fail("parameter %d is a struct of %d bytes, got %lld", index, static_cast<int>(sizeof(Plain)),
             given.count);
    Plain value;
    std::memcpy(static_cast<void*>(&value), given.data, sizeof value);
    if constexpr (std::is_integral_v<Plain> && sizeof(Plain) < 8) {
        long long whole;
        std::memcpy(&whole, given.data, 8);
        if (static_cast<long long>(value) != whole)
            fail("parameter %d has %d bytes and cannot hold %lld", index,
                 static_cast<int>(sizeof(Plain)), whole);
    }
    return value;
}

template <class... A, std::size_t... I>
void call(void (*kernel)(A...), const Launch& launch, const Argument* given, std::index_sequence<I...>) {
    using Values = std::tuple<void (*)(A...), std::remove_cv_t<A>...>;
    const Values values{kernel, parameter<A>(given[I], static_cast<int>(I))...};
    machine.values = &values;
    machine.kernel = [](const void* about) {
        const Values& all = *static_cast<const Values*>(about);
        std::get<0>(all)(std::get<I + 1>(all)...);
    };
    run_grid(launch);
}

// Runs a kernel on all blocks of a launch: see `run`.
template <class... A>
const char* start(void (*kernel)(A...), const Launch& launch, const Argument* given, int count,
                  void** fault) {
    struct Start { void (*kernel)(A...); const Argument* given; int count; };
    const Start wanted{kernel, given, count};
    const auto begin = [](const Launch& launch, const void* about) {
        const Start& start = *static_cast<const Start*>(about);
        if (start.count != static_cast<int>(sizeof...(A)))
            fail("the kernel has %d parameters, got %d", static_cast<int>(sizeof...(A)), start.count);
        call(start.kernel, launch, start.given, std::index_sequence_for<A...>{});
    };
    return run(begin, launch, &wanted, fault);
}

}  // namespace emulator
