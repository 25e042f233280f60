// A CUDA device of torch in main memory, for tests on machines without a GPU. Torch's operations
// run on the CPU, in order, and fail where a GPU would refuse them.
//
// - The device's memory has its own allocator, which fills it with 0xFF: NaN in every float type.
// - An operation on tensors of both the device and the host fails, as on a GPU.
// - During the capture of a graph, operations that wait for the device fail: synchronous copies,
//   item, nonzero and the like. The others are recorded, and `simulated_replay` repeats them on the
//   same memory. They also run during the capture, whose writes are undone at its end.
//
// Bytes that cross the link are counted, and so is memory: `simulated_crossed`, `simulated_memory`.
// A stream is only a number: operations run when they are queued.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace {

using at::Tensor;

constexpr size_t kMostPoisoned = size_t{64} << 20;
constexpr size_t kAlignment = 512;
constexpr size_t kDeviceBytes = size_t{80} << 30;

thread_local int64_t current_stream = 0;
thread_local int capturing = 0;
thread_local int64_t graph_being_captured = 0;
using Memory = std::map<const void*, size_t>;  // from address to bytes
// None of these is ever destroyed: tensors are freed after static objects.
auto& mutex = *new std::mutex;
auto& device_memory = *new Memory;
auto& pinned_memory = *new Memory;
// The operations of each captured graph, by its number.
auto& recorded = *new std::map<int64_t, std::vector<std::function<void()>>>;
// Tensors that this thread's capture has overwritten, in order, and their contents before.
thread_local auto& overwritten = *new std::vector<std::pair<at::Tensor, at::Tensor>>;

c10::Device the_device() { return c10::Device(c10::kCUDA, 0); }

bool is_in(const Memory& memory, const void* address) {
  const std::lock_guard<std::mutex> lock(mutex);
  auto it = memory.upper_bound(address);
  if (it == memory.begin()) return false;
  --it;
  return static_cast<const char*>(address) < static_cast<const char*>(it->first) + it->second;
}

// Bytes of tensors on the device, now and at most; bytes copied to the device and from it.
std::atomic<int64_t> allocated{0}, peak{0}, sent{0}, received{0};

void count_allocated(int64_t bytes) {
  const int64_t now = allocated += bytes;
  int64_t most = peak;
  while (now > most && !peak.compare_exchange_weak(most, now)) {
  }
}

// Whether this thread simulates an operation, whose copies a GPU does not make.
thread_local bool is_simulating = false;

void count_crossing(bool from_device, bool to_device, size_t bytes) {
  if (from_device == to_device || is_simulating) return;
  (to_device ? sent : received) += static_cast<int64_t>(bytes);
}

void* allocate(Memory& memory, size_t bytes) {
  void* address = nullptr;
  if (bytes == 0) return nullptr;
  if (posix_memalign(&address, kAlignment, bytes) != 0) throw std::bad_alloc();
  const std::lock_guard<std::mutex> lock(mutex);
  memory[address] = bytes;
  if (&memory == &device_memory) count_allocated(static_cast<int64_t>(bytes));
  return address;
}

void forget(Memory& memory, void* address) {
  if (address == nullptr) return;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto it = memory.find(address);
    if (&memory == &device_memory) count_allocated(-static_cast<int64_t>(it->second));
    memory.erase(it);
  }
  std::free(address);
}

void free_device(void* address) { forget(device_memory, address); }
void free_pinned(void* address) { forget(pinned_memory, address); }

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    TORCH_CHECK_WITH(OutOfMemoryError, bytes <= kDeviceBytes, "CUDA out of memory");
    void* address = ::allocate(device_memory, bytes);
    if (address != nullptr && bytes <= kMostPoisoned) std::memset(address, 0xFF, bytes);
    return {address, address, &free_device, the_device()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_device; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* address = ::allocate(pinned_memory, bytes);
    return {address, address, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

DeviceAllocator device_allocator;
PinnedAllocator pinned_allocator;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return the_device(); }
  c10::Device getDevice() const override { return the_device(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return stream_of(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream_of(0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const int64_t before = current_stream;
    current_stream = stream.id();
    return stream_of(before);
  }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void record(void**, const c10::Stream&, const c10::DeviceIndex,
              const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }

 private:
  static c10::Stream stream_of(int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, the_device(), id);
  }
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  int getNumGPUs() const override { return 1; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* address) const override { return is_in(pinned_memory, address); }
  c10::Device getDeviceFromPtr(void*) const override { return the_device(); }
  void deviceSynchronize(c10::DeviceIndex) const override {}
};

// A tensor of the host over the same memory.
Tensor on_host(const Tensor& tensor) {
  if (!tensor.is_cuda()) return tensor;
  void* address = tensor.numel() > 0 ? tensor.mutable_data_ptr() : nullptr;
  const auto options = at::TensorOptions().dtype(tensor.dtype()).device(c10::kCPU);
  return at::from_blob(address, tensor.sizes(), tensor.strides(), [tensor](void*) {}, options);
}

void wait_for_device(const char* what) {
  TORCH_CHECK(capturing == 0,
              "CUDA error: operation not permitted when stream is capturing: ", what);
}

void keep_contents(const Tensor& tensor) {
  if (capturing == 0 || tensor.numel() == 0) return;
  overwritten.emplace_back(tensor, on_host(tensor).clone());
}

void note(std::function<void()> again) {
  if (capturing == 0) return;
  const std::lock_guard<std::mutex> lock(mutex);
  recorded[graph_being_captured].push_back(std::move(again));
}

// Suspends the capture, and counts, for the operations inside of one that is done as a whole.
class Simulating {
 public:
  Simulating() : capturing_before_(capturing), before_(is_simulating) {
    capturing = 0;
    is_simulating = true;
  }
  ~Simulating() {
    capturing = capturing_before_;
    is_simulating = before_;
  }

 private:
  int capturing_before_;
  bool before_;
};

Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype,
             std::optional<at::Layout>, std::optional<c10::Device>, std::optional<bool> pin,
             std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &device_allocator,
                                   c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<c10::Device>, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &device_allocator,
      c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                  std::optional<c10::SymInt> offset) {
  std::optional<int64_t> first;
  if (offset) first = offset->expect_int();
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size),
                                           C10_AS_INTARRAYREF_SLOW(stride), first);
}

Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size),
                                           C10_AS_INTARRAYREF_SLOW(stride), self.storage_offset());
}

Tensor view(const Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

Tensor& copy(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.numel() == 0 && source.numel() == 0) return self;
  if (source.is_cuda() && !self.is_cuda() && !(non_blocking && self.is_pinned())) {
    wait_for_device("copy to the host that waits");
  }
  if (!source.is_cuda() && self.is_cuda() && !(non_blocking && source.is_pinned())) {
    wait_for_device("copy from the host that is not asynchronous");
  }
  keep_contents(self);
  count_crossing(source.is_cuda(), self.is_cuda(), source.nbytes());
  on_host(self).copy_(on_host(source));
  note([self, source] { on_host(self).copy_(on_host(source)); });
  return self;
}

at::Scalar local_scalar(const Tensor& self) {
  wait_for_device("item");
  count_crossing(true, false, self.nbytes());
  return on_host(self).item();
}

const Tensor& resize(const Tensor& self, c10::SymIntArrayRef size,
                     std::optional<at::MemoryFormat>) {
  const auto wanted = C10_AS_INTARRAYREF_SLOW(size);
  if (self.sizes() == wanted) return self;
  const Tensor made = at::empty(wanted, self.options());
  const int64_t kept = std::min<int64_t>(self.numel(), made.numel());
  if (kept > 0) {
    std::memcpy(made.mutable_data_ptr(), self.data_ptr(), kept * self.element_size());
  }
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(made.storage());
  self.unsafeGetTensorImpl()->set_sizes_contiguous(wanted);
  return self;
}

Tensor& set_storage(Tensor& self, c10::Storage storage, c10::SymInt offset,
                    c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  const auto strides = C10_AS_INTARRAYREF_SLOW(stride);
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  impl->set_storage_offset(offset.expect_int());
  if (strides.data() == nullptr || strides.size() != sizes.size()) {
    impl->set_sizes_contiguous(sizes);
  } else {
    impl->set_sizes_and_strides(sizes, strides);
  }
  return self;
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  const auto sizes = source.sizes().vec(), strides = source.strides().vec();
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source.storage());
  impl->set_storage_offset(source.storage_offset());
  impl->set_sizes_and_strides(sizes, strides);
  return self;
}

Tensor& set_whole_storage(Tensor& self, c10::Storage storage) {
  const int64_t count = static_cast<int64_t>(storage.nbytes() / self.element_size());
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(0);
  impl->set_sizes_contiguous({count});
  return self;
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool) {
  count_crossing(self.is_cuda(), to.is_cuda(), self.nbytes());
  on_host(to).copy_(on_host(self));
  return to;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  if (to.sizes() != self.sizes()) to.resize_(self.sizes());
  on_host(to).copy_(on_host(self));
  return to;
}

bool is_pinned(const Tensor&, std::optional<c10::Device>) { return false; }

// A tensor of the device over the host tensor's memory, which may be shared with another process.
Tensor as_device(const Tensor& host) {
  struct Kept {
    Tensor tensor;
    const void* address;
  };
  void* address = host.data_ptr();
  {
    const std::lock_guard<std::mutex> lock(mutex);
    device_memory[address] = host.nbytes();
  }
  const auto release = [](void* kept) {
    auto* own = static_cast<Kept*>(kept);
    {
      const std::lock_guard<std::mutex> lock(mutex);
      device_memory.erase(own->address);
    }
    delete own;
  };
  c10::DataPtr data(address, new Kept{host, address}, release, the_device());
  c10::Storage storage(c10::Storage::use_byte_size_t(), host.nbytes(), std::move(data));
  Tensor made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA), host.dtype());
  made.unsafeGetTensorImpl()->set_sizes_contiguous(host.sizes());
  return made;
}

// Whether the operation takes indices of the host with tensors of the device.
bool may_mix(const std::string& name) {
  return name == "aten::index" || name.rfind("aten::index_put", 0) == 0 ||
         name.rfind("aten::_index_put", 0) == 0 || name == "aten::copy_" || name == "aten::set_";
}

// Whether the operation waits for the device.
bool waits(const std::string& name) {
  static const std::set<std::string> names = {
      "aten::nonzero",  "aten::masked_select", "aten::equal",         "aten::unique_dim",
      "aten::_unique2", "aten::is_nonzero",    "aten::_assert_async",
  };
  return names.count(name) > 0;
}

// Calls `look` with each tensor among the values.
template <typename Look>
void each_tensor(const std::vector<c10::IValue>& values, const Look& look) {
  for (const c10::IValue& value : values) {
    if (value.isTensor()) {
      look(value.toTensor());
    } else if (value.isTensorList()) {
      for (const Tensor& tensor : value.toTensorList()) look(tensor);
    } else if (value.isOptionalTensorList()) {
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorList()) {
        if (tensor) look(*tensor);
      }
    }
  }
}

std::vector<Tensor> tensors_of(const std::vector<c10::IValue>& values) {
  std::vector<Tensor> found;
  each_tensor(values, [&](const Tensor& tensor) { found.push_back(tensor); });
  return found;
}

// Repeats a recorded operation: reads the memory of its arguments, and writes that of its results.
void again(const c10::OperatorHandle& operation, const std::vector<c10::IValue>& arguments,
           const std::vector<Tensor>& results) {
  torch::jit::Stack stack(arguments.begin(), arguments.end());
  at::native::cpu_fallback(operation, &stack);
  const std::vector<Tensor> made = tensors_of({stack.begin(), stack.end()});
  for (size_t i = 0; i < made.size(); ++i) {
    const bool is_elsewhere =
        made[i].defined() && results[i].numel() > 0 && made[i].data_ptr() != results[i].data_ptr();
    if (is_elsewhere) on_host(results[i]).copy_(on_host(made[i]));
  }
}

void fallback(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  const std::string name = operation.operator_name().name;
  const size_t count = operation.schema().arguments().size();
  const std::vector<c10::IValue> arguments(stack->end() - static_cast<int64_t>(count),
                                           stack->end());
  bool on_device = false, elsewhere = false;
  each_tensor(arguments, [&](const Tensor& tensor) {
    if (!tensor.defined()) return;
    on_device |= tensor.is_cuda();
    elsewhere |= tensor.is_cpu() && tensor.dim() > 0;
  });
  TORCH_CHECK(!(on_device && elsewhere) || may_mix(name),
              "Expected all tensors to be on the same device, but found at least two devices, "
              "cuda:0 and cpu! (",
              name, ")");
  if (waits(name)) wait_for_device(name.c_str());
  each_tensor(arguments, [&](const Tensor& tensor) {  // indices, which a GPU gets copied
    if (on_device && tensor.defined() && tensor.is_cpu() && tensor.dim() > 0) {
      count_crossing(false, true, tensor.nbytes());
    }
  });
  for (size_t i = 0; i < count && capturing != 0; ++i) {
    const auto* alias = operation.schema().arguments()[i].alias_info();
    if (alias == nullptr || !alias->isWrite()) continue;
    each_tensor({arguments[i]}, keep_contents);
  }
  {
    const Simulating inside;
    at::native::cpu_fallback(operation, stack);
  }
  if (capturing == 0) return;
  const size_t num_results = operation.schema().returns().size();
  const std::vector<Tensor> results =
      tensors_of({stack->end() - static_cast<int64_t>(num_results), stack->end()});
  note([operation, arguments, results] { again(operation, arguments, results); });
}

}  // namespace

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
}
REGISTER_ALLOCATOR(c10::DeviceType::CUDA, &device_allocator)
namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)
}
TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("view", view);
  m.impl("copy_", copy);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("is_pinned", is_pinned);
}
TORCH_LIBRARY(simulated_gpu, m) { m.def("as_device(Tensor host) -> Tensor", as_device); }

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED void simulated_set_stream(int64_t stream) { current_stream = stream; }
EXPORTED int64_t simulated_stream() { return current_stream; }
EXPORTED void simulated_begin_capture(int64_t graph) {
  graph_being_captured = graph;
  capturing = 1;
}
EXPORTED void simulated_end_capture() {
  capturing = 0;
  const c10::InferenceMode mode;
  for (auto each = overwritten.rbegin(); each != overwritten.rend(); ++each) {
    on_host(each->first).copy_(each->second);
  }
  overwritten.clear();
}
EXPORTED int64_t simulated_num_recorded(int64_t graph) {
  const std::lock_guard<std::mutex> lock(mutex);
  return static_cast<int64_t>(recorded[graph].size());
}
// Repeats the recorded operations [first, end). Returns the error's text, empty on success.
EXPORTED const char* simulated_replay(int64_t graph, int64_t first, int64_t end) {
  static thread_local std::string error;
  error.clear();
  std::vector<std::function<void()>> calls;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto& all = recorded[graph];
    calls.assign(all.begin() + first, all.begin() + end);
  }
  try {
    const c10::InferenceMode mode;
    const Simulating inside;
    for (const auto& call : calls) call();
  } catch (const std::exception& caught) {
    error = caught.what();
  }
  return error.c_str();
}
EXPORTED void simulated_forget_graph(int64_t graph) {
  std::vector<std::function<void()>> calls;  // destroyed after the lock: it frees tensors
  const std::lock_guard<std::mutex> lock(mutex);
  calls.swap(recorded[graph]);
  recorded.erase(graph);
}
EXPORTED void simulated_register(const void* address, size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex);
  pinned_memory[address] = bytes;
}
EXPORTED int simulated_unregister(const void* address) {
  const std::lock_guard<std::mutex> lock(mutex);
  return pinned_memory.erase(address) > 0 ? 0 : 713;  // cudaErrorHostMemoryNotRegistered
}
// Bytes copied to the device since the program began, or from it.
EXPORTED int64_t simulated_crossed(int to_device) { return to_device ? sent : received; }
// Bytes of tensors on the device, now or at most since `simulated_reset_peak`.
EXPORTED int64_t simulated_memory(int most) { return most ? peak : allocated; }
EXPORTED void simulated_reset_peak() { peak = allocated.load(); }
EXPORTED int simulated_is_device(const void* address) { return is_in(device_memory, address); }
