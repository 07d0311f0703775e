// The module _C: host-side cores that take no traced tensor. Each file of this folder and of comm/ adds its own part.
#include <pybind11/pybind11.h>

namespace merak {}

PYBIND11_MODULE(_C, module) { module.doc() = "Host-side cores of megatron_merak."; }
