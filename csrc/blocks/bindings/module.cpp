#include "bindings/bindings.h"

PYBIND11_MODULE(_native, module) {
  kvplane::blocks::bind_hashes(module);
  kvplane::blocks::bind_codes(module);
  kvplane::blocks::bind_pool(module);
  kvplane::blocks::bind_steps(module);
  kvplane::blocks::bind_answers(module);
  kvplane::blocks::bind_extras(module);
}
