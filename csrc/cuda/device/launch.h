// The host's side of the device: launches, copies and errors, in CUDA or in the emulator.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>

#include "cuda/device/device.h"

namespace kvplane::cuda {

// A cudaStream_t as an integer, as Python passes it; 0 is the default stream.
using Stream = uintptr_t;

struct Grid {
  int64_t x = 1;
  int64_t y = 1;
};

// kEarly: in code for sm_90 or later, the kernel may begin while the one before it in the stream
// still runs (programmatic dependent launch). It must read nothing that earlier kernels write, and
// write nothing, before it calls wait_for_kernel_before().
enum class Begins { kInOrder, kEarly };

// The bytes of parameters that a launch may have with every driver. From this driver version
// (CUDA 12.1) on, it may have 32764.
constexpr size_t kParameterBytesForAll = 4096;
constexpr int kDriverOfLargeParameters = 12010;

#if defined(KVPLANE_EMULATED)

inline int num_devices() { return 1; }

// For tests: the number of launches, and whether kernels can reach host memory, as if it were
// pinned.
inline int64_t num_launches = 0;
inline bool host_memory_is_mapped = true;
// Set by tests: the shared memory of a block, at first that of an H100, and the driver's version.
inline int64_t shared_bytes_of_block = 227 * 1024;
inline int driver_version = 13000;

inline size_t max_shared_bytes() { return static_cast<size_t>(shared_bytes_of_block); }

inline bool allows_large_parameters() { return driver_version >= kDriverOfLargeParameters; }

[[noreturn]] inline void fail(const char* what) { throw emulator::EmulationError(what); }

template <typename... Parameters>
constexpr size_t bytes_of_parameters(void (*)(Parameters...)) {
  return (sizeof(Parameters) + ...);
}

template <auto kKernel, typename... Arguments>
void launch_when(Begins begins, Grid grid, int num_threads, size_t shared_bytes, Stream,
                 const Arguments&... arguments) {
  if (grid.x == 0 || grid.y == 0) return;
  ++num_launches;
  if (shared_bytes > max_shared_bytes()) fail("more shared memory than a block can have");
  if (bytes_of_parameters(kKernel) > kParameterBytesForAll && !allows_large_parameters()) {
    fail("more parameters than the driver takes");
  }
  // Copies of the arguments: a kernel that lets the next one begin may not have ended here.
  emulator::launch(
      {static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y), 1},
      {static_cast<unsigned>(num_threads), 1, 1}, shared_bytes,
      [kept = std::make_shared<const std::tuple<Arguments...>>(arguments...)] {
        std::apply(kKernel, *kept);
      },
      begins == Begins::kEarly);
}

inline int64_t num_multiprocessors() { return 1; }

// Few, so that a block has several pieces of work to do.
template <auto kKernel>
int64_t resident_blocks(int, size_t shared_bytes) {
  const int64_t fit = shared_bytes_of_block / static_cast<int64_t>(shared_bytes + 1);
  return max_of<int64_t>(1, min_of<int64_t>(2, fit));
}

inline void copy_rows(void* destination, size_t destination_stride, const void* source,
                      size_t source_stride, size_t row_bytes, size_t num_rows, Stream) {
  const auto begins_in = [&](const void* inner, const void* outer, size_t stride) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(inner);
    const uintptr_t begin = reinterpret_cast<uintptr_t>(outer);
    return at >= begin && at < begin + (num_rows - 1) * stride + row_bytes;
  };
  if (begins_in(source, destination, destination_stride) ||
      begins_in(destination, source, source_stride)) {
    fail("a copy onto itself, which CUDA does not define");
  }
  for (size_t i = 0; i < num_rows; ++i) {
    std::memmove(static_cast<char*>(destination) + i * destination_stride,
                 static_cast<const char*>(source) + i * source_stride, row_bytes);
  }
}

inline void* device_address(const void* data, size_t) {
  return host_memory_is_mapped ? const_cast<void*>(data) : nullptr;
}

#else

// Throws std::runtime_error when a call of the CUDA runtime failed.
inline void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // Clears the error: otherwise a later launch would report it.
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorName(error) + ", " +
                           cudaGetErrorString(error));
}

// 0 where there is no driver, or one too old for this build.
inline int num_devices() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaErrorInsufficientDriver || error == cudaErrorNoDevice) {
    cudaGetLastError();
    return 0;
  }
  check(error, "cudaGetDeviceCount");
  return count;
}

// A kernel that uses more shared memory than this has to request it.
constexpr size_t kSharedBytesForAll = 48 * 1024;

constexpr int kMaxDevices = 64;  // for which attributes are cached

// The most shared memory that a block can have on the current device. Cached for each device.
inline size_t max_shared_bytes() {
  static std::atomic<int> known[kMaxDevices];
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  if (device < kMaxDevices && known[device] > 0) return static_cast<size_t>(known[device]);
  int bytes = 0;
  check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
        "cudaDeviceGetAttribute");
  if (device < kMaxDevices) known[device] = bytes;
  return static_cast<size_t>(bytes);
}

// Whether the driver allows launches with 32764 bytes of parameters. Cached.
inline bool allows_large_parameters() {
  static const bool allows = [] {
    int version = 0;
    check(cudaDriverGetVersion(&version), "cudaDriverGetVersion");
    return version >= kDriverOfLargeParameters;
  }();
  return allows;
}

inline int current_device() {
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

// Lets a kernel have as much shared memory as it asks for. Once for each device: the call takes
// some microseconds.
template <auto kKernel>
void allow_shared(size_t shared_bytes) {
  static std::atomic<size_t> allowed[kMaxDevices];
  if (shared_bytes <= kSharedBytesForAll) return;
  const int device = current_device();
  if (device < kMaxDevices && allowed[device] >= shared_bytes) return;
  check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kKernel),
                             cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(shared_bytes)),
        "cudaFuncSetAttribute");
  if (device < kMaxDevices) allowed[device] = shared_bytes;
}

// The least architecture, as major * 10 + minor, that ptx.cuh compiles waits for.
constexpr int kArchThatWaits = 90;

// Whether the code that the current device runs of a kernel waits for the kernel before it. Cached
// for each device. The device does not tell: one of sm_90 may run PTX that was compiled for sm_80,
// in which there is no wait.
template <auto kKernel>
bool can_begin_early() {
  static std::atomic<int> known[kMaxDevices];  // 1 + the answer
  const int device = current_device();
  if (device < kMaxDevices && known[device] > 0) return known[device] == 2;
  cudaFuncAttributes attributes = {};
  check(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kKernel)),
        "cudaFuncGetAttributes");
  const bool waits = attributes.ptxVersion >= kArchThatWaits;
  if (device < kMaxDevices) known[device] = waits ? 2 : 1;
  return waits;
}

template <typename... Parameters, typename... Arguments>
void launch_with(void (*kernel)(Parameters...), bool begins_early, Grid grid, int num_threads,
                 size_t shared_bytes, Stream stream, const Arguments&... arguments) {
  // Converted to the kernel's parameter types: the runtime only copies their bytes.
  std::tuple<Parameters...> values(arguments...);
  void* pointers[sizeof...(Parameters)];
  std::apply(
      [&](auto&... value) {
        int i = 0;
        ((pointers[i++] = &value), ...);
      },
      values);
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y));
  config.blockDim = dim3(static_cast<unsigned>(num_threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = reinterpret_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = begins_early ? 1 : 0;
  check(cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), pointers),
        "cudaLaunchKernelExC");
}

// Launches a kernel on the current device without waiting for it. An empty grid is not launched.
template <auto kKernel, typename... Arguments>
void launch_when(Begins begins, Grid grid, int num_threads, size_t shared_bytes, Stream stream,
                 const Arguments&... arguments) {
  if (grid.x == 0 || grid.y == 0) return;
  allow_shared<kKernel>(shared_bytes);
  const bool begins_early = begins == Begins::kEarly && can_begin_early<kKernel>();
  launch_with(kKernel, begins_early, grid, num_threads, shared_bytes, stream, arguments...);
}

inline int64_t num_multiprocessors() {
  static std::atomic<int> known[kMaxDevices];
  const int device = current_device();
  if (device < kMaxDevices && known[device] > 0) return known[device];
  int count = 0;
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device),
        "cudaDeviceGetAttribute");
  if (device < kMaxDevices) known[device] = count;
  return count;
}

// How many blocks of a kernel the current device runs at once. The last answer is kept for each
// device, with the shared memory that it is for.
template <auto kKernel>
int64_t resident_blocks(int num_threads, size_t shared_bytes) {
  static std::atomic<uint64_t> known[kMaxDevices];
  const int device = current_device();
  const uint64_t before = device < kMaxDevices ? known[device].load() : 0;
  if (before != 0 && before >> 32 == shared_bytes) {
    return static_cast<int64_t>(before & 0xFFFFFFFFu);
  }
  allow_shared<kKernel>(shared_bytes);
  int num_blocks = 0;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&num_blocks, kKernel, num_threads,
                                                      shared_bytes),
        "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  const int64_t resident = num_multiprocessors() * max_of(num_blocks, 1);
  if (device < kMaxDevices) known[device] = uint64_t{shared_bytes} << 32 | uint64_t(resident);
  return resident;
}

// The address at which a kernel on the current device can reach all of [data, data + bytes), which
// is the device's own memory or pinned host memory. Null for any other memory.
inline void* device_address(const void* data, size_t bytes) {
  const auto address_of = [](const void* address) -> char* {
    cudaPointerAttributes attributes = {};
    check(cudaPointerGetAttributes(&attributes, address), "cudaPointerGetAttributes");
    // Pageable memory is excluded, even on systems on which a GPU can read it page by page.
    if (attributes.type == cudaMemoryTypeUnregistered) return nullptr;
    if (attributes.type == cudaMemoryTypeDevice) {
      int device = 0;
      check(cudaGetDevice(&device), "cudaGetDevice");
      if (attributes.device != device) return nullptr;
    }
    return static_cast<char*>(attributes.devicePointer);
  };
  char* first = address_of(data);
  if (first == nullptr || bytes == 0) return first;
  const char* last = address_of(static_cast<const char*>(data) + bytes - 1);
  return last == first + bytes - 1 ? first : nullptr;
}

// Copies rows between any two of device, pinned host and pageable host memory, in stream order.
inline void copy_rows(void* destination, size_t destination_stride, const void* source,
                      size_t source_stride, size_t row_bytes, size_t num_rows, Stream stream) {
  const cudaStream_t on = reinterpret_cast<cudaStream_t>(stream);
  if (num_rows == 1 || (destination_stride == row_bytes && source_stride == row_bytes)) {
    check(cudaMemcpyAsync(destination, source, row_bytes * num_rows, cudaMemcpyDefault, on),
          "cudaMemcpyAsync");
    return;
  }
  check(cudaMemcpy2DAsync(destination, destination_stride, source, source_stride, row_bytes,
                          num_rows, cudaMemcpyDefault, on),
        "cudaMemcpy2DAsync");
}

#endif

template <auto kKernel, typename... Arguments>
void launch(Grid grid, int num_threads, size_t shared_bytes, Stream stream,
            const Arguments&... arguments) {
  launch_when<kKernel>(Begins::kInOrder, grid, num_threads, shared_bytes, stream, arguments...);
}

}  // namespace kvplane::cuda
