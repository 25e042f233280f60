#include <fcntl.h>
#include <unistd.h>

#include <cstring>
#include <stdexcept>

#include "cuda/device/launch.h"
#include "cuda/device/shared_memory.h"

#if defined(KVPLANE_EMULATED)
#include "gpu_memory.h"
#endif

namespace kvplane::cuda {
namespace {

// Smaller allocations share a block of so many bytes with others, and a handle opens the whole
// block to the other process.
constexpr int64_t kBlockBytes = 2 << 20;

#if defined(KVPLANE_EMULATED)

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + error_name(error));
}

#else

// cuMemGetAddressRange by the runtime: this module is not linked to the driver.
using RangeFunction = int (*)(unsigned long long* first, size_t* num_bytes, unsigned long long at);

cudaError_t address_range(void* data, void** first, size_t* num_bytes) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuMemGetAddressRange", &found, 3020,
                                                             cudaEnableDefault, &result);
#else
  const cudaError_t error =
      cudaGetDriverEntryPoint("cuMemGetAddressRange", &found, cudaEnableDefault, &result);
#endif
  if (error != cudaSuccess) return error;
  if (result != cudaDriverEntryPointSuccess) return cudaErrorSymbolNotFound;
  unsigned long long at = 0;
  const int failed =
      reinterpret_cast<RangeFunction>(found)(&at, num_bytes, reinterpret_cast<uintptr_t>(data));
  *first = reinterpret_cast<void*>(static_cast<uintptr_t>(at));
  return failed == 0 ? cudaSuccess : cudaErrorInvalidValue;
}

#endif

// Makes a device the calling thread's for a while.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    check(cudaSetDevice(device), "cudaSetDevice");
  }
  ~OnDevice() { cudaSetDevice(before_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
};

void check_size(int64_t num_bytes) {
  if (num_bytes <= 0) throw std::invalid_argument("num_bytes must be above 0");
}

}  // namespace

std::shared_ptr<SharedMemory> SharedMemory::allocate(int device, int64_t num_bytes) {
  check_size(num_bytes);
  const OnDevice on(device);
  const size_t whole = static_cast<size_t>(div_ceil(num_bytes, kBlockBytes) * kBlockBytes);
  void* data = nullptr;
  check(cudaMalloc(&data, whole), "cudaMalloc");
  std::shared_ptr<SharedMemory> memory(new SharedMemory(data, num_bytes, device, true));
  // The memory may still hold another tenant's keys and values.
  check(cudaMemset(data, 0, whole), "cudaMemset");
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  cudaIpcMemHandle_t handle = {};
  static_assert(sizeof handle == kIpcHandleBytes);
  check(cudaIpcGetMemHandle(&handle, data), "cudaIpcGetMemHandle");
  memory->handle_.assign(reinterpret_cast<const char*>(&handle), sizeof handle);
  return memory;
}

std::shared_ptr<SharedMemory> SharedMemory::open(int device, const std::string& handle,
                                                 int64_t num_bytes, int file) {
  check_size(num_bytes);
  cudaIpcMemHandle_t given = {};
  if (handle.size() != sizeof given) throw std::invalid_argument("a handle must have 64 bytes");
  std::memcpy(&given, handle.data(), sizeof given);
  const OnDevice on(device);
  void* data = nullptr;
  check(cudaIpcOpenMemHandle(&data, given, cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle");
  std::shared_ptr<SharedMemory> memory(new SharedMemory(data, num_bytes, device, false));
  if (file >= 0) {
    memory->file_ = fcntl(file, F_DUPFD_CLOEXEC, 0);
    if (memory->file_ < 0) throw std::invalid_argument("file is not open, or is one too many");
  }
  void* first = nullptr;
  size_t has = 0;
  check(address_range(data, &first, &has), "cuMemGetAddressRange");
  if (first != data || has < static_cast<size_t>(num_bytes)) {
    throw std::invalid_argument("the memory has " + std::to_string(has) + " bytes, not " +
                                std::to_string(num_bytes));
  }
  return memory;
}

SharedMemory::~SharedMemory() {
  int before = 0;
  cudaGetDevice(&before);
  cudaSetDevice(device_);
  cudaDeviceSynchronize();
  if (is_own_) {
    cudaFree(data_);
  } else {
    cudaIpcCloseMemHandle(data_);
  }
  if (file_ >= 0) close(file_);
  cudaSetDevice(before);
  cudaGetLastError();  // at the end of a process, when the driver has gone
}

std::string device_uuid(int device) {
  cudaDeviceProp properties = {};
  check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  std::string text = "GPU-";
  for (size_t i = 0; i < sizeof properties.uuid.bytes; ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    const auto byte = static_cast<unsigned char>(properties.uuid.bytes[i]);
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

}  // namespace kvplane::cuda
