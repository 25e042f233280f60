// The client's end: a layer's tensors are copied to the region, its packet is sent, and its output
// copied from there.
#pragma once

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "local/packets.h"
#include "tensor_view.h"

namespace kvplane {

// Waits for answers on a socket.
class AnswerSocket {
 public:
  // Takes ownership of `own_fd`, a copy: another thread may close the original while this one
  // waits, and a file that is opened then may get the same number.
  AnswerSocket(int own_fd, double spin_s) : socket_(own_fd), spin_(spin_s) {}
  ~AnswerSocket() { close(socket_.fd()); }
  AnswerSocket(const AnswerSocket&) = delete;
  AnswerSocket& operator=(const AnswerSocket&) = delete;

  bool send(const std::string& packet) { return socket_.send_now(packet); }

  // Polls for a packet or an error for a while. Returns whether there is one.
  bool look() {
    return spin_.look([&] { return socket_.receive(); });
  }

  // Whether there was a packet, or an error, before `end_s` of the monotonic clock and before the
  // caller is to look for signals: one that came just before does not interrupt the sleep.
  bool sleep(double end_s) {
    const double left_s = std::min(kLongestSleepS, end_s - now_s());
    if (left_s <= 0) return false;
    pollfd ready = {socket_.fd(), POLLIN, 0};
    poll(&ready, 1, static_cast<int>(1000 * left_s) + 1);  // rounded up: 0 would not sleep
    return socket_.receive();
  }

  const PacketSocket& socket() const { return socket_; }

 private:
  static constexpr double kLongestSleepS = 0.1;

  PacketSocket socket_;
  Spin spin_;
};

struct Range {
  uintptr_t at;
  size_t num_bytes;
};

struct LayerCall {
  std::string head;  // the first part of the packet, and the answer if it has no receipt
  Range query, key, value, output;

  void put(uintptr_t query_from, uintptr_t key_from, uintptr_t value_from) const {
    copy(query, query_from);
    copy(key, key_from);
    copy(value, value_from);
  }

  void take(uintptr_t output_to) const {
    std::memcpy(pointer<void>(output_to), pointer<const void>(output.at), output.num_bytes);
  }

 private:
  static void copy(const Range& range, uintptr_t from) {
    std::memcpy(pointer<void>(range.at), pointer<const void>(from), range.num_bytes);
  }
};

}  // namespace kvplane
