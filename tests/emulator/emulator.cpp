// The emulator's scheduler, collectives and asynchronous copies.
//
//   runnable ──► waits for its warp's collective ──► runnable ...
//            ──► waits for the block's barrier   ──► runnable ...
//            ──► finished
//
// The scheduler resumes one runnable thread after another; the last thread to arrive at a
// collective or a barrier completes it and makes the others runnable. If no thread is runnable and
// some are not finished, that is a deadlock. Compiled without ThreadSanitizer; annotations tell it
// of the order.

#include "emulator.h"

#include <cxxabi.h>

#include <algorithm>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <new>
#include <random>
#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

#include "fiber.h"

#if defined(KVPLANE_WATCH_RACES)
extern "C" {
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void __tsan_read_range(void* address, unsigned long bytes);
void __tsan_write_range(void* address, unsigned long bytes);
}
#else
#define __tsan_acquire(address) static_cast<void>(address)
#define __tsan_release(address) static_cast<void>(address)
#define __tsan_read_range(address, bytes) static_cast<void>(address)
#define __tsan_write_range(address, bytes) static_cast<void>(address)
#endif

namespace kvplane::emulator {

Builtins builtins;
int64_t num_copied_bytes = 0;

namespace {

constexpr unsigned char kPoison = 0xFF;  // a NaN in every floating-point type, -1 as an integer
constexpr size_t kSharedAlignment = 128;

enum class Status { kRunnable, kInCollective, kAtBarrier, kFinished };

struct Copy {
  void* destination;
  const void* source;
  size_t bytes;
  size_t source_bytes;
};

// A completed collective whose result some lanes have yet to read.
struct Exchange {
  Slot got[kWarpSize];
  int num_readers = 0;
};

struct Thread {
  Fiber fiber;
  Builtins builtins;
  int64_t num_copied_bytes = 0;
  Status status = Status::kFinished;
  int index = 0;
  unsigned num_barriers = 0;
  unsigned num_warp_barriers = 0;
  bool has_waited = false;  // for the kernel before
  // The collective or barrier that the thread waits for.
  const char* name = "";
  Site site = {};
  unsigned mask = 0;
  Slot given;
  Exchange* exchange = nullptr;
  // The copies of the open group, and the groups in flight.
  std::vector<Copy> open_group;
  std::deque<std::vector<Copy>> groups;
};

struct Warp {
  unsigned priority = 0;
  unsigned first_lane = 0;  // lanes run in this order: first_lane, first_lane + 1, ... around
  // Their addresses identify the warp's barriers to ThreadSanitizer: even and odd ones of all
  // lanes, and those of some lanes. Two alternate, so that a thread that leaves one is not ordered
  // after what others do before the next.
  char order[3] = {};
  std::vector<std::unique_ptr<Exchange>> exchanges;
};

void free_shared(unsigned char* memory) {
  operator delete[](memory, std::align_val_t{kSharedAlignment});
}

// The threads that run a block. Two crews alternate, so that ThreadSanitizer sees no order between
// a block and the next.
struct Crew {
  std::vector<std::unique_ptr<Thread>> threads;
  std::vector<Warp> warps;
  std::unique_ptr<unsigned char[], void (*)(unsigned char*)> shared{nullptr, &free_shared};
  // Their addresses identify the start, the end, and the even and odd barriers to ThreadSanitizer.
  char start = 0, end = 0;
  char barriers[2] = {};
};

std::mutex one_launch;
constexpr size_t kMostLaunched = 256;
std::deque<const std::type_info*> launched;  // the latest launches, each by its call's type
std::mt19937_64 random_bits;
// Launches use the two pairs in turn, so that a kernel that begins early has no order with the one
// before that comes from the fibers.
Crew crews[2][2];
char fences = 0;

// The state of the running launch.
Crew* pair = crews[0];
bool begins_early = false;
bool lets_next_begin = false;
Crew* crew = nullptr;
int num_threads = 0;
Thread* running = nullptr;
std::deque<std::function<void()>> bodies;  // of the launches that are not finished
const std::function<void()>* body = nullptr;
std::string failure;

std::string place(Site site) {
  const char* slash = std::strrchr(site.file, '/');
  return std::string(slash == nullptr ? site.file : slash + 1) + ":" + std::to_string(site.line);
}

std::string name_of(const Thread& thread) {
  return "thread " + std::to_string(thread.index) + " of block (" +
         std::to_string(thread.builtins.block.x) + ", " + std::to_string(thread.builtins.block.y) +
         ")";
}

void pause(Status status) {
  running->status = status;
  running->fiber.yield();
}

[[noreturn]] void fail_with(const std::string& what) {
  failure = what;
  running->fiber.yield();  // The scheduler never resumes this thread.
  __builtin_unreachable();
}

void land(const Copy& copy) {
  const unsigned char* there = static_cast<const unsigned char*>(copy.destination);
  const auto is_poison = [](unsigned char byte) { return byte == kPoison; };
  if (!std::all_of(there, there + copy.bytes, is_poison)) {
    fail("something was written where an asynchronous copy arrives");
  }
  __tsan_write_range(copy.destination, copy.bytes);
  if (copy.source_bytes > 0) {
    __tsan_read_range(const_cast<void*>(copy.source), copy.source_bytes);
  }
  unsigned char* to = static_cast<unsigned char*>(copy.destination);
  const unsigned char* from = static_cast<const unsigned char*>(copy.source);
  for (size_t i = 0; i < copy.bytes; ++i) to[i] = i < copy.source_bytes ? from[i] : 0;
}

void run_thread() {
  __tsan_acquire(&crew->start);
  (*body)();
  __tsan_release(&crew->end);
  pause(Status::kFinished);
}

void draw_priorities() {
  for (Warp& warp : crew->warps) {
    warp.priority = static_cast<unsigned>(random_bits());
    warp.first_lane = static_cast<unsigned>(random_bits() % kWarpSize);
  }
}

Thread* lane_of(int warp, int lane) {
  const int index = warp * kWarpSize + lane;
  return index < num_threads ? crew->threads[static_cast<size_t>(index)].get() : nullptr;
}

// The next thread to run: a runnable lane of the warp of the highest priority that has one.
Thread* choose() {
  Thread* best = nullptr;
  unsigned best_priority = 0;
  for (size_t w = 0; w < crew->warps.size(); ++w) {
    const Warp& warp = crew->warps[w];
    if (best != nullptr && warp.priority <= best_priority) continue;
    for (unsigned i = 0; i < kWarpSize; ++i) {
      Thread* thread = lane_of(static_cast<int>(w), (warp.first_lane + i) % kWarpSize);
      if (thread == nullptr || thread->status != Status::kRunnable) continue;
      best = thread;
      best_priority = warp.priority;
      break;
    }
  }
  return best;
}

std::string describe_deadlock() {
  std::string text = "deadlock:";
  for (int i = 0; i < num_threads; ++i) {
    const Thread& thread = *crew->threads[static_cast<size_t>(i)];
    const bool finished = thread.status == Status::kFinished;
    const Thread* last = i > 0 ? crew->threads[static_cast<size_t>(i - 1)].get() : nullptr;
    const bool as_before = last != nullptr && last->status == thread.status &&
                           (finished || last->site.line == thread.site.line);
    if (as_before) continue;
    text += " " + name_of(thread) + (i + 1 < num_threads ? " and on " : " ");
    text += finished ? "finished;"
                     : "wait in " + std::string(thread.name) + " at " + place(thread.site) + ";";
  }
  return text;
}

void prepare_crew(Index block_size, size_t shared_bytes) {
  const size_t count = block_size.x;
  while (crew->threads.size() < count) crew->threads.push_back(std::make_unique<Thread>());
  crew->warps.resize((count + kWarpSize - 1) / kWarpSize);
  // Exactly this size, so that AddressSanitizer sees an overrun.
  crew->shared.reset(static_cast<unsigned char*>(operator new[](
      shared_bytes, std::align_val_t{kSharedAlignment})));
  for (size_t i = 0; i < shared_bytes; ++i) crew->shared[i] = kPoison;
}

void run_block(Index block, Index block_size, Index grid_size, size_t shared_bytes) {
  __tsan_acquire(&crew->end);
  prepare_crew(block_size, shared_bytes);
  for (int i = 0; i < num_threads; ++i) {
    Thread& thread = *crew->threads[static_cast<size_t>(i)];
    thread.builtins = {{static_cast<unsigned>(i), 0, 0}, block, block_size, grid_size};
    thread.status = Status::kRunnable;
    thread.index = i;
    thread.num_barriers = thread.num_warp_barriers = 0;
    thread.has_waited = false;
    thread.open_group.clear();
    thread.groups.clear();
    thread.fiber.reset(&run_thread);
  }
  draw_priorities();
  __tsan_release(&crew->start);
  for (Thread* thread = choose(); thread != nullptr; thread = choose()) {
    running = thread;
    builtins = thread->builtins;
    thread->fiber.resume();
    if (!failure.empty()) throw EmulationError(std::exchange(failure, {}));
  }
  for (int i = 0; i < num_threads; ++i) {
    const Thread& thread = *crew->threads[static_cast<size_t>(i)];
    if (thread.status != Status::kFinished) throw EmulationError(describe_deadlock());
    if (begins_early && !thread.has_waited) {
      throw EmulationError(name_of(thread) +
                           " began early and has not waited for the kernel before");
    }
  }
}

// Completes the collective of the running thread if all lanes of its mask have arrived.
bool try_to_complete(Combine combine) {
  const int warp = running->index / kWarpSize;
  const unsigned mask = running->mask;
  Slot given[kWarpSize];
  for (int lane = 0; lane < kWarpSize; ++lane) {
    if (!(mask >> lane & 1)) continue;
    const Thread* thread = lane_of(warp, lane);
    if (thread == nullptr || thread->status != Status::kInCollective) return false;
    given[lane] = thread->given;
  }
  std::vector<std::unique_ptr<Exchange>>& exchanges =
      crew->warps[static_cast<size_t>(warp)].exchanges;
  Exchange* exchange = nullptr;
  for (const auto& old : exchanges) {
    if (old->num_readers == 0) exchange = old.get();
  }
  if (exchange == nullptr) {
    exchanges.push_back(std::make_unique<Exchange>());
    exchange = exchanges.back().get();
  }
  // Not directly into the exchange: ThreadSanitizer watches `combine`, and sees no order between
  // one use of an exchange and the next.
  Slot got[kWarpSize] = {};
  if (combine != nullptr) combine(given, mask, got);
  for (int lane = 0; lane < kWarpSize; ++lane) {
    if (!(mask >> lane & 1)) continue;
    Thread* thread = lane_of(warp, lane);
    exchange->got[lane] = got[lane];
    thread->exchange = exchange;
    thread->status = Status::kRunnable;
    ++exchange->num_readers;
  }
  return true;
}

// The lanes of a warp that wait in a collective must wait in this one.
void check_peers() {
  const int warp = running->index / kWarpSize;
  const int own_lane = running->index % kWarpSize;
  if (!(running->mask >> own_lane & 1)) {
    fail_with(name_of(*running) + " calls " + running->name + " at " + place(running->site) +
              " with a mask that leaves it out");
  }
  for (int lane = 0; lane < kWarpSize; ++lane) {
    if (lane == own_lane || !(running->mask >> lane & 1)) continue;
    const Thread* peer = lane_of(warp, lane);
    const bool waits = peer != nullptr && (peer->status == Status::kInCollective ||
                                           peer->status == Status::kAtBarrier);
    const bool gone = peer == nullptr || peer->status == Status::kFinished;
    const bool here = waits && peer->status == Status::kInCollective &&
                      peer->site.line == running->site.line && peer->name == running->name &&
                      peer->mask == running->mask;
    if (gone || (waits && !here)) {
      fail_with(
          "divergence: " + name_of(*running) + " calls " + running->name + " at " +
          place(running->site) + " while lane " + std::to_string(lane) +
          (gone ? " is gone" : " is in " + std::string(peer->name) + " at " + place(peer->site)));
    }
  }
}

}  // namespace

void set_seed(uint64_t seed) { random_bits.seed(seed); }

void finish() {
  for (auto& each : crews) {
    for (Crew& one : each) __tsan_acquire(&one.end);
  }
  bodies.clear();
}

void launch(Index grid_size, Index block_size, size_t shared_bytes, std::function<void()> thread,
            bool is_early) {
  const std::lock_guard<std::mutex> lock(one_launch);
  if (block_size.x == 0 || block_size.x > 1024 || block_size.y != 1 || block_size.z != 1) {
    throw EmulationError("a block must have 1 to 1024 threads in one dimension");
  }
  if (grid_size.x == 0 || grid_size.y == 0 || grid_size.z == 0) {
    throw EmulationError("a grid must have at least one block");
  }
  launched.push_back(&thread.target_type());
  if (launched.size() > kMostLaunched) launched.pop_front();
  if (!is_early) finish();
  pair = pair == crews[0] ? crews[1] : crews[0];
  begins_early = is_early;
  lets_next_begin = false;
  bodies.push_back(std::move(thread));
  body = &bodies.back();
  num_threads = static_cast<int>(block_size.x);
  int turn = 0;
  for (unsigned z = 0; z < grid_size.z; ++z) {
    for (unsigned y = 0; y < grid_size.y; ++y) {
      for (unsigned x = 0; x < grid_size.x; ++x) {
        crew = &pair[turn++ % 2];
        run_block({x, y, z}, block_size, grid_size, shared_bytes);
      }
    }
  }
  if (!lets_next_begin) finish();
}

void fail(const char* what, Site site) {
  fail_with(name_of(*running) + ": " + what + " at " + place(site));
}

unsigned char* dynamic_shared() { return crew->shared.get(); }

int lane_index() { return running->index % kWarpSize; }

void sync_threads(Site site) {
  running->name = "__syncthreads";
  running->site = site;
  running->status = Status::kAtBarrier;
  char* order = &crew->barriers[running->num_barriers++ % 2];
  __tsan_release(order);
  bool all_here = true;
  for (int i = 0; i < num_threads; ++i) {
    const Thread& other = *crew->threads[static_cast<size_t>(i)];
    const bool waits = other.status == Status::kAtBarrier;
    if (other.status == Status::kFinished || (waits && other.site.line != site.line)) {
      fail_with("divergence: " + name_of(*running) + " is in __syncthreads at " + place(site) +
                " while thread " + std::to_string(i) +
                (waits ? " is in the one at " + place(other.site) : " is gone"));
    }
    all_here = all_here && waits;
  }
  if (all_here) {
    for (int i = 0; i < num_threads; ++i) {
      crew->threads[static_cast<size_t>(i)]->status = Status::kRunnable;
    }
    draw_priorities();
  }
  running->fiber.yield();
  __tsan_acquire(order);
}

void sync_warp(unsigned mask, Site site) {
  Warp& warp = crew->warps[static_cast<size_t>(running->index / kWarpSize)];
  char* order = &warp.order[mask == kAllLanes ? running->num_warp_barriers++ % 2 : 2];
  __tsan_release(order);
  collective("__syncwarp", mask, {}, nullptr, site);
  __tsan_acquire(order);
}

Slot collective(const char* name, unsigned mask, const Slot& given, Combine combine, Site site) {
  running->name = name;
  running->site = site;
  running->mask = mask;
  running->given = given;
  check_peers();
  running->status = Status::kInCollective;
  if (!try_to_complete(combine)) running->fiber.yield();
  --running->exchange->num_readers;
  return running->exchange->got[lane_index()];
}

unsigned ballot(unsigned mask, bool predicate, Site site) {
  const Combine combine = [](const Slot* given, unsigned lanes, Slot* got) {
    unsigned votes = 0;
    for (int lane = 0; lane < kWarpSize; ++lane) {
      if ((lanes >> lane & 1) && given[lane].as<bool>()) votes |= 1u << lane;
    }
    for (int lane = 0; lane < kWarpSize; ++lane) got[lane] = Slot::of(votes);
  };
  return collective("__ballot_sync", mask, Slot::of(predicate), combine, site).as<unsigned>();
}

void wait_for_kernel_before() {
  running->has_waited = true;
  if (!begins_early) return;
  const Crew* before = pair == crews[0] ? crews[1] : crews[0];
  for (int i = 0; i < 2; ++i) __tsan_acquire(const_cast<char*>(&before[i].end));
}

void let_next_kernel_begin() { lets_next_begin = true; }

void fence() {
  __tsan_release(&fences);
  __tsan_acquire(&fences);
}

void copy_async(void* destination, const void* source, size_t bytes, size_t source_bytes,
                Site site) {
  const uintptr_t addresses =
      reinterpret_cast<uintptr_t>(destination) |
      (source_bytes > 0 ? reinterpret_cast<uintptr_t>(source) : uintptr_t{0});
  if (addresses % bytes != 0) fail("an asynchronous copy is not aligned", site);
  __tsan_write_range(destination, bytes);
  unsigned char* to = static_cast<unsigned char*>(destination);
  for (size_t i = 0; i < bytes; ++i) to[i] = kPoison;
  num_copied_bytes += static_cast<int64_t>(source_bytes);
  running->open_group.push_back({destination, source, bytes, source_bytes});
}

void commit_copies() {
  running->groups.push_back(std::move(running->open_group));
  running->open_group.clear();
}

void wait_for_copies(int num_groups_left) {
  while (running->groups.size() > static_cast<size_t>(num_groups_left)) {
    for (const Copy& copy : running->groups.front()) land(copy);
    running->groups.pop_front();
  }
}

}  // namespace kvplane::emulator

// For tests, which find it by name in the library: the launches since the last call of it, the
// latest 256 at most, one a line. A line holds the kernel's name and template arguments.
extern "C" __attribute__((visibility("default"))) const char* kvplane_launched_kernels() {
  using namespace kvplane::emulator;
  static std::string lines;
  const std::lock_guard<std::mutex> lock(one_launch);
  lines.clear();
  for (const std::type_info* type : launched) {
    int status = 0;
    char* const name = abi::__cxa_demangle(type->name(), nullptr, nullptr, &status);
    lines += status == 0 ? name : type->name();
    lines += '\n';
    std::free(name);
  }
  launched.clear();
  return lines.c_str();
}
