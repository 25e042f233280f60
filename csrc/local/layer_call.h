// The client's end: a layer's tensors are copied to the region, its packet is sent, and its output
// copied from there.
#pragma once

#include <poll.h>

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "local/packets.h"
#include "tensor_view.h"

namespace kvplane {

// What waits for answers on a socket.
class AnswerSocket {
 public:
  AnswerSocket(int fd, double spin_s) : socket_(fd), spin_(spin_s) {}

  bool send(const std::string& packet) { return socket_.send_now(packet); }

  // Whether there was a packet, or an error, before `end_s` of the monotonic clock. Returns early,
  // with an error of EINTR, for a signal.
  bool wait(double end_s) {
    while (!spin_.look([&] { return socket_.receive(); })) {
      const double left_s = end_s - now_s();
      if (left_s <= 0) return false;
      pollfd ready = {socket_.fd(), POLLIN, 0};
      // Rounded up: 0 would not sleep.
      if (poll(&ready, 1, static_cast<int>(1000 * left_s) + 1) < 0) return false;
    }
    return true;
  }

  const PacketSocket& socket() const { return socket_; }

 private:
  PacketSocket socket_;
  Spin spin_;
};

struct Range {
  uintptr_t at;
  size_t num_bytes;
};

struct LayerCall {
  std::string packet;
  std::string usual;  // the answer, but for a receipt
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
