// What csrc/cuda/device/launch.h asks of the CUDA runtime, for which the functions below stand in:
// no GPU and no driver are needed. Exits with 0 if all is as it should be, else says what is not.

#include <cstdio>
#include <set>
#include <utility>

#include "cuda/device/launch.h"

namespace {

int device = 0;
int compiled_for = 90;  // the architecture of every kernel's code
int major = 9;          // of every device
int num_set = 0, num_asked = 0, num_launched = 0;
unsigned num_attributes = 0;  // of the last launch
int num_wrong = 0;

void expect(bool is_right, const char* what) {
  if (is_right) return;
  std::printf("wrong: %s\n", what);
  ++num_wrong;
}

template <int kIndex>
void kernel(int) {}

}  // namespace

extern "C" {

cudaError_t cudaGetDevice(int* current) {
  *current = device;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor ? major : 0;
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  ++num_asked;
  *attributes = {};
  attributes->ptxVersion = compiled_for;
  attributes->binaryVersion = 10 * major;
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute attribute, int) {
  if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) ++num_set;
  return cudaSuccess;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void*, void**) {
  ++num_launched;
  num_attributes = config->numAttrs;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorName(cudaError_t) { return "error"; }
const char* cudaGetErrorString(cudaError_t) { return "an error"; }

}  // extern "C"

namespace {

using namespace kvplane::cuda;

template <int kIndex>
unsigned attributes_of_launch(Begins begins) {
  launch_when<&kernel<kIndex>>(begins, {1}, 32, 0, 0, 7);
  return num_attributes;
}

void kernels_begin_early_only_in_code_that_waits() {
  expect(attributes_of_launch<0>(Begins::kEarly) == 1, "code for sm_90 begins early");
  expect(attributes_of_launch<0>(Begins::kInOrder) == 0, "a kernel that is to begin in order");
  compiled_for = 80;
  expect(attributes_of_launch<1>(Begins::kEarly) == 0, "PTX of sm_80 on sm_90 begins in order");
  compiled_for = 100;
  expect(attributes_of_launch<2>(Begins::kEarly) == 1, "code for sm_100 begins early");
  const int before = num_asked;
  for (int i = 0; i < 10; ++i) attributes_of_launch<2>(Begins::kEarly);
  expect(num_asked == before, "a kernel's code is asked about once for a device");
}

void shared_memory_is_allowed_once_for_a_device() {
  constexpr size_t kLarge = 100 * 1024;
  const auto launch_with = [](size_t bytes) { launch<&kernel<3>>({1}, 32, bytes, 0, 7); };
  launch_with(kSharedBytesForAll);
  expect(num_set == 0, "what every kernel may have is not asked for");
  for (int i = 0; i < 10; ++i) launch_with(kLarge);
  expect(num_set == 1, "once for ten launches");
  device = 1;
  for (int i = 0; i < 10; ++i) launch_with(kLarge);
  expect(num_set == 2, "once for another device");
  launch_with(kLarge + 1);
  expect(num_set == 3, "again for more");
  device = 0;
  launch_with(kLarge);
  expect(num_set == 3, "the first device has not forgotten");
}

void an_empty_grid_is_not_launched() {
  const int before = num_launched;
  launch<&kernel<4>>({0}, 32, 0, 0, 7);
  expect(num_launched == before, "an empty grid is launched");
}

}  // namespace

int main() {
  kernels_begin_early_only_in_code_that_waits();
  shared_memory_is_allowed_once_for_a_device();
  an_empty_grid_is_not_launched();
  return num_wrong == 0 ? 0 : 1;
}
