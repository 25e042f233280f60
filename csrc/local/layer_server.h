// The data plane's end: serves the bound layers of a plan.
//
// A client binds a layer once, and each packet then names the binding, the plan and the pass. A
// layer was checked when it was bound, in Python. Whether it may run now is Python's decision too:
// `begin` says which layer of which plan and pass may run, and all after it until `serve` returns.
#pragma once

#include <poll.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sys/epoll.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bound_layers.h"
#include "local/packets.h"

namespace kvplane {

class LayerServer {
 public:
  LayerServer(int fd, double spin_s, double most_s) : socket_(fd), spin_(spin_s), most_s_(most_s) {}

  // Forgets all bindings, and the present plan.
  void clear() {
    layers_.clear();
    batches_.clear();
  }

  // Binds layer `index` of the shard, for batches of `num_tokens` of its layer group, in place of
  // an earlier layer of this binding.
  void bind(uint32_t binding, size_t index, size_t group, int64_t num_tokens,
            const BoundLayer& layer, uintptr_t query, uintptr_t key, uintptr_t value,
            uintptr_t out) {
    layers_[binding] = {index, group, num_tokens, &layer, query, key, value, out};
  }

  void unbind(uint32_t binding) { layers_.erase(binding); }

  // Lets the layers from number `next` on run, in their order and before number `end`. `batches`:
  // of each layer group. `named`: the end of their packets, which names the plan and the pass. All
  // other packets are left for `take`.
  void begin(const std::vector<const BoundBatch*>& batches, size_t next, size_t end,
             int num_threads, std::string named) {
    batches_ = batches;
    next_ = next;
    end_ = end;
    num_threads_ = num_threads;
    named_ = std::move(named);
  }

  // The binding of the layer that the packet found asks for, in the plan and pass that are named.
  std::optional<uint32_t> asks_for_layer(const std::string& named) const {
    return has_packet_ ? socket_.asks_for_layer(named) : std::nullopt;
  }

  // Returns whether there is a packet for `serve` or `take`. `waits`: wait for one, until something
  // else is ready at `epoll`.
  bool look(int epoll, bool waits) {
    if (has_packet_) return true;
    is_watching_ = false;
    if (waits) {
      find(epoll);
    } else {
      receive();
    }
    return has_packet_;
  }

  // Runs and answers the layer whose packet was found and, if this `waits`, those whose packets
  // come soon: before something else is ready at `epoll`, and before `most_s` are over. A packet
  // that is not the next layer's is left for `take`. The caller holds a lock that others wait for,
  // so this never sleeps, and does not poll for the packets of a slow client.
  void serve(int epoll, bool waits) {
    const double end_s = now_s() + most_s_;
    while (has_packet_ && run_next()) {
      if (!waits || socket_.error() != 0 || now_s() >= end_s || others_wait(epoll)) return;
      const double soon_s = gap_s_ <= kLongestGapS ? kGapsToLook * gap_s_ : 0;
      find_soon(epoll, std::min(end_s, now_s() + soon_s));
    }
  }

  // Returns the packet that was found and not served, for the caller to answer.
  std::optional<std::string> take() {
    if (!std::exchange(has_packet_, false)) return std::nullopt;
    return socket_.packet();
  }

  int error() const { return socket_.error(); }

  // Returns, for each layer that ran since the last call, its binding and the seconds to write and
  // to attend.
  std::vector<std::tuple<uint32_t, double, double>> take_ran() { return std::exchange(ran_, {}); }

 private:
  static constexpr int kLooksBetweenOthers = 8;
  static constexpr double kGapsToLook = 2;
  static constexpr double kLongestGapS = 0.0001;

  struct Layer {
    size_t index;
    size_t group;
    int64_t num_tokens;
    const BoundLayer* layer;
    uintptr_t query;
    uintptr_t key;
    uintptr_t value;
    uintptr_t out;
  };

  // Waits for a packet: polls for a while, then sleeps. All without the interpreter, which would
  // take longer than waking up this thread does.
  void find(int epoll) {
    if (find_soon(epoll, std::numeric_limits<double>::infinity())) return;
    while (!receive() && !others_wait(epoll)) {
      pollfd ready = {epoll, POLLIN, 0};  // a packet makes it ready too
      poll(&ready, 1, -1);
    }
  }

  // Polls for a packet for a while, until `end_s` of the monotonic clock at most. Returns whether
  // the caller has something to do.
  bool find_soon(int epoll, double end_s) {
    int num_looks = 0;
    return spin_.look(
        [&] { return receive() || (++num_looks % kLooksBetweenOthers == 0 && others_wait(epoll)); },
        end_s);
  }

  // Returns whether there is a packet, or an error.
  bool receive() {
    const bool found = socket_.receive();
    has_packet_ = found && socket_.error() == 0;
    if (found && answered_s_ > 0) {
      gap_s_ = now_s() - std::exchange(answered_s_, 0);
      // The packet came before this polled for it: its client may be a quick one.
      if (!is_watching_) gap_s_ = std::min(gap_s_, kLongestGapS);
    }
    is_watching_ = true;
    return found;
  }

  // Runs and answers the next layer, if the packet asks for it. Returns whether it did.
  bool run_next() {
    const std::optional<uint32_t> binding = socket_.asks_for_layer(named_);
    if (!binding || next_ >= end_) return false;
    const auto found = layers_.find(*binding);
    if (found == layers_.end() || found->second.index != next_) return false;
    const Layer& layer = found->second;
    const BoundBatch& batch = *batches_.at(layer.group);
    if (batch.num_tokens != layer.num_tokens || !layer.layer->fits(batch)) return false;
    const double began = now_s();
    double write_s = 0;
    try {
      write_s = layer.layer->write_and_attend(batch, layer.query, layer.key, layer.value, layer.out,
                                              num_threads_);
    } catch (const std::exception&) {
      return false;  // The caller runs it again, and reports what is wrong.
    }
    ran_.emplace_back(*binding, write_s, now_s() - began - write_s);
    ++next_;
    has_packet_ = false;
    const LayerHead answer = {0, kLayerKind, 0, *binding};
    socket_.send_now(std::string(reinterpret_cast<const char*>(&answer), sizeof answer));
    answered_s_ = now_s();
    return true;
  }

  bool others_wait(int epoll) const {
    epoll_event events[2];
    const int num = epoll_wait(epoll, events, 2, 0);
    for (int i = 0; i < num; ++i) {
      if (events[i].data.fd != socket_.fd()) return true;
    }
    return false;
  }

  PacketSocket socket_;
  bool has_packet_ = false;  // in the socket's buffer, neither served nor taken
  Spin spin_;
  const double most_s_;
  std::unordered_map<uint32_t, Layer> layers_;
  std::vector<const BoundBatch*> batches_;
  size_t next_ = 0;
  size_t end_ = 0;
  int num_threads_ = 1;
  std::string named_;
  double answered_s_ = 0;     // when the last layer was; 0 once its client sent another packet
  bool is_watching_ = false;  // since that answer, or since the caller asked again
  double gap_s_ = 2 * kLongestGapS;  // from the last answer to the packet that came after it
  std::vector<std::tuple<uint32_t, double, double>> ran_;
};

}  // namespace kvplane
