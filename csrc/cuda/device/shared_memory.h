// Memory of one GPU that two processes use, by CUDA IPC.
//
//   exporter   cudaMalloc ── handle, 64 bytes ──►  importer   cudaIpcOpenMemHandle
//   cudaFree, once the importer has closed it   ◄──           cudaIpcCloseMemHandle
//
// If it is freed earlier, the importer's accesses are undefined. So the exporter has to know when
// the importer is done; CUDA IPC does not tell it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace kvplane::cuda {

constexpr size_t kIpcHandleBytes = 64;

class SharedMemory {
 public:
  // Allocates at least `num_bytes` bytes of zeros on the device of this index, for another process.
  // Throws std::runtime_error where there is no memory, or the device cannot share it.
  static std::shared_ptr<SharedMemory> allocate(int device, int64_t num_bytes);
  // Opens another process's memory, of which the first `num_bytes` are used here. A copy of `file`
  // is open for as long as the memory is, and closed after it; -1 for none. Throws
  // std::invalid_argument for a handle of another length and for memory that is smaller, and
  // std::runtime_error where it cannot be opened: it is on another device, or in a container that
  // does not share the machine's IPC.
  static std::shared_ptr<SharedMemory> open(int device, const std::string& handle,
                                            int64_t num_bytes, int file);
  // Waits until the device has done all work of this process, then frees or closes the memory.
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  void* data() const { return data_; }
  int64_t num_bytes() const { return num_bytes_; }
  int device() const { return device_; }
  // The handle for the other process. Empty where the memory was opened.
  const std::string& handle() const { return handle_; }

 private:
  SharedMemory(void* data, int64_t num_bytes, int device, bool is_own)
      : data_(data), num_bytes_(num_bytes), device_(device), is_own_(is_own) {}

  void* const data_;
  const int64_t num_bytes_;
  const int device_;
  const bool is_own_;  // allocated here
  std::string handle_;
  int file_ = -1;
};

// Returns "GPU-" and the UUID in hexadecimal: indices of a device differ between processes.
std::string device_uuid(int device);

}  // namespace kvplane::cuda
