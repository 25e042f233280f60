// Many copies by the copy engines in one call of the driver (cuMemcpyBatchAsync, CUDA 12.8), which
// costs the host about half as much as the same copies one by one.
#pragma once

#include <cstddef>
#include <vector>

#include "cuda/device/launch.h"

namespace kvplane::cuda {

constexpr int kDriverOfBatchCopies = 12080;

// Copies between device and host, none of which touches what another writes. At index i: sizes[i]
// bytes from sources[i] to destinations[i].
struct BatchCopies {
  std::vector<void*> destinations;
  std::vector<void*> sources;
  std::vector<size_t> sizes;

  void add(void* destination, const void* source, size_t bytes) {
    destinations.push_back(destination);
    sources.push_back(const_cast<void*>(source));
    sizes.push_back(bytes);
  }
};

#if defined(KVPLANE_EMULATED)

inline int64_t num_batch_copies = 0;  // calls, for tests

inline bool has_batch_copies(Stream) { return driver_version >= kDriverOfBatchCopies; }

// In reverse order: the driver gives none.
inline void copy_batch(BatchCopies& copies, Stream stream) {
  if (copies.sizes.empty()) return;
  if (!host_memory_is_mapped) fail("a batch of copies of memory that is not pinned");
  ++num_batch_copies;
  for (size_t i = copies.sizes.size(); i-- > 0;) {
    const size_t bytes = copies.sizes[i];
    copy_rows(copies.destinations[i], bytes, copies.sources[i], bytes, bytes, 1, stream);
  }
}

#else

// The driver's structure, which older headers lack. `flags` is 0; the locations are hints for other
// kinds of memory.
struct BatchCopyAttributes {
  int source_access_order;
  int source_location[2];
  int destination_location[2];
  unsigned int flags;
};
constexpr int kInStreamOrder = 1;  // CU_MEMCPY_SRC_ACCESS_ORDER_STREAM

// The form of driver 12.8, which newer drivers have, too. Returns a CUresult.
using BatchCopyFunction = int (*)(void** destinations, void** sources, size_t* sizes, size_t count,
                                  BatchCopyAttributes* attributes, size_t* first_of_attributes,
                                  size_t num_attributes, size_t* failed, cudaStream_t stream);

// Null where the driver, or the runtime of this build, is older.
inline BatchCopyFunction batch_copy_function() {
  static const BatchCopyFunction function = []() -> BatchCopyFunction {
#if CUDART_VERSION >= 12050
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t error = cudaGetDriverEntryPointByVersion(
        "cuMemcpyBatchAsync", &found, kDriverOfBatchCopies, cudaEnableDefault, &result);
    if (error == cudaSuccess && result == cudaDriverEntryPointSuccess) {
      return reinterpret_cast<BatchCopyFunction>(found);
    }
    cudaGetLastError();
#endif
    return nullptr;
  }();
  return function;
}

// Not on the default stream, which the driver refuses, nor while a graph is captured.
inline bool has_batch_copies(Stream stream) {
  if (stream == 0 || batch_copy_function() == nullptr) return false;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(reinterpret_cast<cudaStream_t>(stream), &status),
        "cudaStreamIsCapturing");
  return status == cudaStreamCaptureStatusNone;
}

// Where `has_batch_copies`. Sources are read in stream order: an earlier kernel may write them.
inline void copy_batch(BatchCopies& copies, Stream stream) {
  if (copies.sizes.empty()) return;
  BatchCopyAttributes attributes = {kInStreamOrder, {0, 0}, {0, 0}, 0};
  size_t first = 0, failed = 0;
  const int error = batch_copy_function()(
      copies.destinations.data(), copies.sources.data(), copies.sizes.data(), copies.sizes.size(),
      &attributes, &first, 1, &failed, reinterpret_cast<cudaStream_t>(stream));
  if (error == 0) return;
  throw std::runtime_error("cuMemcpyBatchAsync: error " + std::to_string(error) + " of copy " +
                           std::to_string(failed) + " of " + std::to_string(copies.sizes.size()));
}

#endif

}  // namespace kvplane::cuda
