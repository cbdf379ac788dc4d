// cub::BlockReduce as our kernels use it: the result is thread 0's alone, and the others get the
// bytes of poison so that a kernel that reads them shows it.
#pragma once

namespace cub {

template <class T, int kThreads>
class BlockReduce {
  public:
    struct TempStorage { alignas(T) unsigned char values[kThreads * sizeof(T)]; };

    explicit BlockReduce(TempStorage& storage) : storage_(storage) {}

    template <class Operation>
    T Reduce(T value, Operation operation) {
        std::memcpy(storage_.values + threadIdx.x * sizeof(T), &value, sizeof(T));
        __syncthreads();
        T result;
        std::memset(static_cast<void*>(&result), emulator::kPoison, sizeof(T));
        if (threadIdx.x) return result;
        std::memcpy(&result, storage_.values, sizeof(T));
        for (int i = 1; i < kThreads; ++i) {
            T next;
            std::memcpy(&next, storage_.values + i * sizeof(T), sizeof(T));
            result = operation(result, next);
        }
        return result;
    }

    T Sum(T value) {
        return Reduce(value, [](const T& a, const T& b) { return a + b; });
    }

  private:
    TempStorage& storage_;
};

}  // namespace cub
