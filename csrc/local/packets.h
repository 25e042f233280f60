// The Unix socket of a local execution without the interpreter's lock: the C++ counterpart of
// kvplane/transport/local/{packets,spin}.py.
#pragma once

#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace kvplane {

inline constexpr size_t kMaxPacketBytes = 131072;

// A bound layer's packet: its binding, and the plan and the pass that it belongs to. Its answer is
// the first part. See kvplane/transport/local/packets.py.
struct LayerHead {
  uint8_t zero;  // no protobuf message begins with it
  uint8_t kind;
  uint16_t padding;
  uint32_t binding;
};
static_assert(sizeof(LayerHead) == 8);
inline constexpr uint8_t kLayerKind = 1;

// The monotonic clock, as Python's time.monotonic.
inline double now_s() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// One end of a socket, with room for a packet. Used by one thread at a time.
class PacketSocket {
 public:
  explicit PacketSocket(int fd) : fd_(fd), buffer_(kMaxPacketBytes) {}

  int fd() const { return fd_; }

  // Returns whether there is a packet, or an error: see `error`.
  bool receive() {
    const ssize_t size = recv(fd_, buffer_.data(), buffer_.size(), MSG_DONTWAIT | MSG_TRUNC);
    if (size < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return false;
    if (size < 0) {
      error_ = errno;
    } else if (size == 0 || static_cast<size_t>(size) > kMaxPacketBytes) {
      error_ = size == 0 ? ECONNRESET : EMSGSIZE;
    } else {
      size_ = static_cast<size_t>(size);
    }
    return true;
  }

  // Sends without waiting. A peer that does not read its packets is an error too.
  bool send_now(const std::string& packet) {
    if (send(fd_, packet.data(), packet.size(), MSG_DONTWAIT | MSG_NOSIGNAL) >= 0) return true;
    error_ = errno;
    return false;
  }

  bool is(const std::string& packet) const {
    return size_ == packet.size() && packet.compare(0, size_, buffer_.data(), size_) == 0;
  }

  // The binding of the layer that the packet asks for, if it ends with what `named` says.
  std::optional<uint32_t> asks_for_layer(const std::string& named) const {
    LayerHead head;
    if (size_ != sizeof head + named.size()) return std::nullopt;
    std::memcpy(&head, buffer_.data(), sizeof head);
    const bool is_layer = head.zero == 0 && head.kind == kLayerKind && head.padding == 0;
    if (!is_layer || std::memcmp(buffer_.data() + sizeof head, named.data(), named.size()) != 0) {
      return std::nullopt;
    }
    return head.binding;
  }

  std::string packet() const { return {buffer_.data(), size_}; }

  // The latest error's errno; 0 for none. It is never cleared.
  int error() const { return error_; }

 private:
  const int fd_;
  std::vector<char> buffer_;
  size_t size_ = 0;
  int error_ = 0;
};

// Lets a thread poll for a while before it sleeps. Polling pauses when other threads want the core:
// the scheduler then takes it, for milliseconds at a time, from a thread that only polls. A pause
// is a multiple of the time lost to the other thread, and a second at most, so that little time is
// lost whether others come often or not.
class Spin {
 public:
  explicit Spin(double spin_s) : spin_s_(spin_s) {}

  // Calls `find` until it returns true or the time is over, at `end_s` of the monotonic clock at
  // the latest. Returns the last result of `find`.
  template <typename Find>
  bool look(const Find& find, double end_s = std::numeric_limits<double>::infinity()) {
    double now = now_s();
    const double end = std::min(end_s, now + spin_s_);
    while (true) {
      const bool found = find();
      const double before = now;
      now = now_s();
      if (now - before > kInterruptedS && was_preempted()) {
        not_before_ = now + std::min(kPauseOfLoss * (now - before), kLongestPauseS);
      }
      if (found || now >= end || now < not_before_) return found;
    }
  }

 private:
  static constexpr double kInterruptedS = 0.0003;
  static constexpr double kPauseOfLoss = 16;
  static constexpr double kLongestPauseS = 1;

  // Returns whether another thread took the core since the last call. A hypervisor that took it
  // does not count: then no thread here gets it.
  bool was_preempted() {
    rusage used;
    getrusage(RUSAGE_THREAD, &used);
    return std::exchange(num_preemptions_, used.ru_nivcsw) != used.ru_nivcsw;
  }

  const double spin_s_;
  double not_before_ = 0;
  long num_preemptions_ = 0;
};

}  // namespace kvplane
