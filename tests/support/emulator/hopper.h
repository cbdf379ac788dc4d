// What kernels/hopper.cuh writes in asm, for the emulator: cuda.h includes it.
#pragma once

namespace cuquant {

struct TensorMap;
struct E4m3;
struct Int8;
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

EmulatorBarrier& emulator_barrier(unsigned long long* barrier);
void emulator_arrived(EmulatorBarrier& barrier, int arrivals, int bytes);

void barrier_init(unsigned long long* barrier, int arrivals);
inline void barrier_fence() {}
void barrier_expect(unsigned long long* barrier, int bytes);
inline void barrier_arrive(unsigned long long* barrier) { emulator_arrived(emulator_barrier(barrier), 1, 0); }
EmulatorBarrier& emulator_barrier_of(const unsigned long long* barrier, unsigned rank);
struct RemoteBarriers {
    const unsigned long long* first;
    unsigned rank;

    RemoteBarriers(const unsigned long long* own, unsigned rank) : first(own), rank(rank) {}
    void arrive(int i) const { emulator_arrived(emulator_barrier_of(first + i, rank), 1, 0); }
};
void barrier_wait(unsigned long long* barrier, unsigned parity, Place place = Place::here());

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
    long long rows, columns, stride, height, width, size;  // stride in bytes; height and width of a box; bytes of an element
    long long mark;
};
constexpr long long kEmulatorMap = 0x70616D20726F736E;

// Where the copy engine puts the byte that belongs to an address, in boxes whose rows have 128 bytes, or 64.
inline unsigned emulator_swizzled(unsigned address) { return address ^ (address >> 7 & 7) << 4; }
inline unsigned emulator_swizzled_64(unsigned address) { return address ^ (address >> 7 & 3) << 4; }

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
                const auto size = static_cast<unsigned>(map.size);
                const unsigned straight = static_cast<unsigned>(to + (i * map.width + j) * size);
                const unsigned at = map.width != 64 ? straight : size == 1 ? emulator_swizzled_64(straight) : emulator_swizzled(straight);
                unsigned char* const element = emulator_shared(at, size, "copy_box");
                if (inside) std::memcpy(element, map.pointer + (row + i) * map.stride + (column + j) * size, size);
                else std::memset(element, 0, size);
                if (both) std::memcpy(emulator_remote(element, size, other(), "copy_box_to_both"), element, size);
            }
        const int came = static_cast<int>(map.height * map.width * map.size);
        emulator_arrived(emulator_barrier(barrier), 0, -came);
        if (both) emulator_arrived(emulator_barrier_of(barrier, other()), 0, -came);
    }
    static unsigned other() { return emulator::machine.rank ^ 1; }
};
extern std::vector<EmulatorBox> emulator_boxes[2];  // by block
bool emulator_next_box();

inline void prefetch_map(const TensorMap*) {}
void emulator_copy_box(void* to, const TensorMap* map, unsigned long long* barrier, int column, int row, bool both);
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
extern std::vector<EmulatorSend> emulator_sends[2];  // by block
void send_box(const TensorMap* map, const void* from, int column, int row);
void wait_sent();
inline void show_copies() {}

void copy_run(void* to, const void* from, int bytes, unsigned long long* barrier);

inline void prefetch_line(const void* from) { static_cast<void>(*static_cast<const volatile unsigned char*>(from)); }

void prefetch_run(const void* from, int bytes);

// ---- numbers in global memory that other blocks wait for ----------------------------------------

inline void raise_flag(unsigned long long* flag, unsigned long long value) { *flag = value; }
void wait_for_flag(const unsigned long long* flag, unsigned long long value, Place place = Place::here());

// ---- warps with different tasks -----------------------------------------------------------------

inline bool elect_one() { return threadIdx.x % 32 == 0; }
template <int kRegisters> inline void registers_up() { static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256); }
template <int kRegisters> inline void registers_down() { static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256); }

struct EmulatorNamed { int arrived, threads; std::uint64_t times; };
extern EmulatorNamed emulator_named[2][16];

void named_barrier(int number, int threads, Place place = Place::here());

void store_matrices_transposed(unsigned shared_address, const unsigned (&r)[2], Place place = Place::here());

// ---- products of a warpgroup: in every other block at once, else when they are waited for ---------

enum class EmulatorType { Half, Bfloat16, E4m3, Int8 };

// The number of an element.
inline float emulator_element(unsigned bits, EmulatorType type) {
    if (type == EmulatorType::Int8) return static_cast<float>(static_cast<signed char>(bits));
    if (type != EmulatorType::E4m3) return emulator_value(bits, type == EmulatorType::Half);
    const int exponent = bits >> 3 & 15, mantissa = bits & 7;
    const float size = exponent ? std::ldexp(8.0f + mantissa, exponent - 10) : std::ldexp(static_cast<float>(mantissa), -9);
    return (bits & 0x7F) == 0x7F ? NAN : bits & 0x80 ? -size : size;
}

struct EmulatorProduct {
    void* d;
    const unsigned (*a)[4];
    unsigned long long b;
    int columns;
    bool add;
    EmulatorType type;

    bool is_byte() const { return type == EmulatorType::E4m3 || type == EmulatorType::Int8; }
    // Element k of a lane's words, of the row 8 h further, which the four lanes of a row share.
    float left(const EmulatorOperands* lanes, int lane, int h, int k) const {
        const int each = is_byte() ? 4 : 2, bits = 32 / each;
        const unsigned word = lanes[lane / 4 * 4 + k % (4 * each) / each].a[2 * (k / (4 * each)) + h];
        return emulator_element(word >> bits * (k % each) & ((1ull << bits) - 1), type);
    }
    void run(Place place) const {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, depth = is_byte() ? 32 : 16;
        EmulatorOperands* const lanes = emulator_operands[emulator::machine.rank][warp];
        for (int i = 0; i < 4; ++i) lanes[lane].a[i] = (*a)[i];
        __syncwarp(~0u, place);
        const unsigned start = kEmulatorShared + static_cast<unsigned>(b & 0x3FFF) * 16;
        float rows[2][32];
        for (int h = 0; h < 2; ++h)
            for (int k = 0; k < depth; ++k) rows[h][k] = left(lanes, lane, h, k);
        for (int column = lane % 4 * 2; column < columns; column += column % 2 ? 7 : 1) {
            float right[32];
            for (int part = 0; part < 2; ++part) {  // 16 bytes stay together
                const unsigned at = is_byte() ? emulator_swizzled_64(start + column * 64 + 16 * part)
                                              : emulator_swizzled(start + column * 128 + 16 * part);
                unsigned char bytes[16];
                std::memcpy(bytes, emulator_shared(at, 16, "wgmma"), 16);
                const int each = depth / 2;
                for (int i = 0; i < each; ++i) {
                    const unsigned bits = is_byte() ? bytes[i] : bytes[2 * i] | bytes[2 * i + 1] << 8;
                    right[each * part + i] = emulator_element(bits, type);
                }
            }
            for (int h = 0; h < 2; ++h) {
                const int at = column / 8 * 4 + 2 * h + column % 2;
                if (type == EmulatorType::Int8) {
                    int& sum = static_cast<int*>(d)[at];
                    unsigned total = add ? static_cast<unsigned>(sum) : 0u;  // which wraps
                    for (int k = 0; k < depth; ++k) total += static_cast<unsigned>(static_cast<int>(rows[h][k] * right[k]));
                    sum = static_cast<int>(total);
                } else {
                    float& sum = static_cast<float*>(d)[at];
                    if (!add) sum = 0.0f;
                    for (int k = 0; k < depth; ++k) sum += rows[h][k] * right[k];
                }
            }
        }
        __syncwarp(~0u, place);  // no lane goes on before all have read
    }
};
extern std::vector<std::vector<EmulatorProduct>> emulator_products[2][1024];  // [block][thread][group][product]

inline void wgmma_fence() {}
void wgmma_commit();
void emulator_wgmma_wait(int pending, Place place);
template <int kPending>
inline void wgmma_wait(Place place = Place::here()) {
    emulator_wgmma_wait(kPending, place);
}
void emulator_wgmma(const EmulatorProduct& product, Place place);
template <class T, int kColumns, bool kAdd, class Sum>
inline void wgmma(Sum (&d)[kColumns / 2], const unsigned (&a)[4], unsigned b, Place place = Place::here()) {
    static_assert(kColumns % 8 == 0 && kColumns <= 256);
    constexpr auto type = std::is_same_v<T, Half>   ? EmulatorType::Half
                          : std::is_same_v<T, E4m3> ? EmulatorType::E4m3
                          : std::is_same_v<T, Int8> ? EmulatorType::Int8
                                                    : EmulatorType::Bfloat16;
    static_assert(std::is_same_v<Sum, std::conditional_t<type == EmulatorType::Int8, int, float>>);
    emulator_wgmma({d, &a, b, kColumns, kAdd, type}, place);
}

}  // namespace cuquant
