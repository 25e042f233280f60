// The data plane's end: the layers of a plan that a client asks for by packets that are known.
//
// Nothing that a client sends is read but to compare it with the packet that is expected next. What
// is run for that packet was checked and bound beforehand, in Python.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sys/epoll.h>

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bound_layers.h"
#include "local/packets.h"

namespace kvplane {

class ServedLayers {
 public:
  ServedLayers(int fd, double spin_s, double most_s)
      : socket_(fd), spin_(spin_s), most_s_(most_s) {}

  // Expect these layers from now on; none of the present plan yet.
  void clear() {
    layers_.clear();
    end();
  }

  void add(std::string packet, std::string answer, const BoundLayer& layer, uintptr_t query,
           uintptr_t key, uintptr_t value, uintptr_t out) {
    layers_.push_back({std::move(packet), std::move(answer), &layer, query, key, value, out});
  }

  // A plan's layers may come, from number `next` on.
  void begin(const std::vector<const BoundBatch*>& batches, size_t next, int num_threads) {
    batches_ = batches;
    next_ = next;
    num_threads_ = num_threads;
  }

  // No layer may come.
  void end() { batches_.clear(); }

  // Run and answer layers as their packets come, until there is none, something else waits at
  // `epoll`, or `most_s` are over. `waits`: look for them for a while. Returns a packet that is
  // not the next layer's, which the caller answers.
  std::optional<std::string> serve(int epoll, bool waits) {
    const double end = now_s() + most_s_;
    int num_looks = 0;
    bool has_packet = false;
    const auto find = [&] {
      has_packet = socket_.receive();
      return has_packet || (++num_looks % kLooksBetweenOthers == 0 && others_wait(epoll));
    };
    do {
      if (!(waits ? spin_.look(find) : find()) || !has_packet || socket_.error() != 0) break;
      if (!run_next()) return socket_.packet();
      if (socket_.error() != 0) break;
    } while (waits && now_s() < end && !others_wait(epoll));
    return std::nullopt;
  }

  int error() const { return socket_.error(); }

  // Of the layers that were run since the last call: seconds that writing and attending took.
  std::vector<std::pair<double, double>> take_times() { return std::exchange(times_, {}); }

 private:
  static constexpr int kLooksBetweenOthers = 8;

  struct Layer {
    std::string packet;
    std::string answer;
    const BoundLayer* layer;
    uintptr_t query;
    uintptr_t key;
    uintptr_t value;
    uintptr_t out;
  };

  // Whether the packet was the next layer's.
  bool run_next() {
    if (next_ >= batches_.size() || !socket_.is(layers_[next_].packet)) return false;
    const Layer& layer = layers_[next_];
    const double began = now_s();
    double write_s = 0;
    try {
      write_s = layer.layer->write_and_attend(*batches_[next_], layer.query, layer.key, layer.value,
                                              layer.out, num_threads_);
    } catch (const std::exception&) {
      return false;  // The caller runs it again, and says what is wrong.
    }
    times_.emplace_back(write_s, now_s() - began - write_s);
    ++next_;
    socket_.send_now(layer.answer);
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
  Spin spin_;
  const double most_s_;
  std::vector<Layer> layers_;
  std::vector<const BoundBatch*> batches_;  // of the first layers; none while none may come
  size_t next_ = 0;
  int num_threads_ = 1;
  std::vector<std::pair<double, double>> times_;
};

}  // namespace kvplane
