// The two ends of local execution as Python classes. They run without the interpreter's lock.
#pragma once

#include <fcntl.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cerrno>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "local/layer_call.h"
#include "local/layer_server.h"

namespace kvplane {

inline void raise_if(int error) {
  if (error == 0) return;
  errno = error;
  PyErr_SetFromErrno(PyExc_OSError);
  throw pybind11::error_already_set();
}

// Waits for the next packet. Raises OSError, TimeoutError, and exceptions of signal handlers.
inline void wait_for_packet(AnswerSocket& answers, double end_s) {
  for (bool got = false, is_first = true;; is_first = false) {
    {
      const pybind11::gil_scoped_release released;
      got = (is_first && answers.look()) || answers.sleep(end_s);
    }
    raise_if(answers.socket().error());
    if (got) return;
    if (now_s() >= end_s) {
      PyErr_SetString(PyExc_TimeoutError, "no packet");
      throw pybind11::error_already_set();
    }
    if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
  }
}

inline void bind_layer_server(pybind11::module_& m) {
  namespace py = pybind11;
  using py::arg;
  py::class_<LayerServer>(m, "LayerServer", py::module_local())
      .def(py::init<int, double, double>(), py::kw_only(), arg("fd"), arg("spin_s"), arg("most_s"))
      .def("clear", &LayerServer::clear)
      .def("bind", &LayerServer::bind, py::kw_only(), arg("binding"), arg("index"), arg("group"),
           arg("num_tokens"), arg("layer"), arg("query"), arg("key"), arg("value"), arg("out"))
      .def("unbind", &LayerServer::unbind, arg("binding"))
      .def(
          "begin",
          [](LayerServer& self, const std::vector<const BoundBatch*>& batches, size_t next,
             size_t end, int num_threads,
             const py::bytes& named) { self.begin(batches, next, end, num_threads, named); },
          arg("batches"), arg("next"), arg("end"), arg("num_threads"), arg("named"))
      .def(
          "asks_for_layer",
          [](const LayerServer& self, const py::bytes& named) {
            return self.asks_for_layer(named);
          },
          arg("named"))
      .def(
          "look",
          [](LayerServer& self, int epoll, bool waits) {
            bool found = false;
            {
              const py::gil_scoped_release released;
              found = self.look(epoll, waits);
            }
            raise_if(self.error());
            return found;
          },
          arg("epoll"), arg("waits"))
      .def(
          "serve",
          [](LayerServer& self, int epoll, bool waits) {
            {
              const py::gil_scoped_release released;
              self.serve(epoll, waits);
            }
            raise_if(self.error());
          },
          arg("epoll"), arg("waits"))
      .def("take",
           [](LayerServer& self) -> py::object {
             const std::optional<std::string> packet = self.take();
             if (!packet) return py::none();
             return py::bytes(*packet);
           })
      .def("take_ran", &LayerServer::take_ran);
}

inline void bind_layer_calls(pybind11::module_& m) {
  namespace py = pybind11;
  using py::arg;
  using PyRange = std::pair<uintptr_t, size_t>;
  py::class_<LayerCall>(m, "LayerCall", py::module_local())
      .def(py::init([](const py::bytes& head, PyRange query, PyRange key, PyRange value,
                       PyRange output) {
             const auto range = [](PyRange pair) { return Range{pair.first, pair.second}; };
             return LayerCall{head, range(query), range(key), range(value), range(output)};
           }),
           py::kw_only(), arg("head"), arg("query"), arg("key"), arg("value"), arg("output"));
  py::class_<AnswerSocket>(m, "AnswerSocket", py::module_local())
      .def(py::init([](int fd, double spin_s) {
             const int own_fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
             raise_if(own_fd < 0 ? errno : 0);
             return std::make_unique<AnswerSocket>(own_fd, spin_s);
           }),
           py::kw_only(), arg("fd"), arg("spin_s"))
      .def(
          "receive",
          [](AnswerSocket& self, double timeout_s) {
            wait_for_packet(self, now_s() + timeout_s);
            return py::bytes(self.socket().packet());
          },
          arg("timeout_s"))
      .def(
          "call",
          [](AnswerSocket& self, const LayerCall& call, const py::bytes& named, uintptr_t query,
             uintptr_t key, uintptr_t value, uintptr_t out, double timeout_s) -> py::object {
            const std::string packet = call.head + std::string(named);
            {
              const py::gil_scoped_release released;
              call.put(query, key, value);
              self.send(packet);
            }
            raise_if(self.socket().error());
            wait_for_packet(self, now_s() + timeout_s);
            if (!self.socket().is(call.head)) return py::bytes(self.socket().packet());
            call.take(out);
            return py::none();
          },
          arg("layer"), arg("named"), arg("query"), arg("key"), arg("value"), arg("out"),
          arg("timeout_s"));
}

}  // namespace kvplane
