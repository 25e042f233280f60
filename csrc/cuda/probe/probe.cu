// Each step is a struct with its input, its output and its code. A step of a thread has an input
// for each thread; a step of a warp has one for all lanes, each of which uses a part of it.

#include <cstring>
#include <stdexcept>
#include <string>

#include "cuda/attention/batch.cuh"
#include "cuda/device/eight_bits.cuh"
#include "cuda/device/launch.h"
#include "cuda/device/ptx.cuh"
#include "cuda/probe/probe.h"

namespace kvplane::cuda {
namespace {

constexpr int kThreads = 128;

struct FloatPair {
  float low, high;
};
struct Four {
  uint32_t part[4];
};

// Conversions of one number, to and from its bits.

template <typename T>
struct ToFloat {
  using In = T;
  using Out = float;
  static __device__ Out run(In in) { return to_float(in); }
};

template <typename T>
struct FromFloat {
  using In = float;
  using Out = T;
  static __device__ Out run(In in) { return from_float<T>(in); }
};

template <typename T>
struct Pack {
  using In = FloatPair;
  using Out = uint32_t;
  static __device__ Out run(In in) { return pack<T>(in.low, in.high); }
};

struct Exp2 {
  using In = float;
  using Out = float;
  static __device__ Out run(In in) { return exp2_fast(in); }
};

// Four numbers of 8 bits: the pairs of bytes (0, 1), (2, 3), (0, 2) and (1, 3).
template <typename T>
struct ToHalves {
  using In = uint32_t;
  using Out = Four;
  static __device__ Out run(In in) {
    Out out;
    widen_pairs<T>(in, out.part[0], out.part[1]);
    widen_every_second<T>(in, out.part[2], out.part[3]);
    return out;
  }
};

// The same conversions without the instruction that newer devices have for them.
template <typename T>
struct ComputeHalves {
  using In = uint32_t;
  using Out = Four;
  static __device__ Out run(In in) {
    Out out;
    widen_pairs<T, false>(in, out.part[0], out.part[1]);
    widen_every_second<T, false>(in, out.part[2], out.part[3]);
    return out;
  }
};

// Steps of a warp.

struct Matrices {
  uint16_t row[32][8];  // four matrices of eight rows
};
struct Registers {
  Four lane[32];
};

template <bool kTransposed>
struct LoadMatrices {
  using In = Matrices;
  using Out = Registers;
  static constexpr size_t kSharedBytes = sizeof(In);
  static __device__ void run(const In& in, Out& out, unsigned char* shared, int lane) {
    uint16_t (&rows)[32][8] = reinterpret_cast<Matrices*>(shared)->row;
    for (int i = 0; i < 8; ++i) rows[lane][i] = in.row[lane][i];
    __syncwarp();
    if (kTransposed) {
      load_matrices_transposed(out.lane[lane].part, rows[lane]);
    } else {
      load_matrices(out.lane[lane].part, rows[lane]);
    }
  }
};

struct Transpose {
  struct In {
    uint32_t lane[32];
  };
  using Out = In;
  static constexpr size_t kSharedBytes = 0;
  static __device__ void run(const In& in, Out& out, unsigned char*, int lane) {
    out.lane[lane] = transpose(in.lane[lane]);
  }
};

template <typename T>
struct MultiplyAdd {
  struct Factors {
    float d[4];
    uint32_t a[4], b[2];
  };
  struct In {
    Factors lane[32];
  };
  struct Out {
    float lane[32][4];
  };
  static constexpr size_t kSharedBytes = 0;
  static __device__ void run(const In& in, Out& out, unsigned char*, int lane) {
    const Factors own = in.lane[lane];
    float d[4] = {own.d[0], own.d[1], own.d[2], own.d[3]};
    multiply_add<T>(d, own.a, own.b);
    for (int i = 0; i < 4; ++i) out.lane[lane][i] = d[i];
  }
};

// Copies 16 bytes for each lane; those of odd lanes are not wanted, and become zeros.
struct CopyAsync {
  struct In {
    Four lane[32];
  };
  using Out = In;
  static constexpr size_t kSharedBytes = sizeof(In);
  static __device__ void run(const In& in, Out& out, unsigned char* shared, int lane) {
    Four* copies = reinterpret_cast<Four*>(shared);
    copy_async_16(copies + lane, in.lane + lane, lane % 2 == 0);
    commit_copies();
    wait_for_copies<0>();
    __syncwarp();
    out.lane[31 - lane] = copies[31 - lane];
  }
};

template <typename Step>
__global__ void run_in_threads(const void* inputs, void* outputs, int64_t count) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  static_cast<typename Step::Out*>(outputs)[i] =
      Step::run(static_cast<const typename Step::In*>(inputs)[i]);
}

template <typename Step>
__global__ void run_in_warps(const void* inputs, void* outputs, int64_t) {
  KVPLANE_DYNAMIC_SHARED(unsigned char, shared);
  Step::run(static_cast<const typename Step::In*>(inputs)[blockIdx.x],
            static_cast<typename Step::Out*>(outputs)[blockIdx.x], shared,
            static_cast<int>(threadIdx.x));
}

using Run = void (*)(const void* inputs, void* outputs, int64_t count, uintptr_t stream);

template <typename Step>
void in_threads(const void* inputs, void* outputs, int64_t count, uintptr_t stream) {
  launch<&run_in_threads<Step>>({div_ceil<int64_t>(count, kThreads)}, kThreads, 0, stream, inputs,
                                outputs, count);
}

template <typename Step>
void in_warps(const void* inputs, void* outputs, int64_t count, uintptr_t stream) {
  launch<&run_in_warps<Step>>({count}, kLanesOfWarp, Step::kSharedBytes, stream, inputs, outputs,
                              count);
}

struct Named {
  const char* name;
  Run run;
};

constexpr Named kSteps[] = {
    {"half_to_float", &in_threads<ToFloat<Half>>},
    {"bfloat_to_float", &in_threads<ToFloat<Bfloat>>},
    {"e4m3_to_float", &in_threads<ToFloat<E4m3>>},
    {"e5m2_to_float", &in_threads<ToFloat<E5m2>>},
    {"float_to_half", &in_threads<FromFloat<Half>>},
    {"float_to_bfloat", &in_threads<FromFloat<Bfloat>>},
    {"float_to_e4m3", &in_threads<FromFloat<E4m3>>},
    {"float_to_e5m2", &in_threads<FromFloat<E5m2>>},
    {"pack_half", &in_threads<Pack<Half>>},
    {"pack_bfloat", &in_threads<Pack<Bfloat>>},
    {"exp2", &in_threads<Exp2>},
    {"e4m3_to_halves", &in_threads<ToHalves<E4m3>>},
    {"e5m2_to_halves", &in_threads<ToHalves<E5m2>>},
    {"e4m3_to_halves_computed", &in_threads<ComputeHalves<E4m3>>},
    {"e5m2_to_halves_computed", &in_threads<ComputeHalves<E5m2>>},
    {"load_matrices", &in_warps<LoadMatrices<false>>},
    {"load_matrices_transposed", &in_warps<LoadMatrices<true>>},
    {"transpose", &in_warps<Transpose>},
    {"multiply_add_half", &in_warps<MultiplyAdd<Half>>},
    {"multiply_add_bfloat", &in_warps<MultiplyAdd<Bfloat>>},
    {"copy_async", &in_warps<CopyAsync>},
};

}  // namespace

void probe(const char* name, const void* inputs, void* outputs, int64_t count, uintptr_t stream) {
  for (const Named& step : kSteps) {
    if (std::strcmp(step.name, name) == 0) return step.run(inputs, outputs, count, stream);
  }
  throw std::out_of_range("name must be that of a step, is " + std::string(name));
}

}  // namespace kvplane::cuda
