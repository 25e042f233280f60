// The part of CUDA's runtime that shares memory between processes, in software. Memory of a GPU is
// a file in main memory, and a handle says where another process of this user finds it.
//
// As on a GPU: memory is not cleared when it is allocated, a handle cannot be opened by the process
// that made it, and the address range is that of the allocation, whatever a caller says. Counted:
// memory that is freed while another process has it open, where CUDA says that anything may happen.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "emulator.h"

using cudaError_t = int;
constexpr cudaError_t cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorMemoryAllocation = 2;
constexpr cudaError_t cudaErrorInvalidDevice = 101, cudaErrorDeviceUninitialized = 201;
constexpr cudaError_t cudaErrorMapBufferObjectFailed = 205, cudaErrorInvalidResourceHandle = 400;
constexpr unsigned cudaIpcMemLazyEnablePeerAccess = 1;

struct cudaIpcMemHandle_t {
  char reserved[64];
};
struct cudaDeviceProp {
  struct {
    char bytes[16];
  } uuid;
};

namespace kvplane::emulator {

// Since the process began, for tests: memory that was freed while another process had it open.
inline std::atomic<int64_t> num_early_frees{0};
// Set by tests: the bytes that may be allocated.
inline std::atomic<int64_t> gpu_bytes{int64_t{1} << 30};

constexpr size_t kHeadBytes = 4096;            // of each file, before the memory
constexpr size_t kSharedBlockBytes = 2 << 20;  // that small allocations of a GPU are parts of
constexpr int kMaxImporters = 64;

// At the beginning of a file: who has it open, as process ids.
struct Head {
  std::atomic<int32_t> importers[kMaxImporters];
};

struct Handle {
  char kind[8];
  int32_t pid;
  int32_t fd;
  uint64_t inode;
  uint64_t padding[5];
};
static_assert(sizeof(Handle) == sizeof(cudaIpcMemHandle_t));
constexpr char kHandleKind[8] = {'e', 'm', 'u', 'l', 'a', 't', 'e', 'd'};

struct GpuMemory {
  Head* head = nullptr;
  size_t bytes = 0;
  int fd = -1;  // of who allocated it
};
inline std::mutex gpu_lock;
inline std::map<void*, GpuMemory> gpu_memory;

inline void* map_file(int fd, size_t bytes, GpuMemory& memory) {
  void* at = mmap(nullptr, kHeadBytes + bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) return nullptr;
  memory.head = static_cast<Head*>(at);
  memory.bytes = bytes;
  return static_cast<char*>(at) + kHeadBytes;
}

// Takes the process from the list, or puts it there where `from` is 0.
inline void replace_importer(Head& head, int32_t from, int32_t to) {
  for (auto& importer : head.importers) {
    int32_t was = from;
    if (importer.compare_exchange_strong(was, to)) return;
  }
}

inline bool is_open_elsewhere(const Head& head) {
  return std::any_of(std::begin(head.importers), std::end(head.importers),
                     [](const auto& pid) { return pid != 0 && kill(pid, 0) == 0; });
}

}  // namespace kvplane::emulator

inline std::string error_name(cudaError_t error) {
  return "emulated error " + std::to_string(error);
}

inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int device) {
  return device == 0 ? cudaSuccess : cudaErrorInvalidDevice;
}
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }

inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  for (int i = 0; i < 16; ++i) properties->uuid.bytes[i] = static_cast<char>(0xE0 + i);
  return cudaSetDevice(device);
}

inline cudaError_t cudaMalloc(void** data, size_t bytes) {
  using namespace kvplane::emulator;
  const std::lock_guard<std::mutex> lock(gpu_lock);
  if (static_cast<int64_t>(bytes) > gpu_bytes) return cudaErrorMemoryAllocation;
  GpuMemory memory;
  memory.fd = memfd_create("kvplane-emulated-gpu", MFD_CLOEXEC);
  if (memory.fd < 0) return cudaErrorMemoryAllocation;
  const bool has_size = ftruncate(memory.fd, static_cast<off_t>(kHeadBytes + bytes)) == 0;
  *data = has_size ? map_file(memory.fd, bytes, memory) : nullptr;
  if (*data == nullptr) {
    close(memory.fd);
    return cudaErrorMemoryAllocation;
  }
  std::memset(*data, 0xA5, bytes);
  gpu_bytes -= static_cast<int64_t>(bytes);
  gpu_memory[*data] = memory;
  return cudaSuccess;
}

inline cudaError_t cudaMemset(void* data, int value, size_t bytes) {
  std::memset(data, value, bytes);
  return cudaSuccess;
}

inline cudaError_t cudaFree(void* data) {
  using namespace kvplane::emulator;
  const std::lock_guard<std::mutex> lock(gpu_lock);
  const auto found = gpu_memory.find(data);
  if (found == gpu_memory.end() || found->second.fd < 0) return cudaErrorInvalidValue;
  const GpuMemory memory = found->second;
  if (is_open_elsewhere(*memory.head)) ++num_early_frees;
  munmap(memory.head, kHeadBytes + memory.bytes);
  close(memory.fd);
  gpu_bytes += static_cast<int64_t>(memory.bytes);
  gpu_memory.erase(found);
  return cudaSuccess;
}

inline cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* data) {
  using namespace kvplane::emulator;
  const std::lock_guard<std::mutex> lock(gpu_lock);
  const auto found = gpu_memory.find(data);
  if (found == gpu_memory.end() || found->second.fd < 0) return cudaErrorInvalidValue;
  if (found->second.bytes % kSharedBlockBytes != 0) {
    throw EmulationError("a handle of memory that is in a block with others opens them too");
  }
  struct stat file = {};
  if (fstat(found->second.fd, &file) != 0) return cudaErrorInvalidValue;
  Handle made = {};
  std::memcpy(made.kind, kHandleKind, sizeof kHandleKind);
  made.pid = getpid();
  made.fd = found->second.fd;
  made.inode = file.st_ino;
  std::memcpy(handle, &made, sizeof made);
  return cudaSuccess;
}

inline cudaError_t cudaIpcOpenMemHandle(void** data, cudaIpcMemHandle_t handle, unsigned flags) {
  using namespace kvplane::emulator;
  const std::lock_guard<std::mutex> lock(gpu_lock);
  Handle given;
  std::memcpy(&given, &handle, sizeof given);
  if (flags != cudaIpcMemLazyEnablePeerAccess) return cudaErrorInvalidValue;
  if (std::memcmp(given.kind, kHandleKind, sizeof kHandleKind) != 0) return cudaErrorInvalidValue;
  if (given.pid == getpid()) return cudaErrorDeviceUninitialized;
  const std::string path = "/proc/" + std::to_string(given.pid) + "/fd/" + std::to_string(given.fd);
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return cudaErrorMapBufferObjectFailed;
  struct stat file = {};
  const bool is_same = fstat(fd, &file) == 0 && file.st_ino == given.inode;
  GpuMemory memory;
  *data = is_same ? map_file(fd, static_cast<size_t>(file.st_size) - kHeadBytes, memory) : nullptr;
  close(fd);
  if (*data == nullptr) return cudaErrorInvalidResourceHandle;
  replace_importer(*memory.head, 0, getpid());
  gpu_memory[*data] = memory;
  return cudaSuccess;
}

inline cudaError_t cudaIpcCloseMemHandle(void* data) {
  using namespace kvplane::emulator;
  const std::lock_guard<std::mutex> lock(gpu_lock);
  const auto found = gpu_memory.find(data);
  if (found == gpu_memory.end() || found->second.fd >= 0) return cudaErrorInvalidValue;
  replace_importer(*found->second.head, getpid(), 0);
  munmap(found->second.head, kHeadBytes + found->second.bytes);
  gpu_memory.erase(found);
  return cudaSuccess;
}

// cuMemGetAddressRange.
inline cudaError_t address_range(void* data, void** first, size_t* num_bytes) {
  using namespace kvplane::emulator;
  const std::lock_guard<std::mutex> lock(gpu_lock);
  const auto found = gpu_memory.find(data);
  if (found == gpu_memory.end()) return cudaErrorInvalidValue;
  *first = data;
  *num_bytes = found->second.bytes;
  return cudaSuccess;
}
