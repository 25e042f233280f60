// Memory of a GPU that two processes have, as a Python class, and as tensors by DLPack.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <string>

#include "cuda/device/shared_memory.h"

namespace kvplane::cuda {

// DLPack's structures, as every version before 1.0 has them and as torch takes them.
struct DlTensor {
  void* data;
  int32_t device_kind, device;
  int32_t num_dimensions;
  uint8_t type_code, type_bits;
  uint16_t type_lanes;
  int64_t* shape;
  int64_t* strides;  // null: contiguous
  uint64_t first_byte;
};
struct DlManagedTensor {
  DlTensor tensor;
  void* owner;
  void (*deleter)(DlManagedTensor*);
};

#if defined(KVPLANE_EMULATED)
constexpr int32_t kDlDevice = 1;  // the CPU
#else
constexpr int32_t kDlDevice = 2;  // CUDA
#endif
constexpr uint8_t kDlUnsigned = 1;

// The memory as a tensor of bytes, for a function that takes DLPack. It keeps the memory.
inline pybind11::object dlpack_of(const std::shared_ptr<SharedMemory>& memory) {
  struct Owner {
    DlManagedTensor managed;
    int64_t num_bytes;
    std::shared_ptr<SharedMemory> memory;
  };
  auto* owner = new Owner{{}, memory->num_bytes(), memory};
  owner->managed.tensor = {
      memory->data(), kDlDevice, memory->device(), 1, kDlUnsigned, 8, 1, &owner->num_bytes,
      nullptr,        0};
  owner->managed.owner = owner;
  owner->managed.deleter = [](DlManagedTensor* self) { delete static_cast<Owner*>(self->owner); };
  // The consumer of the tensor renames the capsule, and calls the deleter when it is done.
  PyObject* made = PyCapsule_New(&owner->managed, "dltensor", [](PyObject* capsule) {
    if (!PyCapsule_IsValid(capsule, "dltensor")) return;
    auto* managed = static_cast<DlManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
    managed->deleter(managed);
  });
  if (made == nullptr) {
    delete owner;
    throw pybind11::error_already_set();
  }
  return pybind11::reinterpret_steal<pybind11::object>(made);
}

inline void bind_device_memory(pybind11::module_& m) {
  namespace py = pybind11;
  using py::arg;
  using release_gil = py::call_guard<py::gil_scoped_release>;
  py::class_<SharedMemory, std::shared_ptr<SharedMemory>>(m, "SharedMemory", py::module_local())
      .def("handle", [](const SharedMemory& self) { return py::bytes(self.handle()); })
      .def("dlpack", &dlpack_of);
  m.def("device_uuid", &device_uuid, release_gil(), arg("device"));
  m.def("allocate_shared", &SharedMemory::allocate, release_gil(), py::kw_only(), arg("device"),
        arg("num_bytes"));
  m.def(
      "open_shared",
      [](int device, const py::bytes& handle, int64_t num_bytes, int file) {
        const std::string given = handle;
        const py::gil_scoped_release released;
        return SharedMemory::open(device, given, num_bytes, file);
      },
      py::kw_only(), arg("device"), arg("handle"), arg("num_bytes"), arg("file"));
}

}  // namespace kvplane::cuda
